"""Checkpoints whose weights are stored quantised: transformers loads them, with the library that they were made with.

Their products run as that library has them: layers.py leaves alone what is no ordinary product of floats.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from batchrun.engine.checkpoint import Checkpoint
from batchrun.errors import ConfigError

# What each method of a `quantization_config` needs beside transformers: module, and package of pip.
PACKAGES: dict[str, tuple[tuple[str, str], ...]] = {
    "aqlm": (("aqlm", "aqlm[gpu,cpu]"), ("accelerate", "accelerate")),
    "auto-round": (("auto_round", "auto-round"),),
    "awq": (("gptqmodel", "gptqmodel"), ("accelerate", "accelerate")),
    "bitnet": (("accelerate", "accelerate"),),
    "bitsandbytes": (("bitsandbytes", "bitsandbytes"), ("accelerate", "accelerate")),
    "compressed-tensors": (("compressed_tensors", "compressed-tensors"),),
    "eetq": (("kernels", "kernels"), ("accelerate", "accelerate")),
    "fbgemm_fp8": (("fbgemm_gpu", "fbgemm-gpu-genai"), ("accelerate", "accelerate")),
    "fp8": (("accelerate", "accelerate"),),
    "gptq": (("gptqmodel", "gptqmodel"), ("optimum", "optimum")),
    "hqq": (("hqq", "hqq"), ("accelerate", "accelerate")),
    "mxfp4": (("accelerate", "accelerate"),),
    "quanto": (("optimum.quanto", "optimum-quanto"), ("accelerate", "accelerate")),
    "quark": (("quark", "amd-quark"),),
    "spqr": (("spqr_quant", "spqr-quant"), ("accelerate", "accelerate")),
    "torchao": (("torchao", "torchao"),),
    "vptq": (("vptq", "vptq"), ("accelerate", "accelerate")),
}


def quantization_method(config: Any) -> str | None:
    """By which method the weights of a transformers config are quantised; None for ordinary weights, "unnamed" if it
    does not say."""
    stored = stored_quantization(config)
    if stored is None:
        return None
    if stored.get("load_in_8bit") or stored.get("load_in_4bit"):
        return "bitsandbytes"
    return str(stored.get("quant_method") or "unnamed")


def stored_quantization(config: Any) -> dict[str, Any] | None:
    """The `quantization_config` of a transformers config, which is the whole model's or its language part's."""
    for part in (config, config.get_text_config(decoder=True)):
        stored = getattr(part, "quantization_config", None)
        if stored is not None:
            return dict(stored if isinstance(stored, dict) else stored.to_dict())
    return None


def check_quantized(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError, before any weights are read, for quantised ones that cannot be loaded or used as is asked."""
    method = quantization_method(checkpoint.config)
    if method is None:
        return
    options = checkpoint.model
    what = f"model={options.path}: its weights are quantised by {method}"
    if options.quantization != "none":
        raise ConfigError(f"{what}, and model.quantization={options.quantization} would round them again: set none")
    if checkpoint.adapter is not None or checkpoint.adapters:
        setting = "model.adapters" if checkpoint.adapters else "model.adapter"
        raise ConfigError(f"{what}, and {setting} needs those of the model that it was trained with, in floats")
    lacking = [package for module, package in PACKAGES.get(method, ()) if not _is_there(module)]
    if lacking:
        raise ConfigError(f"{what}, which needs a package that is not installed: pip install {' '.join(lacking)}")
    _ask_transformers(what, stored_quantization(checkpoint.config) or {}, device, dtype)


def _ask_transformers(what: str, stored: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    from transformers.quantizers import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(stored, pre_quantized=True)
        quantizer.validate_environment(dtype=dtype, device_map={"": device}, weights_only=True)
    except ImportError as error:
        raise ConfigError(f"{what}, which needs another package: {error}") from error
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{what}, which cannot be loaded here: {error}") from error


def placement(config: Any, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` that read quantised weights to the device at once: some cannot be moved."""
    if quantization_method(config) is None or not _is_there("accelerate"):
        return {}
    return {"device_map": {"": device}}


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is a part of
        return False

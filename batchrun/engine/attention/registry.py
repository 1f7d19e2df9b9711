"""`engine.attention` and `engine.kv_cache_dtype` by name. `auto` is the fastest backend that runs on the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from batchrun.config import EngineConfig
from batchrun.engine.attention.base import AttentionBackend, LayerGeometry
from batchrun.engine.attention.cpu import CpuAttention, Int8Attention
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.device import runs_triton, stores_fp8
from batchrun.errors import ConfigError

AUTO = "engine.attention=auto"
INVARIANT_BLOCK_SIZE = 128  # tokens, as many as the CPU's attention looks at together
BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchAttention, "cpu": CpuAttention}
# Modules any of which will do, and what installs them.
LIBRARIES = {
    "flash_attn": (("flash_attn_interface", "flash_attn"), "pip install flash-attn --no-build-isolation"),
    "flashinfer": (("flashinfer",), "pip install flashinfer-python"),
}


def attention_backend(
    name: str, device: torch.device, layers: Sequence[LayerGeometry] | None = None
) -> type[AttentionBackend]:
    """The backend class; with the model's `layers`, `auto` is one that takes their heads.

    Raises ConfigError for one that cannot run here, KeyError for a name that the config schema does not know.
    """
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "triton" if _triton_takes(device, layers) else "torch"
    if name in LIBRARIES:
        return _library(name, device)
    return _triton(device) if name == "triton" else BACKENDS[name]


def cache_backend(backend: type[AttentionBackend], kv_cache_dtype: str, device: torch.device) -> type[AttentionBackend]:
    """The class that keeps KV in this type, for `auto` the backend itself. Raises ConfigError if there is none."""
    if kv_cache_dtype == "auto":
        return backend
    if kv_cache_dtype == "fp8":
        return _fp8(backend, device)
    if backend is not CpuAttention:
        raise ConfigError(
            f"engine.kv_cache_dtype={kv_cache_dtype} is there for attention on the CPU only: set model.device=cpu and "
            "engine.attention=cpu, or engine.kv_cache_dtype=auto"
        )
    return Int8Attention


def invariant_backend(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """The class whose numbers of a row do not depend on its batch. Raises ConfigError if there is none."""
    if issubclass(backend, CpuAttention):
        return backend
    if backend.name != "triton":
        raise ConfigError(
            f"engine.batch_invariant=true is not there for attention by {backend.name}: use engine.attention=triton on "
            "a GPU and engine.attention=cpu on a CPU, where this model can have them, or engine.batch_invariant=false"
        )
    from batchrun.engine.attention.triton import Fp8Attention, InvariantAttention, InvariantFp8Attention

    return InvariantFp8Attention if issubclass(backend, Fp8Attention) else InvariantAttention


def page_size(config: EngineConfig, backend: type[AttentionBackend]) -> int:
    """Tokens in one page of the KV cache. Raises ConfigError for as many as the backend cannot take."""
    least = INVARIANT_BLOCK_SIZE if config.batch_invariant and issubclass(backend, CpuAttention) else 1
    size = config.block_size or max(least, backend.page_size)
    if size < least:
        raise ConfigError(
            f"engine.batch_invariant=true needs engine.block_size={least} or more, not {size}: the attention on a CPU "
            "sums smaller pages together, in groups that depend on the batch"
        )
    if size % backend.page_multiple:
        raise ConfigError(
            f"engine.block_size={size} is not a multiple of {backend.page_multiple}, which engine.attention="
            f"{backend.name} needs: leave it out, or set engine.block_size={backend.page_size}"
        )
    return size


def _fp8(backend: type[AttentionBackend], device: torch.device) -> type[AttentionBackend]:
    if backend.name != "triton":
        raise ConfigError(
            f"engine.kv_cache_dtype=fp8 is there for engine.attention=triton only, and attention is by {backend.name}: "
            "set model.device=cuda and engine.attention=triton, or engine.kv_cache_dtype=auto"
        )
    if not stores_fp8(device):
        raise ConfigError(
            f"engine.kv_cache_dtype=fp8 needs an NVIDIA GPU of compute capability 8.9 or later, which {device} is not: "
            "set engine.kv_cache_dtype=auto"
        )
    from batchrun.engine.attention.triton import Fp8Attention

    return Fp8Attention


def _triton_takes(device: torch.device, layers: Sequence[LayerGeometry] | None) -> bool:
    if not runs_triton(device):
        return False
    from batchrun.engine.attention.triton import MAX_HEAD_DIM, largest_head

    return layers is None or largest_head(layers) <= MAX_HEAD_DIM


def _library(name: str, device: torch.device) -> type[AttentionBackend]:
    modules, remedy = LIBRARIES[name]
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"engine.attention={name} needs a GPU, and model.device is {device.type}: set {AUTO}")
    found = [module for module in modules if find_spec(module) is not None]
    if found == ["flash_attn_interface"] and not _is_hopper(device):
        raise ConfigError(f"{device} is no Hopper, which FlashAttention-3 is for: {remedy}, or set {AUTO}")
    if not found:
        raise ConfigError(f"engine.attention={name} needs a package that is not installed: {remedy}, or set {AUTO}")
    if name == "flashinfer":
        from batchrun.engine.attention.flashinfer import FlashInferAttention

        return FlashInferAttention
    from batchrun.engine.attention.flash_attn import FlashAttention2, FlashAttention3

    return FlashAttention3 if "flash_attn_interface" in found and _is_hopper(device) else FlashAttention2


def _is_hopper(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def _triton(device: torch.device) -> type[AttentionBackend]:
    if device.type == "cuda" and not runs_triton(device):
        raise ConfigError(
            "engine.attention=triton needs Triton, which is not installed: pip install 'batchrun[gpu]', or set "
            "engine.attention=auto"
        )
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"engine.attention=triton needs a GPU, and model.device is {device.type}: set engine.attention=auto. "
            "(TRITON_INTERPRET=1 in the environment runs the kernels on a CPU in an interpreter, for tests)"
        )
    from batchrun.engine.attention.triton import TritonAttention

    return TritonAttention

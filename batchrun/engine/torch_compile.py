"""`engine.torch_compile=true`: decoder layers that are not fused, compiled by torch.

The attention over pages stays out of the graphs, which end before it and begin again after it. Layers that are alike
share their graphs, and the number of tokens in them is a variable: one set of graphs for a step of one token, whose
shapes torch treats apart, and one for all others. Both are made when the model loads.
"""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

import torch
from transformers import AttentionInterface

from batchrun.config import EngineConfig
from batchrun.engine import hook
from batchrun.engine.acceptance import TOLERANCE
from batchrun.engine.checkpoint import Checkpoint
from batchrun.engine.device import runs_triton
from batchrun.engine.layers import PROBE_TOKENS, decoder_layers, dry_logits
from batchrun.errors import ConfigError

log = logging.getLogger(__name__)

SETTING = "engine.torch_compile=true"
OFF = "set engine.torch_compile=false"


def check_compile(config: EngineConfig, checkpoint: Checkpoint, device: torch.device, *, encodes: bool) -> None:
    """Raise ConfigError, before any weights are loaded, where layers cannot be compiled or must not be."""
    wrong = None
    if config.batch_invariant:
        wrong = "engine.batch_invariant=true, as compiled layers round by the number of tokens"
    elif checkpoint.model.quantization != "none":
        wrong = f"model.quantization={checkpoint.model.quantization}, which has products of its own"
    elif checkpoint.adapters:
        wrong = "model.adapters, which change products by step: use model.adapter"
    elif encodes:
        wrong = "a model that gives vectors"
    if wrong:
        raise ConfigError(f"{SETTING} is not there for {wrong}; or {OFF}")
    if device.type == "cpu":
        _check_compiler()
    elif not runs_triton(device):
        raise ConfigError(f"{SETTING} needs Triton on {device}: pip install 'batchrun[gpu]', or {OFF}")


def _check_compiler() -> None:
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise ConfigError(
            f"{SETTING} needs a C++ compiler on a CPU, and there is no g++: install it (apt-get install g++), name "
            f"another in the environment by CXX, or {OFF}"
        ) from error


def compile_layers(model: Any) -> int:
    """Compile the decoder layers of a PagedModel that are transformers' own; returns how many they are.

    Raises ConfigError for a model whose layers torch cannot compile, or whose logits change.
    """
    layers = [layer for layer in decoder_layers(model.module) or [] if not _is_ours(layer)]
    if not layers:
        log.info("%s: all layers are fused, and none is left to compile", SETTING)
        return 0
    before, started = _probe(model), time.perf_counter()
    # The attention calls numba or Triton and finds its step in a context of the thread.
    AttentionInterface.register(hook.NAME, torch.compiler.disable(hook.paged_attention))
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    # An engine that is gone gives torch its threads back once it is collected: the compiler takes that for an error.
    gc.collect()
    try:
        found = _probe(model)
    except Exception as error:  # of any kind: the compiler's own, and those of the code that it makes
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{SETTING}: {_family(model)} cannot be compiled ({reason}): {OFF}") from error
    for each, expected in zip(found, before, strict=True):
        change = float((each - expected).norm() / expected.norm())
        if not change <= TOLERANCE[model.dtype]:
            raise ConfigError(f"{SETTING} changes the logits of {_family(model)} by {change:.2g}: {OFF}")
    log.info("%d layers are compiled, in %.1f s", len(layers), time.perf_counter() - started)
    return len(layers)


def _probe(model: Any) -> list[torch.Tensor]:
    return [dry_logits(model, tokens) for tokens in (PROBE_TOKENS, 1)]


def _is_ours(layer: Any) -> bool:
    return type(layer).__module__.startswith("batchrun.")


def _family(model: Any) -> str:
    return str(model.module.config.model_type)

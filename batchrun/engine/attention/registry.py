"""`engine.attention` and `engine.kv_cache_dtype` by name. `auto` is the fastest backend that runs on the device."""

from __future__ import annotations

import torch

from batchrun.engine.attention.base import AttentionBackend
from batchrun.engine.attention.cpu import CpuAttention, Int8Attention
from batchrun.engine.attention.torch import TorchAttention
from batchrun.errors import ConfigError

BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchAttention, "cpu": CpuAttention}


def attention_backend(name: str, device: torch.device) -> type[AttentionBackend]:
    """The backend class; raises KeyError for a name that the config schema does not know."""
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "torch"
    return BACKENDS[name]


def cache_backend(backend: type[AttentionBackend], kv_cache_dtype: str) -> type[AttentionBackend]:
    """The class that keeps KV in this type, for `auto` the backend itself. Raises ConfigError if there is none."""
    if kv_cache_dtype == "auto":
        return backend
    if backend is not CpuAttention:
        raise ConfigError(
            f"engine.kv_cache_dtype={kv_cache_dtype} is there for attention on the CPU only: set model.device=cpu and "
            "engine.attention=cpu, or engine.kv_cache_dtype=auto"
        )
    return Int8Attention

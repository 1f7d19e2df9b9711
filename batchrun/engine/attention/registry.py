"""`engine.attention` by name. `auto` is the fastest backend that runs on the device."""

from __future__ import annotations

import torch

from batchrun.engine.attention.base import AttentionBackend
from batchrun.engine.attention.cpu import CpuAttention
from batchrun.engine.attention.torch import TorchAttention

BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchAttention, "cpu": CpuAttention}


def attention_backend(name: str, device: torch.device) -> type[AttentionBackend]:
    """The backend class; raises KeyError for a name that the config schema does not know."""
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "torch"
    return BACKENDS[name]

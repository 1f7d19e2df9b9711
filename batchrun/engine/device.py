"""Whether a device runs our Triton kernels, and that they run there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch


@cache
def runs_triton(device: torch.device) -> bool:
    """A GPU of NVIDIA or AMD, with Triton installed: torch's packages for Linux bring it, others may not."""
    return device.type == "cuda" and find_spec("triton") is not None


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device the thread's own meanwhile: Triton launches there, whatever device its tensors are on. A new
    thread, and a worker of another GPU, begins with the first."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def stores_fp8(device: torch.device) -> bool:
    """Whether Triton kernels write float8_e4m3fn there: NVIDIA's of compute capability 8.9, and the interpreter."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)

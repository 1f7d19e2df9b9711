"""Whether a device runs our Triton kernels."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def runs_triton(device: torch.device) -> bool:
    """A GPU of NVIDIA or AMD, with Triton installed: torch's packages for Linux bring it, others may not."""
    return device.type == "cuda" and find_spec("triton") is not None

"""How many bits of float32 numbers go into a matrix product: all, or TF32's where `model.dtype=tf32` asks for it.

torch's settings are the process's, and other code may have changed them; ours hold for the forward pass of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from batchrun.errors import ConfigError
from batchrun_kernels.precision import IEEE

_backends: Any = torch.backends
# By kind of device. Each is of one operator, as what is set for a whole backend leaves what was set for an operator.
# torch's older names for them warn, or raise where both have been used.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "cuda": (_backends.cuda.matmul, _backends.cudnn.conv),
    "cpu": (_backends.mkldnn.matmul,),
}
LEAST_CAPABILITY = (8, 0)


@contextmanager
def float32_products(precision: str, device: torch.device) -> Iterator[None]:
    """Let torch on a device, and our kernels, multiply float32 numbers in `ieee` or `tf32`, whatever the process has
    set."""
    settings = SETTINGS.get(device.type, ())
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = precision
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def keep_angles_exact(module: torch.nn.Module, device: torch.device) -> int:
    """Let the modules that make rotary angles multiply in full: a position beyond 2048 has more bits than TF32 keeps.

    Returns how many there are.
    """
    rotary = [part for part in module.modules() if any("inv_freq" in name for name, _ in part.named_buffers("", False))]
    for part in rotary:
        part.forward = _in_full(part.forward, device)
    return len(rotary)


def _in_full(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    @wraps(forward)
    def exact(*args: Any, **kwargs: Any) -> Any:
        with float32_products(IEEE, device):
            return forward(*args, **kwargs)

    return exact


def check_tf32(device: torch.device) -> None:
    """Raise ConfigError where `model.dtype=tf32` cannot be had."""
    needs = "model.dtype=tf32 needs an NVIDIA GPU of compute capability 8.0 or later"
    if device.type != "cuda":
        raise ConfigError(f"{needs}, and model.device is {device.type}: set model.dtype=float32")
    if torch.version.hip is not None:
        raise ConfigError(f"{needs}, and {device} is a GPU of AMD: set model.dtype=float32")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        raise ConfigError(f"{needs}, and {device} has {major}.{minor}: set model.dtype=float32 or float16")

"""Tensors on their way from the device to the host."""

from __future__ import annotations

import numpy as np
import torch


class HostCopy:
    """A copy that is begun now and waited for when it is read. What was launched in between does not wait for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        on_gpu = tensor.device.type == "cuda"
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        self._tensor.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event() if on_gpu else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> np.ndarray:
        """The tensor as an array of its shape and type. Raises what the device says of work before the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        array: np.ndarray = self._tensor.numpy()
        return array

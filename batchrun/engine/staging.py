"""Host arrays of a step on their way to the device: many small arrays, one copy.

A copy from ordinary memory waits until the device has done all that was asked of it before, and each costs some
microseconds of the host; a step has dozens of small arrays. Here they are laid side by side in pinned memory, and one
copy that the host does not wait for takes all of them over.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch

TURNS = 3  # buffers: one that is filled, one that may be on its way, one that a step may still read
ALIGNMENT = 64  # bytes: Triton compiles a kernel again for a pointer that is not a multiple of 16
LEAST_BYTES = 2**16
TYPES: dict[type[np.generic], torch.dtype] = {np.int32: torch.int32, np.int64: torch.int64}

Put = Callable[..., torch.Tensor]  # Staging.put


class Buffer:
    """The same bytes on the host and on the device, there at `place` (uint8 [size]) if that is given."""

    def __init__(self, size: int, device: torch.device, place: torch.Tensor | None = None) -> None:
        self.size = size
        self.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device) if place is None else place
        # As integers of each type.
        self.host = {dtype: self.pinned.numpy().view(dtype) for dtype in TYPES}
        self.device = {dtype: self.bytes.view(there) for dtype, there in TYPES.items()}
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Until the last copy out of the host's memory is over."""
        if self._copied is not None:
            self._copied.synchronize()

    @torch.inference_mode()
    def copy(self, size: int) -> None:
        """The first bytes, in the order of what is launched on the device; the host does not wait."""
        self.bytes[:size].copy_(self.pinned[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.bytes.device))


def aligned(size: int) -> int:
    """So many bytes, or a few more, after which something else may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """The arrays on a device, in one copy that the host does not wait for. torch gives the pinned memory to nobody else
    before the copy is over."""
    *starts, size = accumulate((aligned(array.nbytes) for array in arrays), initial=0)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = pinned.numpy()
    for array, start in zip(arrays, starts, strict=True):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = pinned.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


class Staging:
    """`put` arrays, `send` them once: what `put` gave holds them from then on, for all that is launched later on the
    same stream, until TURNS - 1 more rounds were sent."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[Buffer | None] = [None] * TURNS
        self._turn = 0
        self._used = 0  # bytes of the round that is open
        self._full: list[tuple[Buffer, int]] = []  # of this round, and their bytes

    def put(self, array: np.ndarray, dtype: type[np.generic] | None = None) -> torch.Tensor:
        """Where the array will lie on the device, cast to `dtype` if that is given, which is one of TYPES."""
        dtype = array.dtype.type if dtype is None else dtype
        itemsize = TYPES[dtype].itemsize
        buffer = self._room(array.size * itemsize)
        start = self._used // itemsize
        stop = start + array.size
        buffer.host[dtype][start:stop] = array.ravel()
        self._used = aligned(stop * itemsize)
        place = buffer.device[dtype][start:stop]
        return place if array.ndim == 1 else place.view(array.shape)

    def send(self) -> None:
        """Copy what was put since the last call."""
        buffer = self._buffers[self._turn]
        if buffer is not None:
            self._full.append((buffer, self._used))
        for each, size in self._full:
            if size:
                each.copy(size)
        self._full, self._used = [], 0
        self._turn = (self._turn + 1) % TURNS

    def _room(self, size: int) -> Buffer:
        """The buffer of this round, once it may be written; a larger one beside it if this does not fit."""
        buffer = self._buffers[self._turn]
        if buffer is not None and not self._used and not self._full:
            buffer.wait()
        if buffer is None or self._used + size > buffer.size:
            if buffer is not None:
                self._full.append((buffer, self._used))
            least = LEAST_BYTES if buffer is None else 2 * buffer.size
            buffer = self._buffers[self._turn] = Buffer(max(least, 2 * size), self.device)
            self._used = 0
        return buffer

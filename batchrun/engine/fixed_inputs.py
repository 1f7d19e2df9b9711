"""What a recorded step reads: arrays that the host fills anew for each, at places on the device that stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from batchrun.engine.staging import Buffer, aligned


class Field(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class FixedInputs:
    """All fields lie in one piece of memory, which goes to the device in one copy that the host does not wait for.

    The host has the piece twice: the device may not have taken the last step's yet when the next one's is filled.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        *starts, size = accumulate((aligned(field.size) for field in fields.values()), initial=0)
        place = torch.zeros(size, dtype=torch.uint8, device=device)

        def views(piece: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: piece[start : start + field.size].view(field.dtype).view(field.shape)
                for (name, field), start in zip(fields.items(), starts, strict=True)
            }

        self.device = views(place)
        self._buffers = [Buffer(size, device, place) for _ in range(2)]
        self._host = [{name: view.numpy() for name, view in views(each.pinned).items()} for each in self._buffers]
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self._buffers[0].size

    def open(self) -> dict[str, np.ndarray]:
        """The arrays to fill for the next step, with what they held two steps ago; then `send`."""
        self._buffers[self._turn].wait()
        return self._host[self._turn]

    def send(self) -> None:
        """Copy what was filled to the device."""
        buffer = self._buffers[self._turn]
        buffer.copy(buffer.size)
        self._turn = 1 - self._turn

"""What a recorded step reads: arrays that the host fills anew for each, at places on the device that stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from batchrun.engine.staging import ALIGNMENT


class Field(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class FixedInputs:
    """All fields lie in one piece of memory, which goes to the device in one copy that the host does not wait for.

    The host has the piece twice: the device may not have taken the last step's yet when the next one's is filled.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        ends = np.cumsum([-(-_size(field) // ALIGNMENT) * ALIGNMENT for field in fields.values()]).tolist()
        starts = [0, *ends[:-1]]
        pinned = device.type == "cuda"
        self._pieces = [torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._taken: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._device = torch.zeros(ends[-1], dtype=torch.uint8, device=device)

        def views(piece: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: piece[start : start + _size(field)].view(field.dtype).view(field.shape)
                for (name, field), start in zip(fields.items(), starts, strict=True)
            }

        self.device = views(self._device)
        self._host = [{name: view.numpy() for name, view in views(piece).items()} for piece in self._pieces]

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self._device.nbytes

    def open(self) -> dict[str, np.ndarray]:
        """The arrays to fill for the next step, with what they held two steps ago; then `send`."""
        taken = self._taken[self._turn]
        if taken is not None:
            taken.synchronize()
        return self._host[self._turn]

    @torch.inference_mode()
    def send(self) -> None:
        """Copy what was filled to the device, in the order of what is launched there."""
        self._device.copy_(self._pieces[self._turn], non_blocking=True)
        if self._device.device.type == "cuda":
            taken = self._taken[self._turn] = self._taken[self._turn] or torch.cuda.Event()
            taken.record(torch.cuda.current_stream(self._device.device))
        self._turn = 1 - self._turn


def _size(field: Field) -> int:
    return math.prod(field.shape) * field.dtype.itemsize

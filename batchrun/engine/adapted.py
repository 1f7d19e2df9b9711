"""Products with adapters beside them, each for its own rows of a batch.

A product y = x W^T is followed by y += (x A^T) (scale B)^T for the tokens of each adapter in the step. Which token has
which reaches the products through a context of the thread, as attention gets its step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class StepAdapters:
    """The adapter of each of a step's T tokens, by number; 0: none. `rows` are those that products get just now."""

    def __init__(self, tokens: np.ndarray, device: torch.device) -> None:
        self.tokens = tokens
        self.rows: slice = slice(0, len(tokens))
        self._device = device
        self._groups: dict[tuple[int, int], list[tuple[int, Any]]] = {}

    def groups(self) -> list[tuple[int, Any]]:
        """Each adapter among `rows`, with the places of its tokens there; made once for all layers."""
        key = (self.rows.start, self.rows.stop)
        if key not in self._groups:
            tokens = self.tokens[self.rows]
            self._groups[key] = [
                (adapter, self._places(tokens == adapter)) for adapter in np.unique(tokens).tolist() if adapter
            ]
        return self._groups[key]

    def _places(self, chosen: np.ndarray) -> Any:
        return slice(None) if chosen.all() else torch.from_numpy(np.flatnonzero(chosen)).to(self._device)


class _Current(threading.local):
    step: StepAdapters | None = None


_current = _Current()


@contextmanager
def adapted(tokens: np.ndarray | None, device: torch.device) -> Iterator[None]:
    """Let products add what the adapters of these tokens (int64 [T]) say; None: no token has one."""
    _current.step = None if tokens is None else StepAdapters(tokens, device)
    try:
        yield
    finally:
        _current.step = None


def row_chunks(rows: int, size: int) -> Iterator[slice]:
    """Slices of a step's tokens, one after the other; the products in between are given those of the slice."""
    step = _current.step
    for start in range(0, rows, size):
        chunk = slice(start, min(start + size, rows))
        if step is not None:
            step.rows = chunk
        yield chunk
    if step is not None:
        step.rows = slice(0, len(step.tokens))


class AdaptedLinear(torch.nn.Module):
    """A product, packed or not, and what each adapter adds to it: by adapter A [R, in] and scale B [out, R]."""

    def __init__(self, product: Any, deltas: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.product = product
        self.deltas = deltas
        self.in_features = next(iter(deltas.values()))[0].shape[1]
        self.out_features = next(iter(deltas.values()))[1].shape[0]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the product takes and gives: x [..., in] -> [..., out]."""
        y: torch.Tensor = self.product(x, *args, **kwargs)
        step = _current.step
        if step is None or not x.numel():
            return y
        rows, out = x.reshape(-1, self.in_features), y.view(-1, self.out_features)
        if len(rows) != step.rows.stop - step.rows.start:
            raise ValueError(f"{len(rows)} rows in place of {step.rows.stop - step.rows.start} tokens")
        for adapter, places in step.groups():
            if adapter in self.deltas:
                a, b = self.deltas[adapter]
                out[places] = torch.addmm(out[places], rows[places] @ a.T, b.T)
        return y

    def gated(self, x: torch.Tensor, kind: int) -> torch.Tensor | None:
        """As `PackedLinear.gated`, where no adapter comes between the product and the activation."""
        step = _current.step
        if step is not None and any(adapter in self.deltas for adapter, _ in step.groups()):
            return None
        gated: torch.Tensor | None = self.product.gated(x, kind)
        return gated

"""Products with adapters beside them, each for its own rows of a batch.

A product y = x W^T is followed by y += (x A^T) (scale B)^T for the tokens of each adapter in the step. Which token has
which reaches the products through a context of the thread, as attention gets its step: as an array, or for steps that
are recorded as a tensor, which the host does not look at.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from batchrun.engine.staging import upload


class StepAdapters(ABC):
    """The adapter of each of a step's T tokens, by number; 0: none. `rows` are those that products get just now."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: slice = slice(0, count)

    @abstractmethod
    def may_add(self, product: AdaptedLinear) -> bool:
        """Whether an adapter of these rows changes the product."""

    @abstractmethod
    def add(self, product: AdaptedLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to y [rows, out] what the adapters say of x [rows, in], in place."""


class HostAdapters(StepAdapters):
    """Each adapter in the step has its product, of its own rows."""

    def __init__(self, tokens: np.ndarray, device: torch.device) -> None:
        super().__init__(len(tokens))
        self._tokens = tokens
        self._device = device
        self._groups: dict[tuple[int, int], list[tuple[int, Any]]] = {}

    def may_add(self, product: AdaptedLinear) -> bool:
        return any(adapter in product.deltas for adapter, _ in self._here())

    def add(self, product: AdaptedLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        for adapter, places in self._here():
            if adapter in product.deltas:
                a, b = product.deltas[adapter]
                y[places] = torch.addmm(y[places], x[places] @ a.T, b.T)

    def _here(self) -> list[tuple[int, Any]]:
        """Each adapter among `rows`, with the places of its tokens there; made once for all layers."""
        key = (self.rows.start, self.rows.stop)
        if key not in self._groups:
            tokens = self._tokens[self.rows]
            self._groups[key] = [
                (adapter, self._places(tokens == adapter)) for adapter in np.unique(tokens).tolist() if adapter
            ]
        return self._groups[key]

    def _places(self, chosen: np.ndarray) -> Any:
        return slice(None) if chosen.all() else upload(self._device, np.flatnonzero(chosen))[0]


class DeviceAdapters(StepAdapters):
    """All adapters have one product, of all rows, and of each row only what its own adapter made of it goes on: the
    same launches for any rows."""

    def __init__(self, tokens: torch.Tensor) -> None:
        super().__init__(len(tokens))
        self._tokens = tokens

    def may_add(self, product: AdaptedLinear) -> bool:
        return True

    def add(self, product: AdaptedLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        own = self._tokens[self.rows, None] == product.owners
        y.addmm_(torch.where(own, x @ product.a.T, 0), product.b.T)


class _Current(threading.local):
    step: StepAdapters | None = None


_current = _Current()


@contextmanager
def adapted(tokens: np.ndarray | torch.Tensor | None, device: torch.device) -> Iterator[None]:
    """Let products add what the adapters of these tokens (int64 [T]) say; None: no token has one."""
    if isinstance(tokens, torch.Tensor):
        _current.step = DeviceAdapters(tokens)
    else:
        _current.step = None if tokens is None else HostAdapters(tokens, device)
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
        step.rows = slice(0, step.count)


class AdaptedLinear(torch.nn.Module):
    """A product, packed or not, and what each adapter adds to it: by adapter A [R, in] and scale B [out, R]."""

    def __init__(self, product: Any, deltas: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.product = product
        ranks = [len(a) for a, _ in deltas.values()]
        self.a = torch.cat([a for a, _ in deltas.values()])  # [S, in]: of all adapters
        self.b = torch.cat([b for _, b in deltas.values()], dim=1)  # [out, S]
        numbers = torch.tensor(list(deltas), device=self.a.device)
        self.owners = numbers.repeat_interleave(torch.tensor(ranks, device=self.a.device))  # int64 [S]
        self.deltas = dict(zip(deltas, zip(self.a.split(ranks), self.b.split(ranks, dim=1), strict=True), strict=True))
        self.in_features, self.out_features = self.a.shape[1], self.b.shape[0]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the product takes and gives: x [..., in] -> [..., out]."""
        y: torch.Tensor = self.product(x, *args, **kwargs)
        step = _current.step
        if step is None or not x.numel():
            return y
        rows, out = x.reshape(-1, self.in_features), y.view(-1, self.out_features)
        if len(rows) != step.rows.stop - step.rows.start:
            raise ValueError(f"{len(rows)} rows in place of {step.rows.stop - step.rows.start} tokens")
        step.add(self, rows, out)
        return y

    def gated(self, x: torch.Tensor, kind: int) -> torch.Tensor | None:
        """As `PackedLinear.gated`, where no adapter comes between the product and the activation."""
        step = _current.step
        if step is not None and step.may_add(self):
            return None
        gated: torch.Tensor | None = self.product.gated(x, kind)
        return gated


def adapter_bytes(module: torch.nn.Module) -> int:
    """Of the factors of all adapters in a module."""
    return sum(x.nbytes for m in module.modules() if isinstance(m, AdaptedLinear) for x in (m.a, m.b))

"""Log-probabilities of generated tokens, for the rows that ask."""

from __future__ import annotations

import numpy as np
import torch

from batchrun.engine.params import TokenLogprobs


class LogprobRecord:
    """Those of one row so far, in arrays that double when they are full."""

    def __init__(self, count: int) -> None:
        """`count`: likeliest tokens beside each generated one."""
        self.count = count
        self._length = 0
        self._ids = np.empty((16, count + 1), dtype=np.int32)
        self._values = np.empty((16, count + 1), dtype=np.float32)

    def add(self, ids: np.ndarray, values: np.ndarray) -> None:
        """One generated token: int32 and float32 [count + 1]."""
        if self._length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._values = np.concatenate([self._values, np.empty_like(self._values)])
        self._ids[self._length], self._values[self._length] = ids, values
        self._length += 1

    def add_unsampled(self, token: int) -> None:
        """One token that no step has sampled."""
        self.add(np.full(self.count + 1, token), np.full(self.count + 1, np.nan))

    def drop_last(self) -> None:
        """The token added last has been taken back."""
        self._length -= 1

    def take(self) -> TokenLogprobs:
        return TokenLogprobs(self._ids[: self._length].copy(), self._values[: self._length].copy())


class StepLogprobs:
    """Log-softmax of the logits of some rows of a step, taken before anything changes them."""

    def __init__(self, logits: torch.Tensor, asking: np.ndarray, most: int) -> None:
        """logits float32 [K, V]; `asking` int64 [A]: places of rows; `most`: tokens that any of them wants."""
        self._asking = torch.from_numpy(asking).to(logits.device)
        self._all = logits[self._asking].log_softmax(dim=-1)
        self._best = self._all.topk(most, dim=-1)

    def with_chosen(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int32 and log-probabilities float32 [A, 1 + most], those of the step's tokens (int64 [K]) in front."""
        chosen = tokens[self._asking][:, None].clamp(min=0)
        ids = torch.cat([chosen, self._best.indices], dim=1).int()
        return ids, torch.cat([self._all.gather(1, chosen), self._best.values], dim=1)

"""Log-probabilities of generated tokens, for the rows that ask."""

from __future__ import annotations

import numpy as np
import torch

from batchrun.engine.device import runs_triton
from batchrun.engine.params import TokenLogprobs
from batchrun.engine.staging import upload

EXACT_ROWS = 16  # looked through at once: the keys of all rows would be the largest tensor of a step
LAST_ID = 2**32 - 1


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


def likeliest(logits: torch.Tensor, count: int, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row of logits [K, V], largest first, and their ids: [K, count] each.

    Which of equal ones are taken, and in which order, is up to torch, whose algorithm on a GPU follows from K; with
    `exact` those with the smallest ids come first.
    """
    if not exact:
        best = logits.topk(count, dim=-1)
        return best.values, best.indices
    token = torch.arange(logits.shape[-1], device=logits.device)
    found = []
    for rows in logits.split(EXACT_ROWS):
        bits = (rows.float() + 0.0).view(torch.int32)  # -0 is 0
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they compare like the numbers
        keys = (ordered.long() << 32) + (LAST_ID - token)
        found.append(LAST_ID - (keys.topk(count, dim=-1).values & LAST_ID))
    ids = torch.cat(found)
    return logits.gather(1, ids), ids


class StepLogprobs:
    """Log-softmax of the logits of some rows of a step, taken before anything changes them."""

    def __init__(self, logits: torch.Tensor, asking: np.ndarray, most: int, exact: bool = False) -> None:
        """logits float32 [K, V]; `asking` int64 [A]: places of rows; `most`: tokens that any of them wants."""
        (self._asking,) = upload(logits.device, asking)
        self._logits = logits[self._asking]
        values, ids = likeliest(self._logits, max(1, most), exact)
        self._largest, self._first = values[:, :1], self._logprob_of(ids[:, 0].contiguous())
        self._top_ids, self._top = ids[:, :most], self._logprobs(values[:, :most])

    def with_chosen(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int32 and log-probabilities float32 [A, 1 + most], those of the step's tokens (int64 [K]) in front."""
        chosen = tokens[self._asking][:, None].clamp(min=0)
        ids = torch.cat([chosen, self._top_ids], dim=1).int()
        return ids, torch.cat([self._logprobs(self._logits.gather(1, chosen)), self._top], dim=1)

    def _logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Of logits [A, n] of these rows."""
        return logits - self._largest + self._first

    def _logprob_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [A, 1], of one token (int64 [A]) of each row."""
        if runs_triton(tokens.device):
            from batchrun_kernels.token_logprobs import token_logprobs

            return token_logprobs(self._logits, tokens)[:, None]
        return self._logits.log_softmax(dim=-1).gather(1, tokens[:, None])

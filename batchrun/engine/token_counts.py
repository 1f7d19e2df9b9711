"""How often each row has each token, on the device: what penalties are made of, without a look at the tokens there."""

from __future__ import annotations

import numpy as np
import torch

from batchrun.engine.slots import Slots
from batchrun.engine.staging import upload
from batchrun_kernels.penalise import count_tokens, penalise

FILL_ROWS = 32  # counted at a time


def table_bytes(capacity: int, vocabulary: int) -> int:
    """What a table of TokenCounts takes on the device, with rows that are being counted."""
    return (capacity + min(capacity, FILL_ROWS)) * vocabulary * torch.int32.itemsize


class TokenCounts:
    """A table int32 [capacity, vocabulary] as batchrun_kernels/penalise.py wants it, made when a row first asks.

    Rows are counted when they begin and, token by token, as they are sampled (Feedback.note). One that has got or lost
    tokens in another way is counted again.
    """

    def __init__(self, slots: Slots, vocabulary: int, device: torch.device) -> None:
        self._slots = slots
        self._vocabulary = vocabulary
        self._device = device
        self.table: torch.Tensor | None = None
        self._tenant = np.zeros(slots.capacity, dtype=np.int64)  # admission that each slot's counts are of
        self._length = np.zeros(slots.capacity, dtype=np.int64)  # tokens that were counted

    def penalise(self, logits: torch.Tensor, rows: np.ndarray) -> None:
        """Change the logits (float [K, V], rows contiguous) of the slots `rows` (int64 [K]) as they ask, in place."""
        slots = self._slots
        self._update(rows[slots.penalised[rows]])
        if self.table is None:
            return
        wanted = slots.repetition_penalty, slots.frequency_penalty, slots.presence_penalty
        penalise(logits, self.table, *upload(logits.device, rows, *(values[rows] for values in wanted)))

    def sampled(self, rows: np.ndarray) -> None:
        """One more token of each of the slots `rows` is in the table."""
        self._length[rows] += 1

    def _update(self, rows: np.ndarray) -> None:
        """Count the tokens of those of the slots `rows` whose counts are not theirs."""
        slots = self._slots
        total = slots.num_tokens[rows] + slots.unread[rows]
        stale = rows[(self._tenant[rows] != slots.tenant[rows]) | (self._length[rows] != total)]
        if not len(stale):
            return
        if self.table is None:
            shape = (slots.capacity, self._vocabulary)
            self.table = torch.zeros(shape, dtype=torch.int32, device=self._device)
        for start in range(0, len(stale), FILL_ROWS):
            some = stale[start : start + FILL_ROWS]
            columns = int(slots.num_tokens[some].max())
            counts = torch.zeros(len(some), self._vocabulary, dtype=torch.int32, device=self._device)
            ids, places, prompts, totals, index = upload(
                self._device,
                slots.token_ids[some, :columns],
                np.arange(len(some)),
                slots.num_prompt[some],
                slots.num_tokens[some],
                some,
            )
            count_tokens(ids, places, prompts, totals, counts)
            self.table[index] = counts
        self._tenant[stale], self._length[stale] = slots.tenant[stale], slots.num_tokens[stale]

"""Rows that repeat themselves: their completion ends in one pattern of tokens several times over."""

from __future__ import annotations

import numpy as np

from batchrun.engine.params import SamplingParams


class RepetitionWatch:
    """Looks at the end of every running row that asks for it, for a few vector operations a step.

    For each size p of a pattern a row has a count: how many of its last tokens equal the one p places before. A pattern
    of p tokens stands there n times as soon as the count is p * (n - 1).
    """

    def __init__(self, capacity: int) -> None:
        self.max_pattern = np.zeros(capacity, dtype=np.int64)  # 0: the slot's row does not ask
        self.min_pattern = np.zeros(capacity, dtype=np.int64)
        self.min_count = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros((capacity, 1), dtype=np.int64)  # [slot, p - 1]

    def put(self, slot: int, params: SamplingParams, generated: np.ndarray) -> None:
        """A row starts in the slot; `generated` (int32 [n]) is what it had before it was preempted."""
        self.max_pattern[slot] = params.repetition_max_pattern
        self.min_pattern[slot], self.min_count[slot] = params.repetition_min_pattern, params.repetition_min_count
        width = params.repetition_max_pattern
        if width > self._counts.shape[1]:
            self._counts = np.pad(self._counts, ((0, 0), (0, width - self._counts.shape[1])))
        for p in range(1, width + 1):
            differs = np.flatnonzero(generated[p:] != generated[:-p])
            self._counts[slot, p - 1] = max(0, len(generated) - p) - (differs[-1] + 1 if len(differs) else 0)

    def look(
        self, rows: np.ndarray, token_ids: np.ndarray, num_tokens: np.ndarray, num_prompt: np.ndarray
    ) -> np.ndarray:
        """Which of the slots `rows` (int64 [K]) repeat themselves (bool [K]). Called once for each new token.

        The other arrays are those of all slots: tokens, int32 [N, W], and how many of them there are and are prompt.
        """
        found = np.zeros(len(rows), dtype=bool)
        asking = np.flatnonzero(self.max_pattern[rows])
        if not len(asking):
            return found
        slots = rows[asking]
        sizes = np.arange(1, self.max_pattern[slots].max() + 1)
        last = num_tokens[slots] - 1
        before = last[:, None] - sizes
        same = token_ids[slots[:, None], np.maximum(before, 0)] == token_ids[slots, last][:, None]
        # A prompt may be as repetitive as it likes.
        same &= before >= num_prompt[slots, None]
        counts = np.where(same, self._counts[slots, : len(sizes)] + 1, 0)
        self._counts[slots, : len(sizes)] = counts
        asked = (sizes >= self.min_pattern[slots, None]) & (sizes <= self.max_pattern[slots, None])
        found[asking] = (asked & (counts >= sizes * (self.min_count[slots, None] - 1))).any(axis=1)
        return found

"""Which of the waiting texts go into the next step: those of about one length. numpy only, no torch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

STEP_SHARE = 1 / 64  # what a step costs beside its tokens, as a share of the tokens that it may have


class LengthWindow:
    """Texts that wait, by key and length in tokens; `take` gives the keys of the next batch.

    A batch is padded to its longest text: `rows * longest` is at most `max_tokens`, save for one text that is longer.
    Texts are taken from the longest down, as many as make a token that is no padding cheapest. Those that come
    meanwhile fill the batches where they fit, but the longest of a batch is always one of the texts that were there at
    the start of the round, so none waits for ever.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self._lengths: dict[Hashable, int] = {}
        self._round: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._lengths)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._lengths

    def add(self, key: Hashable, length: int) -> None:
        self._lengths[key] = length

    def remove(self, key: Hashable) -> None:
        """Forget a text, if it is here."""
        self._lengths.pop(key, None)
        self._round.discard(key)

    def clear(self) -> list[Any]:
        """Forget all texts; returns their keys."""
        keys = list(self._lengths)
        self._lengths.clear()
        self._round.clear()
        return keys

    def take(self) -> list[Any]:
        """The keys of a batch, the longest text first. There must be one."""
        self._round = self._round or set(self._lengths)
        keys = list(self._lengths)
        lengths = np.fromiter(self._lengths.values(), dtype=np.int64, count=len(keys))
        order = np.argsort(-lengths, kind="stable")
        first = next(place for place, i in enumerate(order) if keys[i] in self._round)
        longest = int(lengths[order[first]])
        most = max(1, min(self.max_rows, self.max_tokens // longest))
        run = order[first : first + most]
        rows = np.arange(1, len(run) + 1)
        cost = (rows * longest + STEP_SHARE * self.max_tokens) / np.cumsum(lengths[run])
        taken = [keys[i] for i in run[: int(np.argmin(cost)) + 1].tolist()]
        for key in taken:
            self.remove(key)
        return taken

"""How long completions turn out to be, as a share of the tokens they may use.

Reserving `max_tokens` for every row wastes most of the cache when answers are short; assuming nothing
thrashes. The estimate is a running quantile of what finished rows used (SGLang's `new_token_ratio`
has the same purpose), raised at once when a preemption shows that it was too low.
"""

from __future__ import annotations

from collections import deque

import numpy as np

WINDOW = 512  # finished rows remembered
QUANTILE = 0.8
REFRESH = 16  # finished rows between two looks at the quantile
RAISE = 0.25  # added to the share by a preemption
DECAY = 0.97  # of that addition, per finished row


class LengthEstimate:
    """`share` in (0, 1]: expected completion tokens / allowed completion tokens."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._quantile = 1.0
        self._raise = 0.0

    @property
    def share(self) -> float:
        return min(1.0, self._quantile + self._raise)

    def observe(self, generated: int, allowed: int) -> None:
        """A row finished with `generated` of `allowed` tokens."""
        self._shares.append(generated / max(allowed, 1))
        self._seen += 1
        self._raise *= DECAY
        if self._seen % REFRESH == 0:
            self._quantile = float(np.quantile(np.fromiter(self._shares, dtype=np.float64), QUANTILE))

    def raise_after_preemption(self) -> None:
        self._raise = min(1.0, self._raise + RAISE)

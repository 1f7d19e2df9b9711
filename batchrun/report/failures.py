"""Rows that failed: a few of each kind on stderr, all of them counted, and an end to a run in which they are many."""

from __future__ import annotations

import logging
from collections import Counter

from batchrun.data.outputs import RowResult
from batchrun.errors import ErrorBudgetExceeded

SHOWN = 3  # of each kind

logger = logging.getLogger(__name__)


class Failures:
    """Counts the failed among the rows of this run. `max_rate` of them may fail, once there are `min_rows`."""

    def __init__(self, max_rate: float, min_rows: int) -> None:
        self.max_rate = max_rate
        self.min_rows = min_rows
        self.rows = 0
        self.kinds: Counter[str] = Counter()
        self.last: str | None = None

    def add(self, source_name: str, number: int, result: RowResult) -> None:
        """A row is finished."""
        self.rows += 1
        if result.status != "error":
            return
        kind = result.error_type or "error"
        self.kinds[kind] += 1
        self.last = f"{source_name} row {number}: {kind}: {result.error}"
        if self.kinds[kind] <= SHOWN:
            more = "; more rows of this kind are only counted" if self.kinds[kind] == SHOWN else ""
            logger.warning("%s%s", self.last, more)

    def check(self, under_way: int = 0) -> None:
        """Raise ErrorBudgetExceeded if too many rows failed.

        Rows under way count as good: one that cannot be sent is finished before those that were sent with it.
        """
        failed, rows = self.kinds.total(), self.rows + under_way
        if self.rows >= self.min_rows and failed > self.max_rate * rows:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())
            raise ErrorBudgetExceeded(
                f"{failed:,} of {rows:,} rows failed, more than run.max_error_rate={self.max_rate:g} allows: "
                f"{kinds}. The last one: {self.last}. Finished rows are kept; with a higher rate the same "
                "command goes on from them"
            )

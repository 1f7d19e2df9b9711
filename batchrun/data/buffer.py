"""A chunk under way: results arrive in any order and leave in input order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from batchrun.data.outputs import RowResult
from batchrun.data.plan import Chunk


class ChunkBuffer:
    """Input rows and results of one chunk. Rows are numbered within the input file, as in the chunk's bounds.

    Raises ValueError for a row outside the chunk, or one that comes twice.
    """

    def __init__(self, chunk: Chunk, source_name: str, restored: Mapping[int, RowResult] | None = None) -> None:
        self.chunk = chunk
        self.source_name = source_name
        self._batches: dict[int, pa.RecordBatch] = {}
        self._results: list[RowResult | None] = [None] * chunk.rows
        self._order: list[int] = []
        self._rows_left = chunk.rows
        for row, result in (restored or {}).items():
            self.add(row, result)

    def add_batch(self, first_row: int, batch: pa.RecordBatch) -> None:
        """Input rows from `first_row` on."""
        stop = first_row + batch.num_rows
        if first_row < self.chunk.start or stop > self.chunk.stop:
            raise ValueError(f"rows {first_row} to {stop} are not all in {self.chunk}")
        if any(first_row < at + other.num_rows and at < stop for at, other in self._batches.items()):
            raise ValueError(f"rows {first_row} to {stop} of {self.chunk} are here already")
        if batch.num_rows:
            self._batches[first_row] = batch
        self._rows_left -= batch.num_rows

    def add(self, row: int, result: RowResult) -> None:
        """The result of one row."""
        at = row - self.chunk.start
        if not 0 <= at < len(self._results):
            raise ValueError(f"row {row} is not in {self.chunk}")
        if self._results[at] is not None:
            raise ValueError(f"row {row} of {self.chunk} has a result already")
        self._results[at] = result
        self._order.append(row)

    @property
    def num_results(self) -> int:
        return len(self._order)

    def arrived(self, done: int) -> tuple[list[int], list[RowResult]]:
        """Rows and results in the order they came, without the first `done`. Another thread may add meanwhile."""
        rows = self._order[done:]
        results = [self._results[row - self.chunk.start] for row in rows]
        return rows, [result for result in results if result is not None]

    def without_result(self, first_row: int, stop_row: int) -> list[int]:
        """The rows from `first_row` up to `stop_row` that still need one."""
        start = self.chunk.start
        return [row for row in range(first_row, stop_row) if self._results[row - start] is None]

    @property
    def complete(self) -> bool:
        """Whether all input rows and all results are here."""
        return self._rows_left == 0 and len(self._order) == self.chunk.rows

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """Input rows in order."""
        return [self._batches[first] for first in sorted(self._batches)]

    @property
    def results(self) -> Sequence[RowResult]:
        """Results in row order. Raises ValueError while any is missing."""
        results = [result for result in self._results if result is not None]
        if len(results) < self.chunk.rows:
            raise ValueError(f"{self.chunk.rows - len(results)} rows of {self.chunk} have no result yet")
        return results

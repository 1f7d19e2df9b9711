"""A chunk under way: results arrive in any order and leave in input order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from batchrun.data.outputs import RowResult
from batchrun.data.plan import Chunk

Place = tuple[int, int]  # a row by its number in the input file, and which of its samples


class ChunkBuffer:
    """Input rows and results of one chunk. Rows are numbered within the input file, as in the chunk's bounds, and the
    samples of a row from 0.

    `restored` are results that are there already, by row and sample. Raises ValueError for a row outside the chunk, or
    one that comes twice.
    """

    def __init__(self, chunk: Chunk, source_name: str, restored: Mapping[Place, RowResult] | None = None) -> None:
        self.chunk = chunk
        self.source_name = source_name
        self._batches: dict[int, pa.RecordBatch] = {}
        self._results: list[RowResult | None] = [None] * chunk.results
        self._order: list[int] = []  # places in _results as they were filled
        self._rows_left = chunk.rows
        for (row, _), result in (restored or {}).items():
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
        """The result of one sample of a row."""
        at = (row - self.chunk.start) * self.chunk.samples + result.sample
        if not (0 <= result.sample < self.chunk.samples and 0 <= at < len(self._results)):
            raise ValueError(f"row {row}, sample {result.sample} is not in {self.chunk}")
        if self._results[at] is not None:
            raise ValueError(f"row {row}, sample {result.sample} of {self.chunk} has a result already")
        self._results[at] = result
        self._order.append(at)

    @property
    def num_results(self) -> int:
        return len(self._order)

    def arrived(self, done: int) -> tuple[list[int], list[RowResult]]:
        """Rows and results in the order they came, without the first `done`. Another thread may add meanwhile."""
        places = self._order[done:]
        results = [self._results[at] for at in places]
        rows = [self.chunk.start + at // self.chunk.samples for at in places]
        return rows, [result for result in results if result is not None]

    def without_result(self, first_row: int, stop_row: int) -> list[Place]:
        """The rows and samples from row `first_row` up to `stop_row` that still need one, in order."""
        start, samples = self.chunk.start, self.chunk.samples
        places = range((first_row - start) * samples, (stop_row - start) * samples)
        return [(start + at // samples, at % samples) for at in places if self._results[at] is None]

    @property
    def complete(self) -> bool:
        """Whether all input rows and all results are here."""
        return self._rows_left == 0 and len(self._order) == self.chunk.results

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """Input rows in order."""
        return [self._batches[first] for first in sorted(self._batches)]

    @property
    def results(self) -> Sequence[RowResult]:
        """Results in the order of rows, and of samples within them. Raises ValueError while any is missing."""
        results = [result for result in self._results if result is not None]
        if len(results) < self.chunk.results:
            raise ValueError(f"{self.chunk.results - len(results)} rows of {self.chunk} have no result yet")
        return results

"""What every format of the input offers: rows, schema and digest of a file, and its rows by ranges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

BATCH_ROWS = 1024
BATCH_BYTES = 64 << 20

# Columns that travel with a batch and are no data: why a row cannot be used (null for a good one), and its number
# in the file where the rows of the input are not all of the file's.
ROW_ERROR = "__batchrun_error"
ROW_NUMBER = "__batchrun_row"
RESERVED = (ROW_ERROR, ROW_NUMBER)

RowRange = tuple[int, int]


class FileInfo(NamedTuple):
    """What is known of a file before its rows are read. `digest` tells it from another file of that name."""

    rows: int
    schema: pa.Schema
    size: int  # bytes
    digest: str


class Reader(ABC):
    """A format. An instance serves all files of one input, and may keep what it learned of each."""

    @abstractmethod
    def inspect(self, path: str, limit: int | None) -> FileInfo:
        """Rows, at most `limit`, and the rest. Raises OSError, pa.ArrowException or InputError for a broken file."""

    @abstractmethod
    def batches(self, path: str, ranges: Sequence[RowRange], schema: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(number of the first row, batch) in file order, covering at least `ranges`.

        A batch has at least those columns of `schema` that the file has, and may have ROW_ERROR. Ranges are
        ascending and disjoint. Batches are small (BATCH_ROWS, BATCH_BYTES) whatever the file's layout.
        """

    def settle(self, paths: Sequence[str], schemas: Sequence[pa.Schema]) -> list[pa.Schema]:
        """The schemas of all files, once each is known: where types were inferred, made to agree.

        Raises InputError for files that cannot be one input.
        """
        return list(schemas)

    def may_match(self, path: str, expression: Any, rows: int) -> list[RowRange]:
        """Ranges outside of which no row meets a filter (a pyarrow.dataset expression)."""
        return [(0, rows)]


def pieces(first: int, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """A batch of any size as small ones, without copying."""
    rows = max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(1.0, batch.nbytes / max(1, batch.num_rows)))))
    for start in range(0, batch.num_rows, rows):
        yield first + start, batch.slice(start, rows)


def overlaps(start: int, stop: int, ranges: Sequence[RowRange]) -> bool:
    """Whether rows [start, stop) are asked for in part. Ranges are ascending and disjoint."""
    at = bisect_right(ranges, start, key=lambda bounds: bounds[1])
    return at < len(ranges) and ranges[at][0] < stop

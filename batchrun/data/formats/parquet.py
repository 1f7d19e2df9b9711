"""Parquet through pyarrow: only row groups that are needed are opened, and those are streamed page by page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from batchrun.data.formats import base
from batchrun.data.formats.base import FileInfo, Reader, RowRange
from batchrun.data.storage import Storage, is_url

BUFFER_BYTES = 1 << 20
REMOTE_BUFFER_BYTES = 8 << 20  # one request; each column under way holds one


class ParquetReader(Reader):
    """Rows and schema come from the footer; a filter skips row groups by their statistics."""

    def __init__(self, storage: Storage | None = None) -> None:
        self.storage = storage or Storage()

    def inspect(self, path: str, limit: int | None) -> FileInfo:
        with self._open(path) as file:
            rows, schema = file.metadata.num_rows, file.schema_arrow
        size, digest = self.storage.digest(path)
        return FileInfo(rows if limit is None else min(rows, limit), schema, size, digest)

    def batches(self, path: str, ranges: Sequence[RowRange], schema: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch]]:
        with self._open(path) as file:
            there = set(file.schema_arrow.names)
            columns = [name for name in schema.names if name in there]
            for row, groups in _runs_of_groups(file.metadata, ranges):
                rows = _rows_per_batch(file.metadata, groups)
                for batch in file.iter_batches(batch_size=rows, row_groups=groups, columns=columns):
                    yield row, batch
                    row += batch.num_rows

    def may_match(self, path: str, expression: Any, rows: int) -> list[RowRange]:
        with self._open(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
        with self._raw(path) as raw:
            fragment = ds.ParquetFileFormat().make_fragment(raw)
            try:
                kept = {group.id for group in fragment.subset(expression, schema=schema).row_groups}
            except pa.ArrowException:
                # Statistics say nothing about a column that this file lacks or has under another type.
                return [(0, rows)]
        ranges, start = [], 0
        for group in range(metadata.num_row_groups):
            stop = start + metadata.row_group(group).num_rows
            if group in kept and start < rows:
                ranges.append((start, min(stop, rows)))
            start = stop
        return ranges

    @contextmanager
    def _open(self, path: str) -> Iterator[pq.ParquetFile]:
        buffer = REMOTE_BUFFER_BYTES if is_url(path) else BUFFER_BYTES
        with self._raw(path) as raw, pq.ParquetFile(raw, pre_buffer=False, buffer_size=buffer) as file:
            yield file

    @contextmanager
    def _raw(self, path: str) -> Iterator[pa.NativeFile]:
        if is_url(path):
            with self.storage.open(path, random=True) as remote, pa.PythonFile(remote, mode="r") as file:
                yield file
        else:
            with pa.OSFile(path) as file:
                yield file


def _runs_of_groups(metadata: pq.FileMetaData, ranges: Sequence[RowRange]) -> list[tuple[int, list[int]]]:
    """Row groups that overlap `ranges`, as runs of neighbours: (first row of the run, group numbers)."""
    runs: list[tuple[int, list[int]]] = []
    start, at = 0, 0
    for group in range(metadata.num_row_groups):
        stop = start + metadata.row_group(group).num_rows
        while at < len(ranges) and ranges[at][1] <= start:
            at += 1
        if at == len(ranges):
            break
        if ranges[at][0] < stop:
            if runs and runs[-1][1][-1] == group - 1:
                runs[-1][1].append(group)
            else:
                runs.append((start, [group]))
        start = stop
    return runs


def _rows_per_batch(metadata: pq.FileMetaData, groups: Sequence[int]) -> int:
    """Rows whose uncompressed size is about BATCH_BYTES, at most BATCH_ROWS, by the group with the widest rows."""
    widest = max(
        (metadata.row_group(g).total_byte_size / max(1, metadata.row_group(g).num_rows) for g in groups), default=0.0
    )
    return max(1, min(base.BATCH_ROWS, int(base.BATCH_BYTES / max(1.0, widest))))

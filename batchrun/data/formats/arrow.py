"""Arrow IPC, as a file (also called Feather 2) or a stream, told apart by the first bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import pyarrow as pa

from batchrun.data.formats.base import FileInfo, Reader, RowRange, overlaps, pieces
from batchrun.data.storage import Storage, is_url

MAGIC = b"ARROW1"


class ArrowReader(Reader):
    """Local files are mapped into memory, so that skipped batches cost nothing but their headers."""

    def __init__(self, storage: Storage | None = None) -> None:
        self.storage = storage or Storage()
        self._starts: dict[str, list[int]] = {}  # by path: first row of each record batch, then the row count

    def inspect(self, path: str, limit: int | None) -> FileInfo:
        with self._open(path) as file:
            counts, schema = _batch_rows(file)
        size, digest = self.storage.digest(path)
        self._starts[path] = list(accumulate(counts, initial=0))
        rows = self._starts[path][-1]
        return FileInfo(rows if limit is None else min(rows, limit), schema, size, digest)

    def batches(self, path: str, ranges: Sequence[RowRange], schema: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch]]:
        starts = self._starts[path]
        with self._open(path) as file:
            for first, batch in _overlapping(file, starts, ranges, schema.names):
                yield from (
                    piece for piece in pieces(first, batch) if overlaps(piece[0], piece[0] + len(piece[1]), ranges)
                )

    @contextmanager
    def _open(self, path: str) -> Iterator[pa.NativeFile]:
        if is_url(path):
            with self.storage.open(path) as remote, pa.PythonFile(remote, mode="r") as file:
                yield file
        else:
            with pa.memory_map(path) as file:
                yield file


def _is_file(file: pa.NativeFile) -> bool:
    head = file.read(len(MAGIC))
    file.seek(0)
    return bool(head == MAGIC)


def _options(schema: pa.Schema, names: Sequence[str]) -> pa.ipc.IpcReadOptions:
    """Only the named columns; IPC takes an empty list for all, so one is read where none is asked for."""
    wanted = set(names)
    fields = [i for i, name in enumerate(schema.names) if name in wanted]
    return pa.ipc.IpcReadOptions(included_fields=fields or list(range(len(schema)))[:1])


def _batch_rows(file: pa.NativeFile) -> tuple[list[int], pa.Schema]:
    """Rows of each record batch, and the schema."""
    if _is_file(file):
        schema = pa.ipc.open_file(file).schema
        reader = pa.ipc.open_file(file, options=_options(schema, ()))
        return [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)], schema
    with pa.ipc.open_stream(file) as stream:
        return [batch.num_rows for batch in stream], stream.schema


def _overlapping(
    file: pa.NativeFile, starts: Sequence[int], ranges: Sequence[RowRange], names: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(first row, record batch) of those that hold rows of `ranges`."""
    if _is_file(file):
        schema = pa.ipc.open_file(file).schema
        reader = pa.ipc.open_file(file, options=_options(schema, names))
        done = 0
        for low, high in ranges:
            number = max(done, bisect_right(starts, low) - 1)
            while number < reader.num_record_batches and starts[number] < high:
                yield starts[number], reader.get_batch(number)
                number += 1
            done = number
        return
    first = 0
    with pa.ipc.open_stream(file) as stream:
        for batch in stream:
            if first >= ranges[-1][1]:
                return
            if overlaps(first, first + batch.num_rows, ranges):
                yield first, batch.select([name for name in names if name in batch.schema.names])
            first += batch.num_rows

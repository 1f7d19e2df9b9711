"""Text files as records: counted in one pass with a sparse index, read from the nearest indexed place."""

from __future__ import annotations

import hashlib
import io
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from batchrun.data.formats import base
from batchrun.data.formats.base import FileInfo, Reader, RowRange
from batchrun.data.storage import Storage
from batchrun.errors import InputError

INDEX_ROWS = 1024  # rows between two places that are remembered
WINDOW_ROWS = 10_000  # rows, and
WINDOW_BYTES = 8 << 20  # bytes, whichever is less, that types are inferred from


class Record(NamedTuple):
    """One row of a text file. Offsets are in bytes of the decompressed text, lines count from 1."""

    line: int
    start: int
    stop: int
    content: Any  # what the format makes of it without knowing types


class Place(NamedTuple):
    """Where a record begins, and the number of its row."""

    row: int
    offset: int
    line: int


class RecordIndex:
    """Every INDEX_ROWS-th record of a file: 16 bytes for each."""

    def __init__(self) -> None:
        self.rows = 0
        self._offsets = array("q")
        self._lines = array("q")

    def add(self, record: Record) -> None:
        if self.rows % INDEX_ROWS == 0:
            self._offsets.append(record.start)
            self._lines.append(record.line)
        self.rows += 1

    def before(self, row: int) -> Place:
        """The last remembered place at or before a row."""
        at = min(row // INDEX_ROWS, len(self._offsets) - 1)
        return Place(at * INDEX_ROWS, self._offsets[at], self._lines[at])


class RecordReader(Reader):
    """A format whose files are sequences of records without a table of contents.

    `digest` is the SHA-256 of the whole file when all of it is counted. Subclasses keep the types of the input once
    `settle` has been called.
    """

    def __init__(self, storage: Storage | None = None) -> None:
        self.storage = storage or Storage()
        self._index: dict[str, RecordIndex] = {}

    @abstractmethod
    def records(self, stream: io.BufferedReader, path: str, place: Place) -> Iterator[Record]:
        """The records from `place` on, where the stream stands. The first place of a file is (0, 0, 1)."""

    @abstractmethod
    def infer(self, path: str, window: list[Record]) -> pa.Schema:
        """The schema that the first records show. Raises InputError when they contradict each other."""

    @abstractmethod
    def build(self, path: str, records: Sequence[Record], schema: pa.Schema) -> pa.RecordBatch:
        """A batch of the columns of `schema` and of ROW_ERROR. A record that does not fit is a row of nulls."""

    def inspect(self, path: str, limit: int | None) -> FileInfo:
        index, digest = RecordIndex(), hashlib.sha256()
        window: list[Record] = []
        with self.storage.open_text(path, digest) as stream:
            for record in self.records(stream, path, Place(0, 0, 1)):
                index.add(record)
                if len(window) < WINDOW_ROWS and record.start < WINDOW_BYTES:
                    window.append(record)
                self.notice(path, record)
                if index.rows == limit:
                    break
            complete = not stream.peek(1)
        self._index[path] = index
        size, edges = self.storage.digest(path)
        return FileInfo(index.rows, self.infer(path, window), size, digest.hexdigest() if complete else edges)

    def notice(self, path: str, record: Record) -> None:
        """Called for each record as it is counted."""

    def batches(self, path: str, ranges: Sequence[RowRange], schema: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch]]:
        index = self._index[path]
        with self.storage.open_text(path) as stream:
            row, offset = 0, 0
            records = self.records(stream, path, Place(0, 0, 1))
            for start, stop in ranges:
                place = index.before(start)
                if place.row > row:
                    _skip(stream, place.offset - offset)
                    row, offset, records = place.row, place.offset, self.records(stream, path, place)
                first, held, held_bytes = start, [], 0
                for record in records:
                    row, offset = row + 1, record.stop
                    if row <= start:
                        continue
                    held.append(record)
                    held_bytes += record.stop - record.start
                    if row == stop or len(held) == base.BATCH_ROWS or held_bytes >= base.BATCH_BYTES:
                        yield first, self.build(path, held, schema)
                        first, held, held_bytes = row, [], 0
                    if row == stop:
                        break
                if held:
                    yield first, self.build(path, held, schema)


def _skip(stream: io.BufferedReader, count: int) -> None:
    """Go on by `count` bytes: a jump where the file allows it, else reading without looking."""
    if stream.seekable():
        stream.seek(count, io.SEEK_CUR)
        return
    while count > 0:
        count -= len(stream.read(min(count, 1 << 20))) or count


def with_errors(arrays: Sequence[pa.Array], schema: pa.Schema, errors: dict[int, str], rows: int) -> pa.RecordBatch:
    """A batch of converted columns with ROW_ERROR after them; `errors` is by row."""
    flags = pa.array([errors.get(row) for row in range(rows)], pa.string()) if errors else pa.nulls(rows, pa.string())
    fields = [*schema, pa.field(base.ROW_ERROR, pa.string())]
    return pa.RecordBatch.from_arrays([*arrays, flags], schema=pa.schema(fields, schema.metadata))


def declared_type(name: str, text: str) -> pa.DataType:
    """The Arrow type of `input.types`. Raises InputError for one that there is not."""
    try:
        return pa.type_for_alias(text)
    except ValueError:
        raise InputError(
            f"input.types.{name}={text} is not a type: use string, int64, float64, bool, date32, timestamp[us] "
            "or another of Arrow's scalar types, or json for the value's JSON text"
        ) from None

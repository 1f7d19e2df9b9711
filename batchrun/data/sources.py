"""Input files as Arrow rows: finding them, checking that they agree, reading row ranges in bounded memory."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.config import InputConfig
from batchrun.data.paths import find_files
from batchrun.data.values import clean_text
from batchrun.errors import InputError

BATCH_ROWS = 1024
BATCH_BYTES = 64 << 20
BUFFER_BYTES = 1 << 20
DIGEST_BYTES = 64 << 10
SHOWN_COLUMNS = 50

RowRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input.

    `name` is the path below the deepest folder that holds all files, with `/` between folders: the identity
    that output rows show. `rows` is what the job reads of it: the file's own count, or less under `input.limit`.
    `digest` is the SHA-256 of the size and of the first and last 64 KiB, which hold a Parquet file's footer
    with its statistics: an edited file of equal size and row count is told apart without reading all of it.
    """

    index: int
    path: str
    name: str
    size: int
    rows: int
    digest: str = ""


class Reader(Protocol):
    """A file format. A new one is a class with these members and a line in READERS."""

    suffix: str

    def inspect(self, path: str) -> tuple[int, pa.Schema]:
        """Number of rows and schema. Raises OSError or pa.ArrowException for a file it cannot read."""

    def batches(
        self, path: str, ranges: Sequence[RowRange], columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(number of the first row, batch) in file order, covering at least `ranges`, with at least `columns`.

        Ranges are ascending and disjoint. Batches are small (BATCH_ROWS, BATCH_BYTES) whatever the file's layout.
        """


class ParquetReader:
    """Parquet through pyarrow: only overlapping row groups are opened, and those are streamed page by page."""

    suffix = ".parquet"

    def inspect(self, path: str) -> tuple[int, pa.Schema]:
        with pq.ParquetFile(path) as file:
            return file.metadata.num_rows, file.schema_arrow

    def batches(
        self, path: str, ranges: Sequence[RowRange], columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES) as file:
            for row, groups in _runs_of_groups(file.metadata, ranges):
                rows = _rows_per_batch(file.metadata, groups)
                for batch in file.iter_batches(batch_size=rows, row_groups=groups, columns=list(columns)):
                    yield row, batch
                    row += batch.num_rows


READERS: dict[str, type[Reader]] = {"parquet": ParquetReader}


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
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(1.0, widest))))


class Source:
    """The whole input: files in the order of their rows, one schema, and a reader."""

    def __init__(self, reader: Reader, files: list[InputFile], schema: pa.Schema) -> None:
        self.reader = reader
        self.files = files
        self.schema = schema

    def read(
        self, file: InputFile, ranges: Sequence[RowRange], columns: Sequence[str] | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows of `ranges` (ascending, disjoint, half-open) as (number of the first row, batch), in one pass.

        A batch lies in one range and holds `columns` in that order (default: all of the schema's).
        Raises InputError naming the file if it can no longer be read, ValueError for ranges that are out of order.
        """
        names = self.schema.names if columns is None else list(columns)
        ranges = [(start, stop) for start, stop in ranges if start < stop]
        if any(b[0] < a[1] for a, b in pairwise(ranges)):
            raise ValueError(f"row ranges {ranges} of {file.name} must be ascending and disjoint")
        if not ranges:
            return
        schema = pa.schema([self.schema.field(name) for name in names], self.schema.metadata)
        at, expected = 0, ranges[0][0]
        try:
            for first, batch in self.reader.batches(file.path, ranges, names):
                while at < len(ranges) and ranges[at][0] < first + batch.num_rows:
                    start, stop = max(ranges[at][0], first), min(ranges[at][1], first + batch.num_rows)
                    yield start, _project(batch, schema).slice(start - first, stop - start)
                    expected = stop
                    if stop < ranges[at][1]:
                        break
                    at += 1
                if at == len(ranges):
                    return
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{file.path}: cannot read rows from {expected} on: {error}") from error
        raise InputError(f"{file.path} ends before row {ranges[-1][1]}: the file changed while the job ran")


def _project(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The schema's columns by name: a reader may return them in file order, or with namesakes of a dotted name."""
    if not schema.names:
        return batch.select([])
    return pa.RecordBatch.from_arrays([batch.column(name) for name in schema.names], schema=schema)


def open_source(config: InputConfig) -> Source:
    """Find and check the files that `input.path` names, in order of their paths.

    Under `input.limit`, files after the last row needed are not opened. Raises InputError for paths that find
    nothing, files that cannot be read, columns that are missing or doubled, and schemas that differ.
    """
    reader = READERS[config.format]()
    paths = find_files(config.path, reader.suffix)
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    files: list[InputFile] = []
    schema: pa.Schema | None = None
    left = config.limit
    for index, path in enumerate(paths):
        if left == 0:
            break
        rows, found = _inspect(reader, path, config.format)
        found = _select(found, config.columns, path)
        if schema is None:
            schema = found
        else:
            _check_same(paths[0], schema, path, found)
        if left is not None:
            rows = min(rows, left)
            left -= rows
        name = clean_text(os.path.relpath(path, root).replace(os.sep, "/"))
        size, digest = _digest(path)
        files.append(InputFile(index, path, name, size, rows, digest))
    assert schema is not None, "find_files returns at least one path and the limit is at least 1"
    return Source(reader, files, schema)


def _inspect(reader: Reader, path: str, format: str) -> tuple[int, pa.Schema]:
    try:
        return reader.inspect(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"{path} cannot be read as {format} ({error}): mend or remove the file, or narrow input.path"
        ) from error


def _digest(path: str) -> tuple[int, str]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            hashed = hashlib.sha256(size.to_bytes(8, "little"))
            for offset in (0, max(0, size - DIGEST_BYTES)):
                file.seek(offset)
                hashed.update(file.read(DIGEST_BYTES))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    return size, hashed.hexdigest()


def _select(schema: pa.Schema, columns: Iterable[str] | None, path: str) -> pa.Schema:
    wanted = list(schema.names if columns is None else columns)
    missing = [name for name in wanted if name not in schema.names]
    if missing:
        raise InputError(
            f"input.columns names {', '.join(missing)}, which {path} does not have; "
            f"its columns are {column_list(schema.names)}"
        )
    counts = Counter(schema.names)
    doubled = [name for name in dict.fromkeys(wanted) if counts[name] > 1]
    if doubled:
        raise InputError(
            f"{path} has more than one column named {', '.join(doubled)}: "
            "rename them, or leave the name out of input.columns"
        )
    return pa.schema([schema.field(name) for name in dict.fromkeys(wanted)], schema.metadata)


def _check_same(first: str, schema: pa.Schema, path: str, other: pa.Schema) -> None:
    """Columns are matched by name: their order and schema metadata may differ, names and types may not."""
    lines = []
    for name in dict.fromkeys([*schema.names, *other.names]):
        here = str(schema.field(name).type) if name in schema.names else "absent"
        there = str(other.field(name).type) if name in other.names else "absent"
        if here == "absent" or there == "absent" or schema.field(name).type != other.field(name).type:
            lines.append(f"\n  {name}: {here} / {there}")
    if lines:
        raise InputError(
            f"{first} and {path} differ in columns:{''.join(lines)}\n"
            "convert one of them, or list the columns they share in input.columns"
        )


def column_list(names: Sequence[str]) -> str:
    """Column names for a message."""
    more = f" and {len(names) - SHOWN_COLUMNS} more" if len(names) > SHOWN_COLUMNS else ""
    return (", ".join(names[:SHOWN_COLUMNS]) or "none") + more

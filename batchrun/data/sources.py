"""The input as Arrow rows: files found and checked, one schema, row ranges read in bounded memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from batchrun.config import InputConfig
from batchrun.data.filters import Filter
from batchrun.data.formats.arrow import ArrowReader
from batchrun.data.formats.base import ROW_ERROR, ROW_NUMBER, FileInfo, Reader, RowRange
from batchrun.data.formats.delimited import DelimitedReader
from batchrun.data.formats.huggingface import is_dataset_url, is_saved, open_dataset
from batchrun.data.formats.jsonl import JsonlReader
from batchrun.data.formats.parquet import ParquetReader
from batchrun.data.formats.requests import RequestReader
from batchrun.data.paths import find_files, names_of
from batchrun.data.schemas import column_list, conform, unify
from batchrun.data.selection import FileToSelect, Sample, Selection
from batchrun.data.storage import COMPRESSIONS, Storage, base_name, reading
from batchrun.errors import InputError

__all__ = ["InputFile", "Source", "column_list", "open_source"]

_TEXT = ("", *COMPRESSIONS)
SUFFIXES = {
    "parquet": [".parquet"],
    "jsonl": [f"{ending}{packed}" for ending in (".jsonl", ".ndjson", ".json") for packed in _TEXT],
    "csv": [f"{ending}{packed}" for ending in (".csv", ".tsv") for packed in _TEXT],
    "arrow": [".arrow", ".arrows", ".feather", ".ipc"],
}
SUFFIXES["openai"] = SUFFIXES["jsonl"]
GUESSED = ("parquet", "jsonl", "csv", "arrow")
# Looked for in folders when the format is to be guessed. Single .json files beside data are mostly not data.
SEARCHED = [suffix for format in GUESSED for suffix in SUFFIXES[format] if not suffix.startswith(".json.")]
SEARCHED.remove(".json")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input, or what stands for one: a split or a shard of a data set.

    `name` is the path below the deepest folder that holds all files, with `/` between folders: the identity
    that output rows show. `rows` is what the job reads of it: the file's own count, or less under `input.filter`,
    `input.sample` and `input.limit`. `digest` tells an edited file of equal size and row count from what it was.
    """

    index: int
    path: str
    name: str
    size: int
    rows: int
    digest: str = ""


class Source:
    """The whole input: files in the order of their rows, one schema, and a reader.

    Where a selection is given, rows are numbered among the selected ones of their file, and `numbered` is true: a
    batch can then be asked for ROW_NUMBER, the row's number in the file itself.
    """

    def __init__(
        self,
        reader: Reader,
        files: list[InputFile],
        schema: pa.Schema,
        selection: Selection | None = None,
        full_schema: pa.Schema | None = None,
        file_rows: Sequence[int] = (),
    ) -> None:
        self.reader = reader
        self.files = files
        self.schema = schema
        self.selection = selection
        self._fields = {field.name: field for field in full_schema or schema}
        self._file_rows = file_rows

    @property
    def numbered(self) -> bool:
        """Whether a row's number in its file is another than its number in the input."""
        return self.selection is not None

    def read(
        self, file: InputFile, ranges: Sequence[RowRange], columns: Sequence[str] | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows of `ranges` (ascending, disjoint, half-open) as (number of the first row, batch), in one pass.

        A batch lies in one range and holds `columns` in that order (default: all of the schema's), then ROW_ERROR
        if one of its rows is broken: why, or null for a good row.
        Raises InputError naming the file if it can no longer be read, ValueError for ranges that are out of order.
        """
        names = self.schema.names if columns is None else list(columns)
        ranges = [(start, stop) for start, stop in ranges if start < stop]
        if any(b[0] < a[1] for a, b in pairwise(ranges)):
            raise ValueError(f"row ranges {ranges} of {file.name} must be ascending and disjoint")
        if not ranges:
            return
        batches = self._rows(file, ranges, names) if self.selection is None else self._selected(file, ranges, names)
        yield from _cut(
            batches, ranges, f"{file.path} ends before row {ranges[-1][1]}: the file changed while the job ran"
        )

    def _rows(
        self, file: InputFile, ranges: Sequence[RowRange], names: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows by their numbers in the file, in the columns asked for, covering at least `ranges`."""
        schema = pa.schema([self._fields[name] for name in names], self.schema.metadata)
        batches = self.reader.batches(file.path, ranges, schema)
        while True:
            # The consumer's own errors are not the file's: they must not pass through here.
            with reading(file.path, "read its rows"):
                first, batch = next(batches, (0, None))
                if batch is None:
                    return
                found = conform(batch, schema)
                if ROW_ERROR in batch.schema.names and batch.column(ROW_ERROR).null_count < batch.num_rows:
                    found = found.append_column(ROW_ERROR, batch.column(ROW_ERROR))
            yield first, found

    def _selected(
        self, file: InputFile, ranges: Sequence[RowRange], names: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Selected rows by their numbers among them."""
        assert self.selection is not None, "the input has a selection"
        needed = self.selection.filter.columns if self.selection.filter else []
        columns = [name for name in dict.fromkeys([*names, *needed]) if name != ROW_NUMBER]
        file_rows = self._file_rows[file.index]

        def read(blocks: Sequence[RowRange]) -> Iterator[tuple[int, pa.RecordBatch]]:
            missing = f"{file.path} ends before row {blocks[-1][1]}: the file changed while the job ran"
            return _cut(self._rows(file, blocks, columns), blocks, missing)

        for first, numbers, batch in self.selection.read(file.index, file.name, file_rows, ranges, read):
            yield first, _with_numbers(batch, numbers, names)


def _with_numbers(batch: pa.RecordBatch, numbers: np.ndarray, names: Sequence[str]) -> pa.RecordBatch:
    """The columns asked for, ROW_NUMBER among them if it is, and ROW_ERROR if there is one."""
    if ROW_NUMBER in names:
        batch = batch.append_column(ROW_NUMBER, pa.array(numbers, pa.int64()))
    return batch.select([*names, *(name for name in (ROW_ERROR,) if name in batch.schema.names)])


def _cut(
    batches: Iterable[tuple[int, pa.RecordBatch]], ranges: Sequence[RowRange], missing: str
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of `ranges` out of batches that hold them. Raises InputError(missing) if some are not there."""
    at = 0
    for first, batch in batches:
        while at < len(ranges) and ranges[at][0] < first + batch.num_rows:
            start, stop = max(ranges[at][0], first), min(ranges[at][1], first + batch.num_rows)
            if start < stop:
                yield start, batch.slice(start - first, stop - start)
            if stop < ranges[at][1]:
                break
            at += 1
        if at == len(ranges):
            return
    raise InputError(missing)


def open_source(config: InputConfig, *, offline: bool = False) -> Source:
    """Find and check the files or the data set that `input.path` names, in order of their paths.

    Under `input.limit` alone, files after the last row needed are not opened. Raises InputError for paths that find
    nothing, files that cannot be read, columns that are missing or doubled, and schemas that differ.
    """
    reader, found = _find(config, offline)
    filter = None if config.filter is None else Filter(config.filter)
    sample = None if config.sample is None else Sample(config.sample, config.sample_seed)
    selects = filter is not None or sample is not None
    paths, names, infos = _inspect(reader, found, None if selects else config.limit, config.format)
    schemas = reader.settle(paths, [info.schema for info in infos])
    schema = full = unify(paths, schemas, config.schema, config.columns)
    if filter is not None and config.columns is not None:
        needed = list(dict.fromkeys([*config.columns, *filter.columns]))
        full = unify(paths, schemas, config.schema, needed, "input.filter")
    files = [
        InputFile(index, path, name, info.size, info.rows, info.digest)
        for index, (path, name, info) in enumerate(zip(paths, names, infos, strict=True))
    ]
    if not selects:
        return Source(reader, files, schema)
    return _select(reader, files, schema, full, Selection(filter, sample), config.limit)


def _select(
    reader: Reader,
    files: list[InputFile],
    schema: pa.Schema,
    full: pa.Schema,
    selection: Selection,
    limit: int | None,
) -> Source:
    """The source of the selected rows: the filter's columns are read once to count them."""
    filter = selection.filter
    plain = Source(reader, files, schema, full_schema=full)
    to_select = []
    for file in files:
        may_match: list[RowRange] = [(0, file.rows)]
        if filter is not None:
            filter.check(full)
            with reading(file.path, "read its statistics"):
                may_match = reader.may_match(file.path, filter.expression(full), file.rows)

        def read(ranges: Sequence[RowRange], file: InputFile = file) -> Iterator[tuple[int, pa.RecordBatch]]:
            return plain.read(file, ranges, filter.columns if filter else [])

        to_select.append(FileToSelect(file.name, file.rows, may_match, read))
    counts = selection.scan(to_select, limit)
    selected = [
        InputFile(file.index, file.path, file.name, file.size, count, file.digest)
        for file, count in zip(files, counts, strict=True)
    ]
    return Source(reader, selected, schema, selection, full, [file.rows for file in files])


def _find(config: InputConfig, offline: bool) -> tuple[Reader, list[tuple[str, str]]]:
    """The reader, and the (path, name) of each file."""
    storage = Storage(config.storage_options)
    if config.format == "hf" or (config.format == "auto" and _is_dataset(config.path)):
        return open_dataset(config, storage, offline)
    paths = find_files(config.path, SUFFIXES.get(config.format, SEARCHED), storage)
    format = _guess(paths) if config.format == "auto" else config.format
    return _reader(format, config, storage), list(zip(paths, names_of(paths), strict=True))


def _is_dataset(paths: Sequence[str]) -> bool:
    return len(paths) == 1 and (is_dataset_url(paths[0]) or is_saved(os.path.expanduser(paths[0])))


def _guess(paths: Sequence[str]) -> str:
    """The format that the files' endings show. Raises InputError if they show none, or several."""
    formats: Counter[str] = Counter()
    for path in paths:
        ending = next((format for format in GUESSED if base_name(path).endswith(tuple(SUFFIXES[format]))), None)
        if ending is None:
            raise InputError(
                f"the ending of {path} does not tell its format: set input.format to {', '.join(GUESSED)} or openai"
            )
        formats[ending] += 1
    if len(formats) > 1:
        shown = ", ".join(f"{count} {format}" for format, count in sorted(formats.items()))
        raise InputError(f"input.path finds files of several formats ({shown}): set input.format, or narrow input.path")
    return next(iter(formats))


def _reader(format: str, config: InputConfig, storage: Storage) -> Reader:
    if config.types and format not in ("jsonl", "csv"):
        raise InputError(f"input.types is for jsonl and csv, whose types are inferred; {format} files declare theirs")
    if format == "jsonl":
        return JsonlReader(storage, config.types, all_keys=config.columns is None)
    if format == "csv":
        return DelimitedReader(storage, config.types, config.delimiter, config.quote)
    if format == "openai":
        return RequestReader(storage)
    return ArrowReader(storage) if format == "arrow" else ParquetReader(storage)


def _inspect(
    reader: Reader, found: Sequence[tuple[str, str]], limit: int | None, format: str
) -> tuple[list[str], list[str], list[FileInfo]]:
    """Paths, names and what is known of each file; files after the last row needed are left out."""
    infos: list[FileInfo] = []
    for path, _ in found:
        if limit == 0:
            break
        try:
            with reading(path, "read the file" if format == "auto" else f"be read as {format}"):
                infos.append(reader.inspect(path, limit))
        except InputError as error:
            if error.__cause__ is None:
                raise
            raise InputError(f"{error}: mend or remove the file, or narrow input.path") from error.__cause__
        if limit is not None:
            limit -= infos[-1].rows
    paths, names = [path for path, _ in found][: len(infos)], [name for _, name in found][: len(infos)]
    return paths, names, infos

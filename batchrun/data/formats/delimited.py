"""CSV and TSV with a header line, quoted as RFC 4180 has it; `.gz` and `.zst` too."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from batchrun.data.formats.json_values import INT64
from batchrun.data.formats.jsonl import BOM
from batchrun.data.formats.records import Place, Record, RecordReader, declared_type, with_errors
from batchrun.data.storage import COMPRESSIONS, Storage, base_name
from batchrun.errors import InputError

RECORD_BYTES = 64 << 20
# Numbers whose text says no more than their value: 007 and +1 stay text.
PATTERNS = {
    pa.int64(): r"^-?(0|[1-9][0-9]*)$",
    pa.float64(): r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$",
    pa.bool_(): r"^([Tt]rue|[Ff]alse|TRUE|FALSE)$",
}

csv.field_size_limit(RECORD_BYTES)


class DelimitedReader(RecordReader):
    """Types are inferred from the first rows of all files together; `types` declares them, by column.

    An empty field is null in a column of numbers and empty text in one of text. A later row with more or fewer fields
    than the header, or a field that does not parse, is a row whose ROW_ERROR says so.
    """

    def __init__(
        self,
        storage: Storage | None = None,
        types: Mapping[str, str] | None = None,
        delimiter: str | None = None,
        quote: str | None = '"',
    ) -> None:
        super().__init__(storage)
        self.declared = dict(types or {})
        self.delimiter = delimiter
        self.quote = quote
        self._headers: dict[str, list[str]] = {}

    def records(self, stream: io.BufferedReader, path: str, place: Place) -> Iterator[Record]:
        lines = _Lines(stream, path, place)
        reader = csv.reader(
            lines,
            delimiter=self.delimiter or _delimiter_of(path),
            quotechar=self.quote,
            quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
        )
        content: list[str] | str | None
        while True:
            start, line = lines.begin()
            try:
                content = next(reader, None)
            except csv.Error as error:
                content = f"not CSV: {error}"
            if content is None:
                break
            if start == 0 and isinstance(content, list):
                self._headers[path] = content
            elif content:
                yield Record(line, start, lines.offset, content)

    def infer(self, path: str, window: list[Record]) -> pa.Schema:
        header = self._headers.get(path)
        if not header:
            raise InputError(f"{path} has no header line: the first line must name the columns")
        if unknown := [name for name in self.declared if name not in header]:
            raise InputError(
                f"input.types names {', '.join(unknown)}, which {path} does not have; it has {', '.join(header)}"
            )
        whole = [record.content for record in window if len(record.content) == len(header)]
        if window and not whole:
            raise InputError(
                f"{path} has {len(header)} columns in its header and no row with as many fields: "
                "set input.delimiter, or input.quote=null where quotes are part of the text"
            )
        columns = zip(*whole, strict=True) if whole else [()] * len(header)
        return pa.schema([(name, _infer(values)) for name, values in zip(header, columns, strict=True)])

    def settle(self, paths: Sequence[str], schemas: Sequence[pa.Schema]) -> list[pa.Schema]:
        merged: dict[str, pa.DataType] = {}
        for schema in schemas:
            for field in schema:
                merged[field.name] = _merge(merged.get(field.name, pa.null()), field.type)
        final = {
            name: declared_type(name, self.declared[name].replace("json", "string"))
            if name in self.declared
            else (pa.string() if pa.types.is_null(type) else type)
            for name, type in merged.items()
        }
        return [pa.schema([(name, final[name]) for name in schema.names]) for schema in schemas]

    def build(self, path: str, records: Sequence[Record], schema: pa.Schema) -> pa.RecordBatch:
        header = self._headers[path]
        errors: dict[int, str] = {}
        for row, record in enumerate(records):
            if isinstance(record.content, str):
                errors[row] = f"line {record.line}: {record.content}"
            elif len(record.content) != len(header):
                errors[row] = f"line {record.line} has {len(record.content)} fields, and the header has {len(header)}"

        def refuse(name: str, row: int, why: str) -> None:
            errors.setdefault(row, f"line {records[row].line}: column {name}: {why}")

        arrays = []
        for field in schema:
            at = header.index(field.name) if field.name in header else len(header)
            values = [
                record.content[at] if isinstance(record.content, list) and at < len(record.content) else None
                for record in records
            ]
            arrays.append(_convert(values, field.type, partial(refuse, field.name)))
        return with_errors(arrays, schema, errors, len(records))


class _Lines:
    """Lines of a stream as text, broken UTF-8 as U+FFFD, counting where they are."""

    def __init__(self, stream: io.BufferedReader, path: str, place: Place) -> None:
        self.offset = place.offset
        self._line = place.line
        self._stream = stream
        self._path = path
        self._started = place

    def begin(self) -> tuple[int, int]:
        """A record begins here: its offset and line."""
        self._started = Place(0, self.offset, self._line)
        return self.offset, self._line

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        content = self._stream.readline()
        if not content:
            raise StopIteration
        text = (content.removeprefix(BOM) if self.offset == 0 else content).decode("utf-8", "replace")
        self.offset += len(content)
        self._line += 1
        if self.offset - self._started.offset > RECORD_BYTES:
            raise InputError(
                f"{self._path}: the record on line {self._started.line} does not end within {RECORD_BYTES >> 20} MiB: "
                "is a quote missing? input.quote=null reads quotes as part of the text"
            )
        return text


def _delimiter_of(path: str) -> str:
    name = base_name(path)
    for ending in COMPRESSIONS:
        name = name.removesuffix(ending)
    return "\t" if name.endswith(".tsv") else ","


def _infer(values: Sequence[str]) -> pa.DataType:
    """The narrowest of int64, float64, bool and text that holds all values without loss; null if all are empty."""
    filled = [value for value in values if value]
    if not filled:
        return pa.null()
    for type, pattern in PATTERNS.items():
        if all(map(re.compile(pattern).match, filled)):
            return type if type != pa.int64() or all(int(value) in INT64 for value in filled) else pa.string()
    return pa.string()


def _merge(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else pa.string()


def _convert(values: Sequence[str | None], type: pa.DataType, refuse: Callable[[int, str], None]) -> pa.Array:
    """Fields as an array of the type. `refuse(row, why)` is called for those that do not parse, which become null."""
    if pa.types.is_string(type):
        return pa.array(values, type)
    text = pa.array([value or None for value in values], pa.string())
    pattern = PATTERNS.get(type)
    try:
        if pattern is None or pc.all(pc.match_substring_regex(text, pattern)).as_py() is not False:
            return text.cast(type)
    except (pa.ArrowException, ValueError):
        pass  # one of the values, found below
    parsed = []
    for row, scalar in enumerate(text):
        value = scalar.as_py()
        try:
            if value is not None and pattern is not None and not re.match(pattern, value):
                raise ValueError
            parsed.append(scalar.cast(type))
        except (pa.ArrowException, ValueError):
            refuse(row, f"{value[:40]!r} is not a {type}")
            parsed.append(pa.scalar(None, type))
    return pa.array(parsed, type)

"""JSON Lines: an object a line, blank lines left out, `.gz` and `.zst` too."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from batchrun.data.formats.json_values import JSON, Mismatch, convert, infer_type, merge, settled, to_json, to_text
from batchrun.data.formats.records import Place, Record, RecordReader, declared_type, with_errors
from batchrun.data.storage import Storage
from batchrun.data.values import clean_text
from batchrun.errors import InputError

BOM = b"\xef\xbb\xbf"


class JsonlReader(RecordReader):
    """Types are inferred from the first rows of all files together; `types` declares them, by column.

    A later line that is no object, or has a value of another type, is a row whose ROW_ERROR says so. So is one with a
    key that none of the first rows had, where `all_keys` are to be read.
    """

    def __init__(
        self, storage: Storage | None = None, types: Mapping[str, str] | None = None, all_keys: bool = True
    ) -> None:
        super().__init__(storage)
        self.declared = dict(types or {})
        self.all_keys = all_keys
        # How the values of a column become text, for columns that are kept as text whatever they hold.
        self._as_text: dict[str, Callable[[Any], str | None]] = {}
        self._known: set[str] = set()

    def records(self, stream: io.BufferedReader, path: str, place: Place) -> Iterator[Record]:
        offset, line = place.offset, place.line
        for content in stream:
            stop = offset + len(content)
            if not content.isspace():
                yield Record(line, offset, stop, content.removeprefix(BOM) if offset == 0 else content)
            offset, line = stop, line + 1

    def infer(self, path: str, window: list[Record]) -> pa.Schema:
        types: dict[str, pa.DataType] = {}
        broken = None
        objects = 0
        for record in window:
            value, error = parse_object(record)
            if value is None:
                broken = broken or error
                continue
            objects += 1
            for key, item in value.items():
                found = types.setdefault(key, pa.null())
                if key not in self.declared:
                    types[key] = self._merged(path, record.line, key, found, item)
        if window and not objects:
            raise InputError(
                f"{path} is not JSON Lines, an object on each line: {broken}. "
                "Turn a JSON array into lines with `jq -c '.[]'`, or set input.format"
            )
        return pa.schema(list((types | {name: pa.null() for name in self.declared if name not in types}).items()))

    def _merged(self, path: str, line: int, key: str, found: pa.DataType, item: Any) -> pa.DataType:
        try:
            return merge(found, infer_type(item))
        except (Mismatch, RecursionError) as error:
            raise InputError(
                f"{path}, line {line}: column {key} has values of different types: {error}. "
                f"Mend the file, or keep the column as text with input.types.{key}=string (or =json)"
            ) from error

    def settle(self, paths: Sequence[str], schemas: Sequence[pa.Schema]) -> list[pa.Schema]:
        merged: dict[str, pa.DataType] = {}
        for path, schema in zip(paths, schemas, strict=True):
            for field in schema:
                try:
                    merged[field.name] = merge(merged.get(field.name, pa.null()), field.type)
                except Mismatch as mismatch:
                    raise InputError(
                        f"{path}: column {field.name} has another type than in the files before it: {mismatch}. "
                        f"Keep the column as text with input.types.{field.name}=string (or =json)"
                    ) from mismatch
        final = {name: self._final(name, type) for name, type in merged.items()}
        self._known = set(final)
        return [pa.schema([(name, final[name]) for name in schema.names]) for schema in schemas]

    def _final(self, name: str, type: pa.DataType) -> pa.DataType:
        declared = self.declared.get(name)
        type = settled(type)
        if declared == "json" or (declared is None and type == JSON):
            self._as_text[name] = to_json
            return pa.string()
        if declared is None:
            return type
        if declared == "string":
            self._as_text[name] = to_text
        return declared_type(name, declared)

    def build(self, path: str, records: Sequence[Record], schema: pa.Schema) -> pa.RecordBatch:
        errors: dict[int, str] = {}
        objects: list[dict[str, Any]] = []
        for row, record in enumerate(records):
            value, error = parse_object(record)
            if value is None:
                errors[row] = error
            elif self.all_keys and (unknown := value.keys() - self._known):
                errors[row] = (
                    f"line {record.line}: none of the rows from which types were inferred has the key "
                    f"{min(unknown)!r}: declare it (input.types.{min(unknown)}=string), or name what to read in "
                    "input.columns"
                )
            objects.append(value or {})

        def refuse(name: str, row: int, why: str) -> None:
            errors.setdefault(row, f"line {records[row].line}: column {name}: {why}")

        arrays = [
            convert(
                [value.get(field.name) for value in objects],
                field.type,
                partial(refuse, field.name),
                self._as_text.get(field.name),
            )
            for field in schema
        ]
        return with_errors(arrays, schema, errors, len(records))


def parse_object(record: Record) -> tuple[dict[str, Any] | None, str]:
    """The object on a line, or None and what is wrong. Broken UTF-8 becomes U+FFFD."""
    text = record.content.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return None, f"line {record.line}: not JSON: {error}"
    if not isinstance(value, dict):
        return None, f"line {record.line}: not an object with a key for each column"
    return (value if text.isascii() and "\\u" not in text else _clean_keys(value)), ""


def _clean_keys(value: dict[str, Any]) -> dict[str, Any]:
    return {clean_text(key): item for key, item in value.items()}

"""OpenAI's batch request file: JSON Lines, each a request with an id of its own."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from batchrun.data.formats.jsonl import JsonlReader, parse_object
from batchrun.data.formats.records import Place, Record, with_errors
from batchrun.data.openai import SCHEMA, parse_request
from batchrun.data.storage import Storage
from batchrun.errors import InputError


class RequestReader(JsonlReader):
    """The columns are those of `batchrun.data.openai.SCHEMA`, whatever the file holds.

    A line that is no request, or one that cannot be answered, is a row whose ROW_ERROR says so. A custom_id that
    comes twice is an InputError that names both lines.
    """

    def __init__(self, storage: Storage | None = None) -> None:
        super().__init__(storage)
        self._ids: dict[str, array[int]] = {}  # by path: a 64-bit hash of each custom_id

    def notice(self, path: str, record: Record) -> None:
        if (custom_id := _custom_id(record)) is not None:
            self._ids.setdefault(path, array("Q")).append(_hash(custom_id))

    def infer(self, path: str, window: list[Record]) -> pa.Schema:
        return SCHEMA

    def settle(self, paths: Sequence[str], schemas: Sequence[pa.Schema]) -> list[pa.Schema]:
        hashes = [np.frombuffer(self._ids[path], np.uint64) for path in paths if path in self._ids]
        if hashes:
            found, counts = np.unique(np.concatenate(hashes), return_counts=True)
            if (counts > 1).any():
                self._check_ids(paths, {int(value) for value in found[counts > 1]})
        self._ids.clear()
        return list(schemas)

    def _check_ids(self, paths: Sequence[str], suspects: set[int]) -> None:
        """Look at the ids whose hashes come twice, and at where they are."""
        seen: dict[str, tuple[str, int]] = {}
        for path in paths:
            with self.storage.open_text(path) as stream:
                for record in self.records(stream, path, Place(0, 0, 1)):
                    custom_id = _custom_id(record)
                    if custom_id is None or _hash(custom_id) not in suspects:
                        continue
                    if custom_id in seen:
                        first, line = seen[custom_id]
                        raise InputError(
                            f"custom_id {custom_id!r} comes twice: in {first}, line {line}, and in {path}, "
                            f"line {record.line}: answers could not be told apart; give each request an id of its own"
                        )
                    seen[custom_id] = path, record.line

    def build(self, path: str, records: Sequence[Record], schema: pa.Schema) -> pa.RecordBatch:
        errors: dict[int, str] = {}
        rows: list[dict[str, Any]] = []
        for number, record in enumerate(records):
            value, error = parse_object(record)
            row: dict[str, Any] = {}
            if value is None:
                errors[number] = error
            else:
                row, refusal = parse_request(value)
                if refusal is not None:
                    errors[number] = f"line {record.line}: {refusal}"
            rows.append(row)
        arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in schema]
        return with_errors(arrays, schema, errors, len(records))


def _custom_id(record: Record) -> str | None:
    value, _ = parse_object(record)
    custom_id = None if value is None else value.get("custom_id")
    return custom_id if isinstance(custom_id, str) and custom_id else None


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")

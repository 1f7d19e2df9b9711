"""Completions that are JSON, as a typed column beside their text. Nothing is repaired: what does not parse says why."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for

from batchrun.config import OutputConfig
from batchrun.data.derived import NOTHING_DERIVED, Derived
from batchrun.data.json_schema import JSON_TEXT, Declared, declared, remote_refs
from batchrun.data.schemas import storable
from batchrun.data.templates import read_text
from batchrun.data.values import clean_text
from batchrun.errors import InputError

PARSED = "parsed"
PARSE_ERROR = "parse_error"
MOST_CHARS = 300  # of a reason

Settings = dict[str, Any]
NO_PARSING: Settings = {"output.parse": "none", "output.schema": None, "output.parsed": None} | NOTHING_DERIVED


class Parser:
    """What `output.parse` and `output.schema` make of a completion.

    `types` are the columns that it adds, by key: none without parsing. `derived` makes those that follow from the
    others. `settings` are what all of them follow from, files read.

    Raises InputError for a schema that is none, or that leads out of itself.
    """

    def __init__(self, config: OutputConfig) -> None:
        self.derived = Derived(config)
        self.settings = NO_PARSING | self.derived.settings
        self.types: dict[str, pa.DataType] = {}
        self._validator: Any = None
        self._declared: Declared = JSON_TEXT
        if config.parse == "none":
            return
        schema = read_schema(config.schema)
        self.settings |= {"output.parse": config.parse, "output.schema": schema, "output.parsed": config.parsed}
        if schema is not None:
            self._validator, self._declared = _prepared(schema)
        self.types = {PARSED: storable(pa.field(config.parsed, self._declared.type)).type, PARSE_ERROR: pa.string()}

    @property
    def record(self) -> bytes:
        """The settings as they are written into a part's footer."""
        return json.dumps(self.settings, sort_keys=True).encode()

    def columns(self, texts: Iterable[str | None], finish_reasons: Iterable[str | None]) -> dict[str, list[Any]]:
        """Values of the added columns, by key, for completions and what ended each."""
        if not self.types:
            return {}
        pairs = [self.parse(text, reason) for text, reason in zip(texts, finish_reasons, strict=True)]
        return {PARSED: [value for value, _ in pairs], PARSE_ERROR: [error for _, error in pairs]}

    def parse(self, text: str | None, finish_reason: str | None) -> tuple[Any, str | None]:
        """(value, None) or (None, reason); a row without a completion has neither."""
        if text is None:
            return None, None
        try:
            return self._value(text, finish_reason), None
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, ValueError) else "nested too deeply"
            cut = "" if finish_reason in ("stop", None) else f"the completion ended by {finish_reason}: "
            return None, clean_text(f"{cut}{why}")[:MOST_CHARS]

    def _value(self, text: str, finish_reason: str | None) -> Any:
        try:
            value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from None
        if finish_reason == "length" and isinstance(value, (int, float)) and not isinstance(value, bool):
            raise ValueError(f"the number {text.strip()} may go on")
        wrong = None if self._validator is None else best_match(self._validator.iter_errors(value))
        if wrong is not None:
            raise ValueError(f"{wrong.json_path} {wrong.message}")
        return self._declared(value)


def read_schema(given: Any, key: str = "output.schema") -> Any:
    """The JSON Schema that the setting `key` gives: itself, JSON text of it, or a file. Raises InputError."""
    if not isinstance(given, str):
        return given
    text = given if given.lstrip().startswith("{") else read_text(key, given, [Path.cwd()])
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{key}={given if text != given else '…'} is not JSON: {error}") from error


def _prepared(schema: Any) -> tuple[jsonschema.protocols.Validator, Declared]:
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        if refs := sorted(set(remote_refs(schema))):
            raise InputError(f"output.schema refers to {', '.join(refs)}: put it into the schema, under $defs")
        return kind(schema), declared(schema)
    except SchemaError as error:
        raise InputError(f"output.schema is not a JSON Schema: {error.json_path} {error.message}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"output.schema: {error}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"not JSON: {name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number

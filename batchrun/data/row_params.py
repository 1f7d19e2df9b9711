"""Sampling parameters that come with a row, in a column: a struct, or JSON text, with keys of the sampling section."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from batchrun.config import SamplingConfig
from batchrun.config.structure import FORMS, StructureConfig
from batchrun.data.messages import is_text, storage_type
from batchrun.errors import ConfigError

_ARROW: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    str: pa.string(),
    list[int]: pa.list_(pa.int64()),
    list[str]: pa.list_(pa.string()),
    Any: pa.list_(pa.string()),  # a string or a list of strings
    dict[Any, float]: pa.map_(pa.string(), pa.float64()),
}

_NAMES: dict[Any, str] = {Any: "a string or a list of strings", dict[Any, float]: "an object of numbers"}


def _types() -> dict[str, Any]:
    """The parameters that a row can have, with their Python types; `X | None` counts as X."""
    found = {}
    hints = typing.get_type_hints(SamplingConfig)
    for field in dataclasses.fields(SamplingConfig):
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):
            hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        if hint in _ARROW and field.name != "n":  # the rows of a part are counted before any of them is read
            found[field.name] = hint
    return found


TYPES = _types()
STRUCTURED = "structured_outputs"
_FORM_TYPES = {"choice": pa.list_(pa.string()), "json_object": pa.bool_()}
FORM = pa.struct([(name, _FORM_TYPES.get(name, pa.string())) for name in FORMS])
PARAMS = pa.struct([*((name, _ARROW[hint]) for name, hint in TYPES.items()), (STRUCTURED, FORM)])


def is_params_type(type: pa.DataType) -> bool:
    """Whether a column can hold parameters: a struct, a map with text keys, or JSON text."""
    type = storage_type(type)
    return is_text(type) or pa.types.is_struct(type) or pa.types.is_map(type)


def parse_params(value: Any) -> dict[str, Any]:
    """The parameters of one row, checked against the limits of the sampling section; null ones are left out.

    Raises ValueError saying what is wrong.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"not an object of parameters but {type(value).__name__}")
    given = {key: item for key, item in value.items() if item is not None}
    form = _form(given.pop(STRUCTURED, None))
    if unknown := sorted(map(str, given.keys() - TYPES.keys())):
        raise ValueError(f"there is no parameter {', '.join(unknown)}; there are {', '.join(TYPES)}, {STRUCTURED}")
    given = {key: _typed(key, item) for key, item in given.items()}
    try:
        config = SamplingConfig(**given)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return {key: getattr(config, key) for key in given} | ({STRUCTURED: form} if form else {})


def row_sampling(config: SamplingConfig, own: Mapping[str, Any]) -> SamplingConfig:
    """The job's parameters with a row's own, as `parse_params` returns them, in their place."""
    changes = {key: value for key, value in own.items() if key in TYPES}
    return dataclasses.replace(config, **changes) if changes else config


def _form(value: Any) -> dict[str, Any]:
    """The form that a row asks for, by its name: a schema as text. Nothing of it is a file. Raises ValueError."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{STRUCTURED}={value!r} is not an object with one of {', '.join(FORMS)}")
    given = {key: item for key, item in (value or {}).items() if item is not None}
    if unknown := sorted(map(str, given.keys() - set(FORMS))):
        raise ValueError(f"{STRUCTURED} has no {', '.join(unknown)}; it has one of {', '.join(FORMS)}")
    schema = given.get("json")
    if isinstance(schema, Mapping):
        given["json"] = json.dumps(schema, ensure_ascii=False)
    elif schema is not None:
        try:
            is_schema = isinstance(json.loads(schema), dict)
        except (TypeError, ValueError, RecursionError):
            is_schema = False
        if not is_schema:
            raise ValueError(f"{STRUCTURED}: json={str(schema)[:60]!r} is not a JSON Schema")
    for key in ("regex", "grammar"):
        if not isinstance(given.get(key, ""), str):
            raise ValueError(f"{STRUCTURED}: {key}={given[key]!r} is not text")
    try:
        config = StructureConfig(**given)
    except (ConfigError, TypeError) as error:
        raise ValueError(f"{STRUCTURED}: {error}") from error
    return {key: getattr(config, key) for key in config.given}


def _typed(key: str, value: Any) -> Any:
    """The value as the parameter's Python type, whole floats as integers. Raises ValueError."""
    hint = TYPES[key]
    if hint is float and _is_number(value) and abs(value) <= sys.float_info.max:
        return float(value)
    if hint is int and _is_number(value) and value == int(value):
        return int(value)
    if (hint is bool and isinstance(value, bool)) or (hint in (str, Any) and isinstance(value, str)):
        return value
    inner = int if hint == list[int] else str
    is_list = hint in (Any, list[int], list[str]) and isinstance(value, list)
    if is_list and all(isinstance(item, inner) and not isinstance(item, bool) for item in value):
        return value
    if typing.get_origin(hint) is dict and isinstance(value, Mapping):
        # A struct has a field for each key of any row: what is null is not this row's.
        numbers = {str(name): number for name, number in value.items() if number is not None}
        if all(_is_number(number) and abs(number) <= sys.float_info.max for number in numbers.values()):
            return {name: float(number) for name, number in numbers.items()}
    raise ValueError(f"{key}={value!r} is not {_NAMES.get(hint) or getattr(hint, '__name__', hint)}")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or math.isfinite(value)

"""JSON values as Arrow columns: which type a column's values show, and the values under that type, checked.

`pa.array` is not trusted with that: it cuts 1.5 to the int64 1, drops keys that a struct does not have, and makes
a list of the characters of a string.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from batchrun.data.values import clean_text

# What `settled` makes of a column whose values have no type in Parquet; such a column is kept as JSON text.
JSON = pa.json_(pa.string())
INT64 = range(-(2**63), 2**63)
_PLAIN: dict[type, pa.DataType] = {
    type(None): pa.null(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
}
# Python types whose mixture `pa.array` takes without loss, or refuses.
_SAFE: dict[pa.DataType, frozenset[type]] = {
    pa.bool_(): frozenset({bool, type(None)}),
    pa.int64(): frozenset({int, type(None)}),
    pa.float64(): frozenset({int, float, type(None)}),
    pa.string(): frozenset({str, type(None)}),
}
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list", dict: "an object"}


class Mismatch(ValueError):
    """A value does not have the type of its column."""


def infer_type(value: Any) -> pa.DataType:
    """The type that one value shows; null for parts that it does not show. Raises Mismatch within lists."""
    if isinstance(value, int) and not isinstance(value, bool) and value not in INT64:
        raise Mismatch(f"{value} is beyond int64")
    if (plain := _PLAIN.get(type(value))) is not None:
        return plain
    if isinstance(value, list):
        inner = pa.null()
        for item in value:
            inner = merge(inner, infer_type(item))
        return pa.list_(inner)
    return pa.struct([pa.field(clean_text(key), infer_type(item)) for key, item in value.items()])


def merge(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type of a column that shows both. Raises Mismatch when there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(merge(one.value_type, other.value_type))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            fields[field.name] = merge(fields.get(field.name, pa.null()), field.type)
        return pa.struct(list(fields.items()))
    raise Mismatch(f"{describe(one)} and {describe(other)}")


def settled(type: pa.DataType) -> pa.DataType:
    """The type with text where no value has shown any; JSON where an object without keys is all there is to hold."""
    return JSON if _has_empty_struct(type) else _without_null(type)


def _has_empty_struct(type: pa.DataType) -> bool:
    if pa.types.is_struct(type):
        return not type.num_fields or any(_has_empty_struct(field.type) for field in type)
    return pa.types.is_list(type) and _has_empty_struct(type.value_type)


def _without_null(type: pa.DataType) -> pa.DataType:
    if pa.types.is_null(type):
        return pa.string()
    if pa.types.is_list(type):
        return pa.list_(_without_null(type.value_type))
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(_without_null(field.type)) for field in type])
    return type


def describe(type: pa.DataType) -> str:
    """A type in the words of JSON."""
    if pa.types.is_list(type):
        return "list"
    if pa.types.is_struct(type):
        return "object"
    return {pa.string(): "text", pa.int64(): "integer", pa.float64(): "number", pa.bool_(): "true or false"}.get(
        type, str(type)
    )


def to_json(value: Any) -> str | None:
    """The JSON text of a value, null for null."""
    return None if value is None else clean_text(json.dumps(value, ensure_ascii=False))


def to_text(value: Any) -> str | None:
    """Text as it is, any other value as its JSON text: what a column that is declared a string holds."""
    return clean_text(value) if isinstance(value, str) else to_json(value)


def convert(
    values: Sequence[Any], type: pa.DataType, refuse: Callable[[int, str], None], by: Callable[[Any], Any] | None = None
) -> pa.Array:
    """The values, mapped by `by`, as an array of the type.

    `refuse(row, why)` is called for those that do not have it, which become null.
    """
    if by is not None:
        values = [by(value) for value in values]
    if set(map(_type_of, values)) <= _SAFE.get(type, frozenset()):
        try:
            return pa.array(values, type)
        except (OverflowError, UnicodeEncodeError, pa.ArrowException):
            pass  # one of the values, found below
    checked = []
    for row, value in enumerate(values):
        try:
            checked.append(_checked(value, type))
        except (Mismatch, RecursionError) as error:
            refuse(row, str(error))
            checked.append(None)
    return pa.array(checked, type)


_type_of = type


def _checked(value: Any, type: pa.DataType) -> Any:
    """The value as `pa.array` takes it without loss. Raises Mismatch."""
    if value is None:
        return None
    if pa.types.is_string(type) and isinstance(value, str):
        return clean_text(value)
    if pa.types.is_list(type) and isinstance(value, list):
        return [_checked(item, type.value_type) for item in value]
    if pa.types.is_struct(type) and isinstance(value, dict):
        return _checked_object(value, type)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if type == pa.float64() and is_number:
        if isinstance(value, int) and _as_float(value) != value:
            raise Mismatch(f"{value} is not exactly a float64")
        return float(value)
    if type == pa.int64() and is_number and isinstance(value, int):
        if value not in INT64:
            raise Mismatch(f"{value} is beyond int64")
        return value
    if type == pa.bool_() and isinstance(value, bool):
        return value
    if type in _SAFE or pa.types.is_nested(type):
        raise Mismatch(f"{_shown(value)} is {_NAMES[_type_of(value)]} where {describe(type)} was expected")
    return _cast(value, type)


def _checked_object(value: dict[str, Any], type: pa.StructType) -> dict[str, Any]:
    types = {field.name: field.type for field in type}
    value = {clean_text(key): item for key, item in value.items()}
    if unknown := [key for key in value if key not in types]:
        raise Mismatch(f"the object has the key {unknown[0]!r}, which no row had from which types were inferred")
    return {key: _checked(item, types[key]) for key, item in value.items()}


def _cast(value: Any, type: pa.DataType) -> Any:
    """A value of a declared type that JSON does not have, such as a date as text."""
    try:
        scalar = pa.scalar(clean_text(value) if isinstance(value, str) else value)
        return scalar.cast(type)
    except (OverflowError, TypeError, ValueError, pa.ArrowException) as error:
        raise Mismatch(f"{_shown(value)} is not a {type}") from error


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _shown(value: Any) -> str:
    text = clean_text(repr(value))
    return text if len(text) <= 40 else text[:40] + "…"

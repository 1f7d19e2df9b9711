"""Arrow values as Python objects for templates, and text that UTF-8 can hold."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

SURROGATE = re.compile("[\ud800-\udfff]")


def clean_text(text: str) -> str:
    """The text with each lone surrogate, which UTF-8 and Arrow refuse, as U+FFFD."""
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)


def is_blank(value: Any) -> bool:
    """Whether a value has nothing to say: null, blank text, an empty list or struct."""
    return not value.strip() if isinstance(value, str) else value is None or value in ([], {})


def without_nulls(value: Any) -> Any:
    """Without the keys that an Arrow struct has and the value that it was made from has not."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def to_python(array: pa.Array) -> list[Any]:
    """One Python object a row. A value that Python cannot hold (a year 20000, broken UTF-8) is a ValueError instead.

    Nanoseconds become microseconds, the finest that datetime knows, and maps become dicts.
    """
    try:
        return _converted(array)
    except Exception:
        return [_one(array.slice(row, 1)) for row in range(len(array))]


def _converted(array: pa.Array) -> list[Any]:
    target = _without_nanoseconds(array.type)
    if target != array.type:
        array = array.cast(target, safe=False)
    values: list[Any] = array.to_pylist(maps_as_pydicts="lossy")
    return values


def _one(array: pa.Array) -> Any:
    try:
        return _converted(array)[0]
    except Exception as error:
        return ValueError(f"a value of type {array.type} cannot be read: {error}")


def _without_nanoseconds(type: pa.DataType) -> pa.DataType:
    """The type with microseconds in place of nanoseconds at any depth: to_pylist needs pandas for the latter."""
    if isinstance(type, pa.TimestampType) and type.unit == "ns":
        return pa.timestamp("us", type.tz)
    if isinstance(type, pa.DurationType) and type.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(type):
        return pa.time64("us")
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(_without_nanoseconds(field.type)) for field in type])
    if isinstance(type, pa.MapType):
        return pa.map_(type.key_field, type.item_field.with_type(_without_nanoseconds(type.item_type)))
    if isinstance(type, pa.ListType):
        return pa.list_(type.value_field.with_type(_without_nanoseconds(type.value_type)))
    if isinstance(type, pa.LargeListType):
        return pa.large_list(type.value_field.with_type(_without_nanoseconds(type.value_type)))
    if isinstance(type, pa.FixedSizeListType):
        field = type.value_field.with_type(_without_nanoseconds(type.value_type))
        return pa.list_(field, type.list_size)
    if isinstance(type, pa.DictionaryType):
        value_type = _without_nanoseconds(type.value_type)
        return type if value_type == type.value_type else value_type
    return type

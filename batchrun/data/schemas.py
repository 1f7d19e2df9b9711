"""One schema for all input files: the columns they must share, may lack, or get a wider type for."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.formats.base import RESERVED
from batchrun.errors import InputError

SHOWN_COLUMNS = 50
FEATURES = b"huggingface"


def unify(
    paths: Sequence[str],
    schemas: Sequence[pa.Schema],
    mode: str,
    columns: Sequence[str] | None,
    key: str = "input.columns",
) -> pa.Schema:
    """The columns of the input: all, or `columns` in that order, as `mode` joins those of the files.

    strict: the same names and types in each. intersect: the names that all have, with the same types. union: the
    names that any has, with a type that holds the values of all. Columns are matched by name; their order may differ.
    Views become plain text, bytes and lists: Arrow cannot take single rows of views. Metadata is the first file's,
    with the Hugging Face features of all. Raises InputError naming files and columns, and `key` as what asks for them.
    """
    distinct = [(path, _plain_schema(schema)) for path, schema in _distinct(paths, schemas)]
    for path, schema in distinct:
        _check_names(path, schema, columns)
        if mode == "strict":
            _check_there(key, columns, schema, path)
    first_path, first = distinct[0]
    names = _joined_names([schema for _, schema in distinct], mode)
    if columns is not None:
        if mode != "strict":
            _check_there(key, columns, pa.schema([(name, pa.null()) for name in names]), f"input.schema={mode}")
        names = list(dict.fromkeys(columns))
    for path, schema in distinct[1:]:
        _check_same(first_path, first, path, schema, mode, names)
    fields = [_joined_field(name, distinct) for name in names]
    return pa.schema(fields, _joined_metadata([schema for _, schema in distinct], fields))


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A file's batch with the columns, order and types of `schema`; a column that the file lacks is null."""
    if not schema.names:
        return batch.select([])
    arrays = []
    for field in schema:
        if field.name not in batch.schema.names:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        else:
            array = batch.column(field.name)
            arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def column_list(names: Sequence[str]) -> str:
    """Column names for a message."""
    more = f" and {len(names) - SHOWN_COLUMNS} more" if len(names) > SHOWN_COLUMNS else ""
    return (", ".join(names[:SHOWN_COLUMNS]) or "none") + more


def _distinct(paths: Sequence[str], schemas: Sequence[pa.Schema]) -> list[tuple[str, pa.Schema]]:
    """The schemas that differ in anything, each with the first file that has it."""
    found: dict[tuple[Any, ...], tuple[str, pa.Schema]] = {}
    for path, schema in zip(paths, schemas, strict=True):
        key = tuple((field.name, str(field.type), field.nullable) for field in schema)
        features = (schema.metadata or {}).get(FEATURES)
        found.setdefault((key, features), (path, schema))
    return list(found.values())


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(plain_type(field.type)) for field in schema], schema.metadata)


def plain_type(type: pa.DataType) -> pa.DataType:
    """The type without views, at any depth."""
    types = pa.types
    if types.is_string_view(type):
        return pa.string()
    if types.is_binary_view(type):
        return pa.binary()
    if types.is_struct(type):
        return pa.struct([field.with_type(plain_type(field.type)) for field in type])
    if types.is_map(type):
        return pa.map_(
            type.key_field.with_type(plain_type(type.key_type)), type.item_field.with_type(plain_type(type.item_type))
        )
    inner = type.value_field.with_type(plain_type(type.value_type)) if hasattr(type, "value_field") else None
    if inner is None:
        return type
    if types.is_fixed_size_list(type):
        return pa.list_(inner, type.list_size)
    large = types.is_large_list(type) or types.is_large_list_view(type)
    return pa.large_list(inner) if large else pa.list_(inner)


def _check_names(path: str, schema: pa.Schema, columns: Sequence[str] | None) -> None:
    counts = Counter(schema.names)
    wanted = schema.names if columns is None else columns
    doubled = [name for name in dict.fromkeys(wanted) if counts[name] > 1]
    if doubled:
        raise InputError(
            f"{path} has more than one column named {', '.join(doubled)}: "
            "rename them, or leave the name out of input.columns"
        )
    if taken := [name for name in wanted if name in RESERVED]:
        raise InputError(f"{path} has a column named {taken[0]}, which batchrun keeps for itself: rename it")


def _check_there(key: str, columns: Sequence[str] | None, schema: pa.Schema, owner: str) -> None:
    if missing := [name for name in columns or () if name not in schema.names]:
        raise InputError(
            f"{key} names {', '.join(missing)}, which {owner} does not have; "
            f"its columns are {column_list(schema.names)}"
        )


def _joined_names(schemas: Sequence[pa.Schema], mode: str) -> list[str]:
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    if mode == "intersect":
        return [name for name in names if all(name in schema.names for schema in schemas)]
    return list(names)


def _check_same(first: str, schema: pa.Schema, path: str, other: pa.Schema, mode: str, names: Sequence[str]) -> None:
    """Raise InputError with a line for each column in which two files differ more than `mode` allows."""
    lines = []
    for name in names:
        here = schema.field(name).type if name in schema.names else None
        there = other.field(name).type if name in other.names else None
        if here is None or there is None:
            differs = mode == "strict"
        else:
            differs = here != there and (mode != "union" or promoted(here, there) is None)
        if differs:
            lines.append(f"\n  {name}: {here or 'absent'} / {there or 'absent'}")
    if lines:
        remedies = {
            "strict": "list the columns they share in input.columns, or set input.schema=intersect or =union",
            "intersect": "leave these columns out with input.columns, or set input.schema=union",
            "union": "no type holds the values of both without loss: leave these columns out with input.columns",
        }
        raise InputError(
            f"{first} and {path} differ in columns:{''.join(lines)}\nconvert one of them, or {remedies[mode]}"
        )


def _joined_field(name: str, distinct: Sequence[tuple[str, pa.Schema]]) -> pa.Field:
    """The column over all files. Types that fit the first file's one by one may still not fit each other."""
    joined: pa.Field | None = None
    for path, schema in distinct:
        if name not in schema.names:
            continue
        field = schema.field(name)
        if joined is None:
            joined = field
            continue
        type = promoted(joined.type, field.type)
        if type is None:
            raise InputError(
                f"{path}: column {name} is {field.type}, and {joined.type} in the files before it: "
                "leave it out with input.columns"
            )
        joined = joined.with_type(type).with_nullable(joined.nullable or field.nullable)
    assert joined is not None, "a joined name comes from one of the files"
    everywhere = all(name in schema.names for _, schema in distinct)
    return joined if everywhere else joined.with_nullable(True)


def promoted(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds every value of both exactly, or None."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    for narrow, wide in ((one, other), (other, one)):
        if _holds(wide, narrow):
            return wide
    if pa.types.is_integer(one) and pa.types.is_integer(other):
        bits = 2 * min(type.bit_width for type in (one, other) if pa.types.is_unsigned_integer(type))
        return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}.get(max(bits, one.bit_width, other.bit_width))
    lists = (pa.types.is_list(one) or pa.types.is_large_list(one)) and type(one) is type(other)
    inner = promoted(one.value_type, other.value_type) if lists else None
    if inner is None:
        return None
    return pa.list_(inner) if pa.types.is_list(one) else pa.large_list(inner)


def _holds(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether a cast from `narrow` to `wide` keeps every value."""
    types = pa.types
    if types.is_integer(wide) and types.is_integer(narrow):
        unsigned = types.is_unsigned_integer(narrow)
        if types.is_unsigned_integer(wide):
            return unsigned and wide.bit_width >= narrow.bit_width
        return wide.bit_width > narrow.bit_width if unsigned else wide.bit_width >= narrow.bit_width
    if types.is_floating(wide):
        exact = {16: 8, 32: 16, 64: 32}[wide.bit_width]
        return (
            wide.bit_width >= narrow.bit_width
            if types.is_floating(narrow)
            else (types.is_integer(narrow) and narrow.bit_width <= exact)
        )
    if types.is_decimal(wide) and types.is_decimal(narrow):
        whole = wide.precision - wide.scale >= narrow.precision - narrow.scale
        return whole and wide.scale >= narrow.scale and wide.bit_width >= narrow.bit_width
    if isinstance(narrow, pa.DictionaryType) and not isinstance(wide, pa.DictionaryType):
        return bool(wide == narrow.value_type) or _holds(wide, narrow.value_type)
    pairs = {(pa.large_string(), pa.string()), (pa.large_binary(), pa.binary()), (pa.timestamp("s"), pa.date32())}
    return (wide, narrow) in pairs


def _joined_metadata(schemas: Sequence[pa.Schema], fields: Sequence[pa.Field]) -> dict[bytes, bytes] | None:
    """The first file's metadata; features are collected from all, and left out unless each column's are known."""
    metadata = dict(schemas[0].metadata or {})
    known: dict[str, Any] = {}
    for schema in schemas:
        for name, feature in _features(schema).items():
            same = any(field.name == name and field.type == schema.field(name).type for field in fields)
            if same:
                known.setdefault(name, feature)
    if len(schemas) > 1 and (known or FEATURES in metadata):
        metadata.pop(FEATURES, None)
        if all(field.name in known for field in fields):
            features = {field.name: known[field.name] for field in fields}
            metadata[FEATURES] = json.dumps({"info": {"features": features}}).encode()
    return metadata or None


def _features(schema: pa.Schema) -> dict[str, Any]:
    try:
        features = json.loads((schema.metadata or {})[FEATURES])["info"]["features"]
        return {name: feature for name, feature in features.items() if name in schema.names}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def storable(field: pa.Field) -> pa.Field:
    """The column with the type that comes back from Parquet: seconds come as milliseconds, for one.

    Raises InputError where Parquet has no type that holds the values.
    """
    sink = io.BytesIO()
    try:
        pq.write_table(pa.schema([field]).empty_table(), sink)
        found = field.with_type(pq.read_schema(sink).field(0).type)
        pa.schema([field]).empty_table().cast(pa.schema([found]))
    except pa.ArrowException as error:
        raise InputError(
            f"column {field.name} of type {field.type} cannot be written as Parquet ({error}): "
            "leave it out with output.columns"
        ) from error
    return field if found.type == field.type else found

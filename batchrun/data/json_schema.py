"""The Arrow type that a JSON Schema declares, and JSON values as values of that type.

Objects with named properties are structs, arrays of one kind of item are lists, and strings, numbers, booleans and
enumerations of them are themselves. What has no type of its own in Parquet (free objects, unions, tuples, recursion)
is JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from batchrun.data.values import clean_text


class Declared(NamedTuple):
    """A column, or a part of one: its type, and what makes a value of the type from a JSON value that is not null.

    `convert` raises ValueError for a value that the type cannot hold.
    """

    type: pa.DataType
    convert: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        return None if value is None else self.convert(value)


def declared(schema: Any, root: Any = None, refs: frozenset[str] = frozenset({"#"})) -> Declared:
    """The type of the values that a schema admits. `root` is what references are looked up in; `refs` are open ones."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping):
        return JSON_TEXT
    if (ref := schema.get("$ref")) is not None:
        return JSON_TEXT if ref in refs else declared(lookup_ref(root, ref), root, refs | {ref})
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            options = [declared(option, root, refs) for option in schema[key] if option != {"type": "null"}]
            return JSON_TEXT if key == "allOf" and len(options) > 1 else _common(options)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return _common([SCALARS.get(_name(value), JSON_TEXT) for value in values if value is not None])
    names = schema.get("type", "object" if "properties" in schema else None)
    names = [names] if isinstance(names, str) else names or [None]
    return _common([_typed(name, schema, root, refs) for name in names if name != "null"])


def remote_refs(schema: Any) -> Iterator[str]:
    """References that lead out of the schema."""
    if isinstance(schema, Mapping):
        ref = schema.get("$ref")
        if isinstance(ref, str) and not (ref == "#" or ref.startswith("#/")):
            yield ref
        schema = list(schema.values())
    if isinstance(schema, list):
        for item in schema:
            yield from remote_refs(item)


def lookup_ref(root: Any, ref: str) -> Any:
    """What a reference such as #/$defs/Name stands for. Raises ValueError if there is nothing."""
    found = root
    for part in ref.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            raise ValueError(f"$ref {ref} leads nowhere")
        found = found[name]
    return found


def _typed(name: str | None, schema: Mapping[str, Any], root: Any, refs: frozenset[str]) -> Declared:
    if name == "object" and schema.get("properties"):
        return _struct({key: declared(part, root, refs) for key, part in schema["properties"].items()})
    if name == "array" and isinstance(schema.get("items"), Mapping) and "prefixItems" not in schema:
        return _list(declared(schema["items"], root, refs))
    return SCALARS.get(str(name), JSON_TEXT)


def _common(options: Sequence[Declared]) -> Declared:
    """The one type of several: whole numbers are numbers, and what else differs is JSON text."""
    types = {option.type for option in options}
    if types == {pa.int64(), pa.float64()}:
        return SCALARS["number"]
    # Structs of equal types may convert differently inside, so only the same declaration counts.
    if len(options) == 1 or (len(types) == 1 and all(option.convert is options[0].convert for option in options)):
        return options[0]
    return JSON_TEXT if options else SCALARS["string"]


def _struct(parts: Mapping[str, Declared]) -> Declared:
    def convert(value: Mapping[str, Any]) -> dict[str, Any]:
        return {key: part(value.get(key)) for key, part in parts.items()}

    return Declared(pa.struct([(key, part.type) for key, part in parts.items()]), convert)


def _list(item: Declared) -> Declared:
    return Declared(pa.list_(item.type), lambda value: [item(one) for one in value])


def _integer(value: Any) -> int:
    if not -(2**63) <= value < 2**63:
        raise ValueError("a whole number does not fit into 64 bits")
    return int(value)


def _number(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a whole number is too large for a float") from None


def _json_text(value: Any) -> str:
    return clean_text(json.dumps(value, ensure_ascii=False))


def _name(value: Any) -> str:
    """The name that JSON Schema has for a value's type."""
    names = {bool: "boolean", str: "string", int: "integer", float: "number"}
    return names.get(type(value), "")


JSON_TEXT = Declared(pa.string(), _json_text)
SCALARS = {
    "string": Declared(pa.string(), clean_text),
    "integer": Declared(pa.int64(), _integer),
    "number": Declared(pa.float64(), _number),
    "boolean": Declared(pa.bool_(), bool),
}

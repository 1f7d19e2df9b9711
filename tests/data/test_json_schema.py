from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from batchrun.data.json_schema import declared, lookup_ref, remote_refs

TEXT, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
TREE = {"type": "object", "properties": {"name": {"type": "string"}, "children": {"type": "array"}}}


@pytest.mark.parametrize(
    ("schema", "type"),
    [
        ({"type": "string"}, TEXT),
        ({"type": "integer", "minimum": 0}, INT),
        ({"type": "number"}, FLOAT),
        ({"type": "boolean"}, BOOL),
        ({"type": ["integer", "null"]}, INT),
        ({"type": ["integer", "number"]}, FLOAT),
        ({"type": ["integer", "string"]}, TEXT),
        ({"type": "null"}, TEXT),
        ({"enum": ["a", "b", None]}, TEXT),
        ({"enum": [1, 2]}, INT),
        ({"enum": [1, 2.5]}, FLOAT),
        ({"enum": [True, False]}, BOOL),
        ({"enum": [1, "a"]}, TEXT),
        ({"const": 3}, INT),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, FLOAT),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, TEXT),
        ({"allOf": [{"type": "integer"}]}, INT),
        ({"type": "array", "items": {"type": "integer"}}, pa.list_(INT)),
        ({"type": "array"}, TEXT),
        ({"type": "array", "prefixItems": [{}], "items": {"type": "string"}}, TEXT),
        ({"type": "object"}, TEXT),
        ({"type": "object", "properties": {}}, TEXT),
        ({"type": "object", "additionalProperties": {"type": "string"}}, TEXT),
        ({"properties": {"b": {"type": "integer"}, "a": True}}, pa.struct([("b", INT), ("a", TEXT)])),
        ({"type": "object", "properties": {"x": {"type": "array", "items": {"properties": {"y": {"type": "number"}}}}}},
         pa.struct([("x", pa.list_(pa.struct([("y", FLOAT)])))])),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, INT),
        (True, TEXT),
        ({}, TEXT),
    ],
)  # fmt: skip
def test_types(schema: Any, type: pa.DataType) -> None:
    assert declared(schema).type == type


def test_recursion_ends_in_json_text() -> None:
    schema = {
        "$defs": {
            "node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}
        },
        "$ref": "#/$defs/node",
    }
    column = declared(schema)
    assert column.type == pa.struct([("v", INT), ("next", TEXT)])
    assert column({"v": 1, "next": {"v": 2, "next": None}}) == {"v": 1, "next": '{"v": 2, "next": null}'}
    assert declared({"properties": {"self": {"$ref": "#"}, "n": {"type": "integer"}}})({"self": {"n": 1}, "n": 2}) == {
        "self": '{"n": 1}',
        "n": 2,
    }


def test_values() -> None:
    column = declared(
        {
            "properties": {
                "i": {"type": "integer"},
                "x": {"type": "number"},
                "t": {"type": "string"},
                "free": {},
                "l": {"type": "array", "items": {"enum": ["a", None]}},
            }
        }
    )
    assert column({"i": 2.0, "x": 1, "t": "\ud800é", "free": {}, "l": ["a", None], "more": 1}) == {
        "i": 2,
        "x": 1.0,
        "t": "\ufffdé",
        "free": "{}",
        "l": ["a", None],
    }
    assert column({}) == {"i": None, "x": None, "t": None, "free": None, "l": None}
    assert column(None) is None


def test_values_that_the_type_cannot_hold() -> None:
    assert declared({"type": "integer"})(2**63 - 1) == 2**63 - 1
    with pytest.raises(ValueError, match="64 bits"):
        declared({"type": "integer"})(2**63)
    with pytest.raises(ValueError, match="too large"):
        declared({"type": "number"})(10**400)


def test_references() -> None:
    assert lookup_ref({"$defs": {"a/b": 1}}, "#/$defs/a~1b") == 1
    with pytest.raises(ValueError, match="#/x leads nowhere"):
        lookup_ref({}, "#/x")
    schema = {"items": [{"$ref": "#/a"}, {"$ref": "https://example.org/s"}, {"x": {"$ref": "other.json"}}]}
    assert list(remote_refs(schema)) == ["https://example.org/s", "other.json"]

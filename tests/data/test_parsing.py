from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchrun.config import OutputConfig
from batchrun.data.parsing import Parser
from batchrun.errors import ConfigError, InputError

REVIEW = {
    "type": "object",
    "properties": {
        "label": {"enum": ["pos", "neg"]},
        "score": {"type": ["integer", "null"], "maximum": 5},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["label"],
    "additionalProperties": False,
}


def parser(schema: Any = None, **config: Any) -> Parser:
    return Parser(OutputConfig(parse="json", schema=schema, **config))


def reason(text: str, schema: Any = None, finish_reason: str = "stop") -> str:
    value, error = parser(schema).parse(text, finish_reason)
    assert value is None
    assert error is not None
    return error


def test_values_have_the_declared_type() -> None:
    made = parser(REVIEW)
    assert made.types["parsed"] == pa.struct(
        [("label", pa.string()), ("score", pa.int64()), ("tags", made.types["parsed"].field("tags").type)]
    )
    value, error = made.parse(' {"label": "pos", "score": 3, "tags": ["a"]}\n', "stop")
    assert (value, error) == ({"label": "pos", "score": 3, "tags": ["a"]}, None)
    assert pa.array([value, None], made.types["parsed"]).to_pylist() == [value, None]
    assert made.parse('{"label": "neg"}', "stop") == ({"label": "neg", "score": None, "tags": None}, None)


def test_without_schema_the_column_is_json_text() -> None:
    made = parser()
    assert made.types == {"parsed": pa.string(), "parse_error": pa.string()}
    assert made.parse('{"a":  [1, "é\\ud800"]}', "stop") == ('{"a": [1, "é\ufffd"]}', None)
    assert made.parse("{}", "stop") == ("{}", None)
    assert made.parse("null", "stop") == (None, None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON: Expecting value"),
        ("positive", "not JSON"),
        ('```json\n{"label": "pos"}\n```', "not JSON"),
        ('{"label": "pos"} and more', "not JSON: Extra data"),
        ("{'label': 'pos'}", "not JSON"),
        ('{"label": "pos",}', "not JSON"),
        ('{"label": "maybe"}', "$.label 'maybe' is not one of ['pos', 'neg']"),
        ('{"label": "pos", "score": 9}', "$.score 9 is greater than the maximum of 5"),
        ('{"label": "pos", "score": "3"}', "$.score '3' is not of type 'integer', 'null'"),
        ('{"label": "pos", "score": true}', "$.score True is not of type"),
        ('{"score": 1}', "$ 'label' is a required property"),
        ('{"label": "pos", "x": 1}', "$ Additional properties are not allowed"),
        ("[1]", "$ [1] is not of type 'object'"),
        ('{"label": "pos", "score": -1e30}', "64 bits"),
        ('{"label": "pos", "score": NaN}', "NaN is no JSON number"),
        ('{"label": "pos", "score": 1e999}', "the number 1e999 is too large"),
        ('{"label": "pos", "score": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_nothing_is_repaired(text: str, why: str) -> None:
    assert why in reason(text, REVIEW)
    assert len(reason(text, REVIEW)) <= 300


def test_completions_that_were_cut() -> None:
    assert reason('{"label": "po', REVIEW, "length").startswith("the completion ended by length: not JSON")
    assert reason("12", None, "length") == "the completion ended by length: the number 12 may go on"
    assert parser(REVIEW).parse('{"label": "pos"}', "length")[0]["label"] == "pos"
    assert parser().parse("12", "stop") == ("12", None)
    assert parser().parse("true", "length") == ("true", None)


def test_rows_without_completion_have_neither_value_nor_reason() -> None:
    assert parser().columns([None, "1"], ["error", "stop"]) == {"parsed": [None, "1"], "parse_error": [None, None]}


def test_schemas_come_inline_as_text_or_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "review.json"
    path.write_text(json.dumps(REVIEW))
    made = [parser(given) for given in (REVIEW, json.dumps(REVIEW), str(path))]
    assert made[0].settings == made[1].settings == made[2].settings
    assert made[0].record == made[2].record != parser(REVIEW, parsed="other").record


def test_schemas_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{")
    for given, why in (
        (str(path), "is not JSON"),
        (str(tmp_path / "gone.json"), "is not a file"),
        ({"type": "objekt"}, r"not a JSON Schema: \$\.type"),
        ({"$ref": "https://example.org/schema"}, r"refers to https://example.org/schema"),
        ({"$ref": "#/$defs/gone"}, "leads nowhere"),
    ):
        with pytest.raises(InputError, match=why):
            parser(given)
    with pytest.raises(ConfigError, match=r"set output\.parse=json"):
        OutputConfig(schema=REVIEW)


def test_no_parsing_adds_no_columns() -> None:
    made = Parser(OutputConfig())
    assert made.types == made.columns(["1"], ["stop"]) == {}

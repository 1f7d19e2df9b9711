"""Jobs whose completions have a form: a record by one schema, rows with choices of their own, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import runner
from batchrun.compose import compose_config
from batchrun.config import Config
from batchrun.config.structure import StructureConfig
from batchrun.errors import ConfigError, FingerprintMismatch, InputError
from batchrun.job import open_job
from tests.engine.speller import SCHEMA, make_speller
from tests.test_runner import job, read, write_input

TEXTS = ["a cat", "no dog at all", "日本語", "sum 1 + 2", "é", "a cat"]


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speller(tmp_path_factory.mktemp("models") / "speller")


def extraction(model: Path, source: Path, output: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "sampling__max_tokens": 90,
        "prompt__template": "x{{ text }}",
        "output__parse": "json",
        "output__schema": SCHEMA,
        "structure__json": "output.schema",
    }
    return job(model, source, output, **(settings | changes))


def test_a_schema_said_once_gives_form_and_columns(speller: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", TEXTS)
    config = extraction(speller, source, tmp_path / "out")
    assert runner.run(config) == 0
    rows = read(tmp_path / "out")
    assert len(rows) == len(TEXTS)
    for row in rows:
        assert row["finish_reason"] == "stop"
        value = json.loads(row["completion"])
        jsonschema.validate(value, SCHEMA)
        assert (row["parsed"], row["parse_error"]) == (value, None)
    assert rows[0]["completion"] == rows[5]["completion"]
    summary = json.loads((tmp_path / "out" / "__batchrun" / "summary.json").read_text())
    assert 0.2 < summary["forced_share"] < 1
    assert summary["forced_tokens"] > 0
    steps = pq.read_table(next((tmp_path / "out" / "__batchrun" / "metrics").glob("*/steps.parquet")))
    assert sum(steps["forced"].to_pylist()) == summary["forced_tokens"]
    assert sum(steps["forced"].to_pylist()) + sum(steps["sampled"].to_pylist()) == summary["completion_tokens"]


def test_a_completion_that_is_cut_keeps_its_text(speller: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", TEXTS[:3])
    runner.run(extraction(speller, source, tmp_path / "out", sampling__max_tokens=9))
    for row in read(tmp_path / "out"):
        assert (row["finish_reason"], row["completion_tokens"], row["parsed"]) == ("length", 9, None)
        assert row["completion"].startswith('{"name": ')
        assert row["parse_error"].startswith("the completion ended by length: not JSON")


def test_rows_have_forms_of_their_own(speller: Path, tmp_path: Path) -> None:
    """As a struct or JSON text in the column of parameters; a bad one fails its row alone."""
    own: list[dict[str, Any] | None] = [
        {"choice": ["yes", "no"]},
        {"choice": ["Hund", "Katze"]},
        {"json": {"enum": [1, 2]}},
        {"json": json.dumps({"type": "boolean"})},
        {"regex": "[0-9]{3}"},
        None,
        {"choice": ["a"], "regex": "b"},
        {"soup": "b"},
        {"regex": "a(b"},
        {"json": "schema.json"},
    ]
    params = [json.dumps({"structured_outputs": form}) for form in own]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["x"] * len(own), "params": params}), tmp_path / "in" / "rows.parquet")
    runner.run(
        job(speller, tmp_path / "in", tmp_path / "out", prompt__params="params", structure__choice=["left", "right"])
    )
    rows = read(tmp_path / "out")
    for row, allowed in zip(rows, (["yes", "no"], ["Hund", "Katze"], ["1", "2"], ["true", "false"]), strict=False):
        assert row["completion"] in allowed
    assert rows[4]["completion"].isdigit()
    assert rows[5]["completion"] in ("left", "right")
    errors = [(row["error_type"], row["error"]) for row in rows[6:]]
    assert [kind for kind, _ in errors] == ["invalid_row", "invalid_row", "constraint_error", "invalid_row"]
    for (_, error), named in zip(errors, ("choice", "soup", "unclosed group", "schema.json"), strict=True):
        assert named in error


def test_response_formats_of_requests(speller: Path, tmp_path: Path) -> None:
    schema = {
        "name": "mood",
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    }
    formats = [
        {"type": "json_schema", "json_schema": schema},
        {"type": "text"},
        {"type": "yaml"},
        {"type": "json_schema"},
    ]
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "m",
                "max_tokens": 20,
                "messages": [{"role": "user", "content": "x"}],
                "response_format": form,
            },
        }
        for i, form in enumerate(formats)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = job(
        speller, tmp_path / "in.jsonl", tmp_path / "out",
        prompt__kind="chat", prompt__template=None, prompt__chat_template=template,
        input__format="openai",
    )  # fmt: skip
    runner.run(config)
    rows = read(tmp_path / "out")
    assert rows[0]["completion"] in ('{"ok": true}', '{"ok": false}')
    assert rows[1]["status"] == "ok"
    for row in rows[2:]:
        assert row["error_type"] == "invalid_row"
        assert "response_format" in row["error"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structure__json": {"type": "array", "uniqueItems": True}}, r"structure\.json cannot .*uniqueItems.*\(at \$\)"),
    ({"structure__json": "nowhere.json"}, r"structure\.json=nowhere\.json"),
    ({"structure__json": "{"}, r"structure\.json=… is not JSON"),
    ({"structure__json": "output.schema"}, r"there is no output\.schema"),
    ({"structure__regex": "a(b"}, r"structure\.regex cannot .*unclosed group"),
    ({"structure__grammar": "start: nothing"}, r"structure\.grammar cannot .*unknown name"),
    ({"structure__grammar": "nowhere.lark"}, r"structure\.grammar=nowhere\.lark"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_forms_refused_before_the_model_loads(
    settings: dict[str, Any], message: str, speller: Path, tmp_path: Path
) -> None:
    config = job(speller, write_input(tmp_path / "in", TEXTS), tmp_path / "out", **settings)
    with pytest.raises(InputError, match=f"(?s){message}"):
        open_job(config, weights=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regex": "a", "choice": ["b"]}, "takes one form, and regex and choice are set"),
        ({"json": [1]}, r"structure\.json=\[1\] must be a JSON Schema"),
        ({"choice": []}, r"structure\.choice=\[\] leaves nothing"),
        ({"choice": [1]}, r"structure\.choice=\[1\]"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StructureConfig(**settings)


def test_forms_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "form.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "form.lark").write_text('start: "a"')
    typed = {
        "structure.json": "form.json",
        "structure.regex": r"\d+(,\d+)* {a} #",
        "structure.choice": "[good, 'so, so', bad]",
        "structure.grammar": "form.lark",
    }
    found = {
        key: getattr(compose_config(["job=generate", f"{key}={value}"]).structure, key.partition(".")[2])
        for key, value in typed.items()
    }
    assert found == {
        "structure.json": str(tmp_path / "form.json"),
        "structure.regex": typed["structure.regex"],
        "structure.choice": ["good", "so, so", "bad"],
        "structure.grammar": str(tmp_path / "form.lark"),
    }
    extract = compose_config(["job=extract"])
    assert extract.structure.json == "output.schema"
    assert json.loads(Path(extract.output.schema).read_text())["properties"]


def test_the_content_of_a_schema_counts_and_not_its_place(speller: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", TEXTS)
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA, indent=2))
    runner.run(extraction(speller, source, tmp_path / "out"))
    assert runner.run(extraction(speller, source, tmp_path / "out", structure__json=str(file))) == 0
    file.write_text(json.dumps({"type": "object"}))
    with pytest.raises(FingerprintMismatch, match=r"structure\.json"):
        runner.run(extraction(speller, source, tmp_path / "out", structure__json=str(file)))


@pytest.mark.slow
def test_workers_compile_for_themselves(speller: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", [f"x{i}" for i in range(40)])
    config = extraction(speller, source, tmp_path / "out")
    config.engine.workers = "2"
    runner.run(config)
    for row in read(tmp_path / "out"):
        jsonschema.validate(row["parsed"], SCHEMA)

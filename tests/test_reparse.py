"""Completions as typed columns: written by a run, and made anew from the parts alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import cli, faults, runner
from batchrun.config import Config
from batchrun.data.claim import Claim
from batchrun.data.plan import STATE_FOLDER
from batchrun.data.reparse import Reparsed, reparse_parts
from batchrun.engine.params import Completion, Request
from batchrun.errors import ConfigError, FingerprintMismatch, InputError, OutputInUse
from tests import fake
from tests.test_runner import job, read, words, write_input

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["n"],
}
ANSWERS = ['{"n": 1, "tags": ["a", "b"]}', '{"n": 2}', "no", '{"n": "three"}', '{"n": 4, "tags": [']


class Answers(fake.FakeEngine):
    """Answers by the length of the prompt."""

    def step(self) -> list[Completion]:
        completions = super().step()
        for completion in completions:
            completion.text = ANSWERS[completion.prompt_tokens % 5]
            completion.finish_reason = "length" if completion.text.endswith("[") else "stop"
        return completions

    def add(self, request: Request) -> None:
        assert self.alive
        super().add(request)

    alive = True


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.families import make_model

    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Answers]:
    monkeypatch.setattr(Answers, "alive", True)
    monkeypatch.setattr(runner, "load_engine", lambda *_: Answers())
    return Answers


def config(tiny: Path, folder: Path, **output: Any) -> Config:
    source = folder / "in"
    if not source.exists():
        write_input(source, [" ".join(f"w{4 + i}" for i in range(1 + n % 5)) for n in range(100)] + [None])
    changes = {f"output__{key}": value for key, value in output.items()}
    return job(tiny, source, folder / "out", output__chunk_rows=20, **changes)


PARSING: dict[str, Any] = {"parse": "json", "schema": SCHEMA}


def test_a_run_writes_typed_columns_beside_the_text(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.run(config(tiny, tmp_path, **PARSING))
    rows = read(tmp_path / "out")
    assert [row["completion"] for row in rows[:100]] == [ANSWERS[(1 + n % 5) % 5] for n in range(100)]
    by_text = {row["completion"]: (row["parsed"], row["parse_error"]) for row in rows}
    assert by_text[ANSWERS[0]] == ({"n": 1, "tags": ["a", "b"]}, None)
    assert by_text[ANSWERS[1]] == ({"n": 2, "tags": None}, None)
    assert by_text[ANSWERS[2]][0] is by_text[ANSWERS[3]][0] is by_text[ANSWERS[4]][0] is None
    assert by_text[ANSWERS[3]][1] == "$.n 'three' is not of type 'integer'"
    assert by_text[ANSWERS[4]][1].startswith("the completion ended by length: not JSON")
    assert by_text[None] == (None, None)
    schemas = [pq.read_schema(part) for part in sorted((tmp_path / "out").glob("part-*"))]
    assert all(schema.remove_metadata() == schemas[0].remove_metadata() for schema in schemas)
    assert schemas[0].names[2:5] == ["completion", "parsed", "parse_error"]
    assert json.loads((tmp_path / "out" / STATE_FOLDER / "summary.json").read_text())["parse_errors"] == 60
    assert "60 completions: the column parse_error says why" in capsys.readouterr().out


def test_free_json_is_text_in_a_column_of_another_name(tiny: Path, tmp_path: Path) -> None:
    runner.run(config(tiny, tmp_path, parse="json", parsed="answer", prefix="llm_"))
    values = {row["llm_completion"]: row["llm_answer"] for row in read(tmp_path / "out")}
    assert values[ANSWERS[1]] == '{"n": 2}'
    assert values[ANSWERS[2]] is None


def test_names_that_are_taken(tiny: Path, tmp_path: Path) -> None:
    for name in ("text", "completion", "parse_error"):
        with pytest.raises(InputError):
            runner.run(config(tiny, tmp_path, **PARSING, parsed=name))
    runner.run(config(tiny, tmp_path))
    with pytest.raises(InputError, match=r"text is a column of the output already"):
        reparse_parts(tmp_path / "out", config(tiny, tmp_path, **PARSING, parsed="text").output)
    assert runner.run(config(tiny, tmp_path)) == 0, "nothing was touched"


def tables(folder: Path) -> list[pa.Table]:
    return [pq.read_table(part) for part in sorted(folder.glob("part-*"))]


def test_reparsed_parts_are_those_that_a_run_writes(tiny: Path, tmp_path: Path, engine: type[Answers]) -> None:
    runner.run(config(tiny, tmp_path))
    (tmp_path / "out").rename(tmp_path / "plain")
    runner.run(config(tiny, tmp_path, **PARSING))
    (tmp_path / "out").rename(tmp_path / "parsed")
    engine.alive = False
    (tmp_path / "in").rename(tmp_path / "gone")
    made = reparse_parts(tmp_path / "plain", config(tiny, tmp_path / "x", **PARSING).output)
    assert made == Reparsed(parts=6, made=6, rows=101, errors=60)
    for ours, theirs in zip(tables(tmp_path / "plain"), tables(tmp_path / "parsed"), strict=True):
        assert ours.schema.equals(theirs.schema, check_metadata=True)
        ours, theirs = (table.drop_columns(["queue_s", "first_token_s", "total_s", "run"]) for table in (ours, theirs))
        assert ours.equals(theirs)
    again = reparse_parts(tmp_path / "plain", config(tiny, tmp_path / "x", **PARSING).output)
    assert again == Reparsed(parts=6, made=0)
    before = tables(tmp_path / "parsed")
    reparse_parts(tmp_path / "parsed", config(tiny, tmp_path / "x").output)
    for ours, old in zip(tables(tmp_path / "parsed"), before, strict=True):
        assert ours.equals(old.drop_columns(["parsed", "parse_error"]))


def test_features_of_a_data_set_follow(tiny: Path, tmp_path: Path) -> None:
    from datasets import Dataset, load_dataset

    (tmp_path / "in").mkdir()
    Dataset.from_dict({"text": words(30)}).to_parquet(str(tmp_path / "in" / "a.parquet"))
    runner.run(config(tiny, tmp_path))
    for output in (PARSING, {"parse": "json", "parsed": "answer"}, PARSING):
        reparse_parts(tmp_path / "out", config(tiny, tmp_path, **output).output)
        loaded = load_dataset(
            "parquet", data_dir=str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache")
        )
        name = output.get("parsed", "parsed")
        assert loaded[name] == [row[name] for row in read(tmp_path / "out")]
        features = json.loads(pq.read_schema(next((tmp_path / "out").glob("part-*"))).metadata[b"huggingface"])
        assert {"text", "completion", "status", name} <= set(features["info"]["features"])
        assert ("answer" in features["info"]["features"]) == (name == "answer")


def test_another_way_of_parsing_is_refused_until_the_parts_are_reparsed(
    tiny: Path, tmp_path: Path, engine: type[Answers]
) -> None:
    runner.run(config(tiny, tmp_path, **PARSING))
    manifest = (tmp_path / "out" / STATE_FOLDER / "manifest.json").read_bytes()
    other = {"parse": "json", "schema": {**SCHEMA, "required": []}}
    before = tables(tmp_path / "out")
    with pytest.raises(FingerprintMismatch, match=r"output\.schema: .*\n.*mode=reparse"):
        runner.run(config(tiny, tmp_path, **other))
    assert tables(tmp_path / "out") == before
    reparse_parts(tmp_path / "out", config(tiny, tmp_path, **other).output)
    (tmp_path / "out" / "part-00000-000001.parquet").unlink()
    assert runner.run(config(tiny, tmp_path, **other)) == 0
    assert {table.schema.metadata[b"batchrun.parsing"] for table in tables(tmp_path / "out")} == {
        tables(tmp_path / "out")[0].schema.metadata[b"batchrun.parsing"]
    }
    with pytest.raises(FingerprintMismatch, match=r"output\.schema"):
        runner.run(config(tiny, tmp_path, **PARSING))
    assert (tmp_path / "out" / STATE_FOLDER / "manifest.json").read_bytes() == manifest


@pytest.mark.parametrize("point", ["reparse_begun", "reparse_part", "before_write", "after_verify", "after_rename"])
def test_a_reparse_that_dies_is_ended_by_the_next(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    runner.run(config(tiny, tmp_path))
    seen = 0

    def die(name: str) -> None:
        nonlocal seen
        seen += name == point
        if seen == (1 if point == "reparse_begun" else 3):
            raise KeyboardInterrupt

    for module in ("batchrun.data.reparse.fault", "batchrun.data.store.fault"):
        monkeypatch.setattr(module, die)
    output = config(tiny, tmp_path, **PARSING).output
    with pytest.raises(KeyboardInterrupt):
        reparse_parts(tmp_path / "out", output)
    for module in ("batchrun.data.reparse.fault", "batchrun.data.store.fault"):
        monkeypatch.setattr(module, faults.fault)
    for changes in ({}, PARSING):
        with pytest.raises(FingerprintMismatch, match="interrupted"):
            runner.run(config(tiny, tmp_path, **changes))
    # A third way goes over parts of both others.
    other = config(tiny, tmp_path, parse="json", parsed="answer").output
    reparse_parts(tmp_path / "out", other)
    assert all(
        "answer" in table.column_names and "parsed" not in table.column_names for table in tables(tmp_path / "out")
    )
    reparse_parts(tmp_path / "out", output)
    assert runner.run(config(tiny, tmp_path, **PARSING)) == 0
    assert not list((tmp_path / "out").glob(".*"))


def test_a_reparse_and_a_worker_keep_out_of_each_other(tiny: Path, tmp_path: Path) -> None:
    runner.run(config(tiny, tmp_path))
    state, output = tmp_path / "out" / STATE_FOLDER, config(tiny, tmp_path, **PARSING).output
    fingerprint = json.loads((state / "manifest.json").read_text())["fingerprint"]
    for index, count in ((0, 1), (2, 3)):
        with Claim(state, index, count, fingerprint, "run").held(), pytest.raises(OutputInUse):
            reparse_parts(tmp_path / "out", output)
    with Claim(state, 0, 1, "reparse", "run").held(), pytest.raises(OutputInUse):
        runner.run(config(tiny, tmp_path))
    assert "parsed" not in read(tmp_path / "out")[0]


def test_a_file_in_the_place_of_a_part_is_not_reparsed(tiny: Path, tmp_path: Path) -> None:
    runner.run(config(tiny, tmp_path))
    part = sorted((tmp_path / "out").glob("*.parquet"))[1]
    pq.write_table(pa.table({"completion": ["{}"], "finish_reason": ["stop"]}), part)
    with pytest.raises(FingerprintMismatch, match=f"{part.name} was made with other settings"):
        reparse_parts(tmp_path / "out", config(tiny, tmp_path, **PARSING).output)
    assert "parsed" not in pq.read_schema(sorted((tmp_path / "out").glob("*.parquet"))[0]).names


def test_overwriting_forgets_how_the_old_output_was_parsed(tiny: Path, tmp_path: Path) -> None:
    runner.run(config(tiny, tmp_path))
    reparse_parts(tmp_path / "out", config(tiny, tmp_path, **PARSING).output)
    changes = {"output__overwrite": True, "output__chunk_rows": 30, "sampling__max_tokens": 5}
    assert runner.run(job(tiny, tmp_path / "in", tmp_path / "out", **changes)) == 0
    assert "parsed" not in read(tmp_path / "out")[0]


def test_the_command_needs_the_folder_alone(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.run(config(tiny, tmp_path))
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["mode=reparse", "output.path=out", "output.parse=json", "output.schema=schema.json"]) == 0
    told = capsys.readouterr().out
    assert "6 of 6 parts of out made anew, with 101 rows" in told
    assert "60 completions do not parse" in told
    assert cli.main(["mode=reparse", "output.path=in"]) == 2
    assert cli.main(["mode=reparse"]) == 2
    with pytest.raises(ConfigError, match="has no manifest"):
        reparse_parts(tmp_path / "in", config(tiny, tmp_path).output)

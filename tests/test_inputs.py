"""Whole jobs on every kind of input, and the command line's words for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import cli, runner
from batchrun.compose import compose_config
from batchrun.data.batch_output import BATCH_OUTPUT
from batchrun.data.store import Store
from batchrun.errors import ConfigError, FingerprintMismatch, InputError
from tests.data.formats.inputs import write_lines
from tests.data.formats.test_requests import request
from tests.engine.families import make_model
from tests.fake import FakeEngine
from tests.test_runner import job, read, words


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Engines that were made, in place of real ones."""
    made: list[FakeEngine] = []

    def load(*_: Any) -> FakeEngine:
        made.append(FakeEngine())
        return made[-1]

    monkeypatch.setattr(runner, "load_engine", load)
    return made


def test_json_lines_with_broken_ones_lose_no_row(tiny: Path, tmp_path: Path, fake: list[FakeEngine]) -> None:
    lines: list[Any] = [{"id": i, "text": text} for i, text in enumerate(words(100))]
    lines[10], lines[50], lines[99] = "{broken", {"id": "x", "text": "w5"}, {"id": 99, "text": "\udc00 w5"}
    source = write_lines(tmp_path / "in.jsonl.gz", lines)
    with pytest.raises(InputError, match=r"line 51: column id has values of different types: integer and text"):
        runner.run(job(tiny, source, tmp_path / "out", output__chunk_rows=16))
    config = job(tiny, source, tmp_path / "out", output__chunk_rows=16, input__types={"id": "int64"})
    assert runner.run(config) == 0
    rows = read(tmp_path / "out")
    assert [row["source_row"] for row in rows] == list(range(100))
    bad = {row["source_row"]: row["error"] for row in rows if row["status"] == "error"}
    assert {number: why.partition(":")[0] for number, why in bad.items()} == {10: "line 11", 50: "line 51"}
    assert rows[99]["text"] == "\ufffd w5"
    assert rows[99]["status"] == "ok"


def test_a_streamed_data_set_killed_twice_has_every_row_once(
    tiny: Path, tmp_path: Path, fake: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "rows"
    for i in range(2):
        write_lines(folder / f"train-{i}.jsonl", [{"id": 40 * i + j, "text": f"w{4 + j}"} for j in range(40)])
    options: dict[str, Any] = {"input__format": "hf", "input__streaming": True, "output__chunk_rows": 8}
    config = job(tiny, folder, tmp_path / "out", **options)
    commit, left = Store.commit, [3]

    def killed(self: Store, *arguments: Any) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return commit(self, *arguments)

    monkeypatch.setattr(Store, "commit", killed)
    for _ in range(2):
        left[0] = 3
        with pytest.raises(KeyboardInterrupt):
            runner.run(config)
    monkeypatch.setattr(Store, "commit", commit)
    assert runner.run(config) == 0
    assert [row["id"] for row in read(tmp_path / "out")] == list(range(80))


def test_a_warm_cache_of_data_sets_hides_no_lost_part(
    tiny: Path, tmp_path: Path, fake: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_lines(tmp_path / "rows" / "train.jsonl", [{"id": j, "text": f"w{4 + j}"} for j in range(40)])
    config = job(tiny, tmp_path / "rows", tmp_path / "out", input__format="hf", output__chunk_rows=10)
    runner.run(config)
    before = read(tmp_path / "out")
    (tmp_path / "out" / "part-00000-000002.parquet").unlink()
    runner.run(config)
    assert [row["completion"] for row in read(tmp_path / "out")] == [row["completion"] for row in before]
    assert [engine.completed for engine in fake] == [40, 10]


def test_a_filtered_job_resumes_and_divides_like_any_other(tiny: Path, tmp_path: Path, fake: list[FakeEngine]) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": range(500), "text": [f"w{4 + i % 250}" for i in range(500)]}), source)
    options: dict[str, Any] = {
        "input__filter": "id >= 100 and id != 200",
        "input__sample": 0.5,
        "output__chunk_rows": 16,
    }
    runner.run(job(tiny, source, tmp_path / "one", **options))
    rows = read(tmp_path / "one")
    assert 150 < len(rows) < 250
    assert [row["source_row"] for row in rows] == [row["id"] for row in rows]
    assert 200 not in [row["id"] for row in rows]
    (tmp_path / "one" / "part-00000-000004.parquet").unlink()
    runner.run(job(tiny, source, tmp_path / "one", **options))
    for index in (1, 2, 0):
        runner.run(job(tiny, source, tmp_path / "three", launch__count=3, launch__index=index, **options))
    keys = ("id", "source_row", "completion")
    expected = [tuple(row[key] for key in keys) for row in rows]
    for output in ("one", "three"):
        assert [tuple(row[key] for key in keys) for row in read(tmp_path / output)] == expected
    with pytest.raises(FingerprintMismatch, match=r"input\.filter"):
        runner.run(job(tiny, source, tmp_path / "one", **{**options, "input__filter": "id >= 100"}))


CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def test_an_openai_batch_file_through_the_command(tiny: Path, tmp_path: Path) -> None:
    def asked(number: int, **body: Any) -> dict[str, Any]:
        content = {"role": "user", "content": f"w{5 + number} w9 w{200 - number}"}
        return request(f"request-{number}", messages=[content], **body)

    lines: list[Any] = [asked(i, max_tokens=1 + i % 4, ignore_eos=True) for i in range(30)]
    lines += [asked(30, stream=True), "{broken", asked(31, temperature=1.0, seed=5), asked(31, temperature=1.0, seed=5)]
    lines[-1]["custom_id"] = "request-32"
    source = write_lines(tmp_path / "requests.jsonl", lines)
    words = [
        "job=annotate", "input=openai", f"model={tiny}", f"input.path={source}", f"output.path={tmp_path / 'out'}",
        f"prompt.chat_template={CHAT}", "prompt.system=null", "prompt.examples=[]", "output.chunk_rows=10",
        "engine.kv_cache_gib=0.05", "model.dtype=float32", "engine.num_threads=1",
    ]  # fmt: skip
    assert cli.main(words) == 0
    rows = read(tmp_path / "out")
    assert [row["custom_id"] for row in rows[:31]] == [f"request-{i}" for i in range(31)]
    assert [row["completion_tokens"] for row in rows[:30]] == [1 + i % 4 for i in range(30)]
    assert rows[30]["error"].startswith("line 31: body.stream=true is not supported")
    assert rows[31]["error"].startswith("line 32: not JSON")
    # Its own seed decides, not the place in the file.
    assert rows[32]["label"] == rows[33]["label"]
    answers = [json.loads(line) for line in (tmp_path / "out" / BATCH_OUTPUT).read_text("utf-8").splitlines()]
    assert [answer["custom_id"] for answer in answers] == [row["custom_id"] for row in rows]
    choices = [answer["response"]["body"]["choices"][0] for answer in answers if answer["response"]]
    assert [choice["message"]["content"] for choice in choices] == [
        row["label"] for row in rows if row["status"] == "ok"
    ]
    assert [answer["error"]["code"] for answer in answers if answer["error"]] == ["invalid_row", "invalid_row"]
    before = (tmp_path / "out" / BATCH_OUTPUT).read_bytes()
    (tmp_path / "out" / "part-00000-000001.parquet").unlink()
    assert cli.main(words) == 0
    assert (tmp_path / "out" / BATCH_OUTPUT).read_bytes() == before


def test_requests_get_the_log_probabilities_that_they_ask_for(tiny: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "w5 w6 w7"}]
    asked: list[dict[str, Any]] = [{"logprobs": True, "top_logprobs": 2}, {"logprobs": True}, {}]
    lines = [request(str(i), messages=said, max_tokens=3, ignore_eos=True, **body) for i, body in enumerate(asked)]
    source = write_lines(tmp_path / "requests.jsonl", lines)
    words = [
        "job=generate", "input=openai", f"model={tiny}", f"input.path={source}", f"output.path={tmp_path / 'out'}",
        f"prompt.chat_template={CHAT}", "engine.kv_cache_gib=0.05", "model.dtype=float32", "engine.num_threads=1",
    ]  # fmt: skip
    assert cli.main(words) == 0
    rows = read(tmp_path / "out")
    answers = [json.loads(line) for line in (tmp_path / "out" / BATCH_OUTPUT).read_text("utf-8").splitlines()]
    both, alone, none = (answer["response"]["body"]["choices"][0]["logprobs"] for answer in answers)
    assert none is None
    assert rows[2]["logprobs"] is None
    assert [token["top_logprobs"] for token in alone["content"]] == [[], [], []]
    assert "".join(token["token"] for token in both["content"]) == rows[0]["completion"].replace(" ", "")
    for token, mine in zip(both["content"], rows[0]["logprobs"], strict=True):
        assert bytes(token["bytes"]).decode() == token["token"]
        assert token["logprob"] == mine["logprob"]
        assert token["top_logprobs"][0] == {key: token[key] for key in ("token", "bytes", "logprob")}, "it is greedy"
        assert len(token["top_logprobs"]) == 2


def test_a_column_with_parameters_needs_no_batch_file(tiny: Path, tmp_path: Path) -> None:
    params = [{"max_tokens": 2}, None, {"max_tokens": -1}, {"top_p": 0.9}]
    lines = [{"text": f"w{i} w{i + 7} w{i + 9}", "own": json.dumps(own)} for i, own in zip((20, 30, 40, 50), params)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    options = {"prompt__params": "own", "sampling__ignore_eos": True, "sampling__max_tokens": 6}
    runner.run(job(tiny, source, tmp_path / "out", **options))
    rows = read(tmp_path / "out")
    assert [row["completion_tokens"] for row in rows] == [2, 6, 0, 6]
    assert rows[2]["error_type"] == "invalid_row"
    assert "sampling.max_tokens=-1" in rows[2]["error"]
    other = write_lines(tmp_path / "b.jsonl", [{"id": 1, "text": "x"}])
    with pytest.raises(InputError, match=r"prompt\.params=id"):
        runner.run(job(tiny, other, tmp_path / "other", prompt__params="id"))


def test_words_of_the_command_line(tmp_path: Path) -> None:
    config = compose_config(
        [
            "job=generate",
            "input.path=s3://bucket/**/*.csv",
            "input.filter=rating >= 4 and lang == 'en'",
            r"input.delimiter=\t",
            "input.types.id=string",
            "input.types.at=timestamp[us]",
            "input.sample=0.25",
            "input.storage_options.endpoint_url=http://127.0.0.1:9000",
            "input.storage_options.client_kwargs.region_name=eu-west-1",
        ]
    )
    assert config.input.path == ["s3://bucket/**/*.csv"]
    assert config.input.filter == "rating >= 4 and lang == 'en'"
    assert config.input.delimiter == "\t"
    assert config.input.types == {"id": "string", "at": "timestamp[us]"}
    assert config.input.sample == 0.25
    assert config.input.storage_options == {
        "endpoint_url": "http://127.0.0.1:9000",
        "client_kwargs": {"region_name": "eu-west-1"},
    }


@pytest.mark.parametrize(
    "words", [["input=openai"], ["input.format=openai"], ["input=openai", "prompt.messages=messages"]]
)
def test_requests_bring_their_messages_and_parameters(words: list[str]) -> None:
    prompt = compose_config(["job=generate", *words]).prompt
    assert (prompt.messages, prompt.params, prompt.template, prompt.template_file) == ("messages", "params", None, None)


def test_requests_keep_their_ids() -> None:
    own = compose_config(["job=generate", "input=openai", "prompt.template={{ messages }}"]).prompt
    assert (own.messages, own.template) == (None, "{{ messages }}")
    with pytest.raises(ConfigError, match=r"output\.columns=.* leaves out custom_id"):
        compose_config(["job=generate", "input=openai", "output.columns=[url]"])

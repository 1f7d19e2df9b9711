"""Rows that are not like the others: at the window's edge, empty, cut, passed over, and a thousand bad ones."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import errors, runner
from batchrun.engine.params import Completion
from tests.fake import FakeEngine
from tests.test_runner import job, read, words, write_input

WINDOW = 24
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.families import make_model

    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def text(tokens: int) -> str:
    return " ".join(f"w{4 + i}" for i in range(tokens))


@pytest.mark.parametrize("policy", ["error", "skip", "truncate_left", "truncate_right", "truncate_middle"])
def test_prompts_around_the_window(tiny: Path, tmp_path: Path, policy: str) -> None:
    lengths = [WINDOW - 1, WINDOW, WINDOW + 1, 10 * WINDOW, 5]
    source = write_input(tmp_path / "in", [text(n) for n in lengths])
    limits = {"model__max_model_len": WINDOW, "sampling__max_tokens": 4, "sampling__ignore_eos": True}
    assert runner.run(job(tiny, source, tmp_path / "out", prompt__overlong=policy, **limits)) == 0
    rows = read(tmp_path / "out")
    if policy.startswith("truncate"):
        assert [row["prompt_tokens"] for row in rows] == [WINDOW - 4] * 4 + [5]
        assert [row["truncated_tokens"] for row in rows] == [3, 4, 5, 9 * WINDOW + 4, 0]
        assert [row["completion_tokens"] for row in rows] == [4] * 5
        assert [row["max_tokens"] for row in rows] == [4] * 5
    else:
        status = {"error": "error", "skip": "skipped"}[policy]
        assert [row["status"] for row in rows] == ["ok", status, status, status, "ok"]
        assert [row["error_type"] for row in rows] == [None, *["prompt_too_long"] * 3, None]
        assert [row["finish_reason"] for row in rows] == ["length", status, status, status, "length"]
        assert [row["prompt_tokens"] for row in rows] == lengths
        assert [row["completion_tokens"] for row in rows] == [1, 0, 0, 0, 4]
        # One token is all that the first prompt leaves; what is not sent has no limit.
        assert [row["max_tokens"] for row in rows] == [1, None, None, None, 4]
        assert [row["truncated_tokens"] for row in rows] == [0] * 5


def test_what_is_left_of_a_cut_prompt_is_answered_like_that_prompt(tiny: Path, tmp_path: Path) -> None:
    limits = {"model__max_model_len": WINDOW, "sampling__max_tokens": 4}
    long, short = write_input(tmp_path / "long", [text(90)]), write_input(tmp_path / "short", [text(WINDOW - 4)])
    runner.run(job(tiny, long, tmp_path / "cut", prompt__overlong="truncate_right", **limits))
    runner.run(job(tiny, short, tmp_path / "whole", **limits))
    assert read(tmp_path / "cut")[0]["completion"] == read(tmp_path / "whole")[0]["completion"]


@pytest.mark.parametrize(("policy", "status"), [("error", "error"), ("skip", "skipped")])
def test_empty_rows_are_errors_or_passed_over(tiny: Path, tmp_path: Path, policy: str, status: str) -> None:
    texts = [*words(5), None, "", " \t\n", *words(3, seed=1)]
    source = write_input(tmp_path / "in", texts)
    config = job(tiny, source, tmp_path / "out", prompt__on_empty=policy, prompt__template="w7 {{ text }} w8")
    assert runner.run(config) == 0
    rows = read(tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok"] * 5 + [status] * 3 + ["ok"] * 3
    assert [row["error_type"] for row in rows[5:8]] == ["empty_prompt"] * 3
    assert all(row["completion"] is None for row in rows[5:8])
    summary = json.loads((tmp_path / "out" / "__batchrun" / "summary.json").read_text())
    assert summary["statuses"] == {"ok": 8, status: 3}
    assert summary["error_types"] == ({"empty_prompt": 3} if status == "error" else {})


def test_rows_that_are_passed_over_cost_no_error_budget(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", [None] * 150 + words(5))
    changes = {"run__max_error_rate": 0.01, "run__min_rows": 10}
    assert runner.run(job(tiny, source, tmp_path / "out", prompt__on_empty="skip", **changes)) == 0
    assert Counter(row["status"] for row in read(tmp_path / "out")) == {"skipped": 150, "ok": 5}
    with pytest.raises(errors.ErrorBudgetExceeded, match="empty_prompt"):
        runner.run(job(tiny, source, tmp_path / "budget", **changes))


def test_max_tokens_of_a_row_is_clipped_to_the_window(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    table = pa.table({"text": [text(20), text(5), text(5)], "p": ['{"max_tokens": 9}', '{"max_tokens": 9}', None]})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    changes = {"prompt__params": "p", "model__max_model_len": WINDOW, "sampling__max_tokens": 1000}
    runner.run(job(tiny, tmp_path / "in", tmp_path / "out", sampling__ignore_eos=True, **changes))
    rows = read(tmp_path / "out")
    assert [row["max_tokens"] for row in rows] == [4, 9, WINDOW - 5]
    assert [row["completion_tokens"] for row in rows] == [4, 9, WINDOW - 5]


def test_a_thousand_bad_rows_are_a_few_lines_and_a_count(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(runner, "load_engine", lambda *_: FakeEngine())
    source = write_input(tmp_path / "in", [*["boom"] * 600, *[None] * 400, *words(10)])
    template = "{{ text }}{% if text == 'boom' %}{{ 1 // 0 }}{% endif %}"
    config = job(tiny, source, tmp_path / "out", prompt__template=template, run__max_error_rate=1.0)
    with caplog.at_level(logging.INFO):
        assert runner.run(config) == 0
    told = [record for record in caplog.records if "row" in record.getMessage()]
    assert [re.search(r"template_error|empty_prompt", record.getMessage())[0] for record in told] == [  # type: ignore[index]
        *["template_error"] * 3,
        *["empty_prompt"] * 3,
    ]
    assert all(record.exc_info is None for record in caplog.records)
    captured = capsys.readouterr()
    assert "600 template_error, 400 empty_prompt" in captured.out
    assert "Traceback" not in captured.err
    summary = json.loads((tmp_path / "out" / "__batchrun" / "summary.json").read_text())
    assert summary["error_types"] == {"template_error": 600, "empty_prompt": 400}


class Mangling(FakeEngine):
    """Says what no tokenizer should: half of a surrogate pair."""

    def step(self) -> list[Completion]:
        completions = super().step()
        for completion in completions:
            completion.text = f"\ud835 {completion.text} \udc00"
        return completions


def test_lone_surrogates_from_the_engine_are_replaced(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "load_engine", lambda *_: Mangling())
    source = write_input(tmp_path / "in", words(100))
    assert runner.run(job(tiny, source, tmp_path / "out", output__journal_seconds=0.01)) == 0
    texts = [row["completion"] for row in read(tmp_path / "out")]
    assert all(re.fullmatch("\ufffd a[0-9-]+ \ufffd", text) for text in texts)


def test_error_types_are_those_that_are_documented() -> None:
    page = (ROOT / "docs" / "output.md").read_text(encoding="utf-8")
    table = page.split("| `error_type` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(get_args(errors.ErrorType))


def test_error_types_in_the_code_are_those_of_the_list() -> None:
    used = set()
    for path in (ROOT / "batchrun").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", "")
                given = [keyword.value for keyword in node.keywords if keyword.arg == "error_type"]
                given += node.args[:1] if name == "RowError" else node.args[1:2] if name == "Prompt" else []
                used |= {value.value for value in given if isinstance(value, ast.Constant)}
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                used |= {node.value.value for target in node.targets if getattr(target, "attr", "") == "error_type"}
    assert {"invalid_row", "template_error", "empty_prompt", "prompt_too_long", "engine_error"} <= used
    assert used <= set(get_args(errors.ErrorType))


def test_rows_that_repeat_themselves_end_and_are_counted(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    asks = '{"repetition_max_pattern": 8, "repetition_min_count": 3}'
    table = pa.table({"text": words(40) * 2, "p": [asks] * 40 + [None] * 40})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    changes = {"prompt__params": "p", "sampling__max_tokens": 60, "sampling__ignore_eos": True}
    runner.run(job(tiny, tmp_path / "in", tmp_path / "out", **changes))
    rows = read(tmp_path / "out")
    reasons = Counter(row["finish_reason"] for row in rows[:40])
    assert reasons["repetition"] > 0
    assert {row["finish_reason"] for row in rows[40:]} == {"length"}
    for row, whole in zip(rows[:40], rows[40:], strict=True):
        assert whole["completion"].startswith(row["completion"])
        if row["finish_reason"] == "repetition":
            said = row["completion"].split()
            assert any(said[-3 * p :] == said[-p:] * 3 for p in range(1, 9))
    summary = json.loads((tmp_path / "out" / "__batchrun" / "summary.json").read_text())
    assert summary["finish_reasons"] == {"length": 80 - reasons["repetition"], "repetition": reasons["repetition"]}


def test_a_row_cannot_ask_for_a_pattern_that_the_job_cannot_have(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    asks = ['{"repetition_min_pattern": 9}', '{"repetition_max_pattern": 5000}', None]
    pq.write_table(pa.table({"text": words(3), "p": asks}), tmp_path / "in" / "a.parquet")
    changes = {"prompt__params": "p", "sampling__repetition_max_pattern": 4}
    runner.run(job(tiny, tmp_path / "in", tmp_path / "out", **changes))
    assert [row["error_type"] for row in read(tmp_path / "out")] == [None, "invalid_row", None]
    with pytest.raises(errors.ConfigError, match=r"repetition_min_pattern=9 .*between 1 and 4"):
        job(tiny, tmp_path, tmp_path, sampling__repetition_min_pattern=9, sampling__repetition_max_pattern=4)


def test_lone_surrogates_come_back_from_the_journal(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dies(Mangling):
        def step(self) -> list[Completion]:
            if self.completed >= 48:
                raise KeyboardInterrupt
            return super().step()

    source = write_input(tmp_path / "in", [" ".join([f"w{4 + i}"] * 3) for i in range(60)])
    config = job(tiny, source, tmp_path / "out")
    monkeypatch.setattr(runner, "load_engine", lambda *_: Dies())
    with pytest.raises(KeyboardInterrupt):
        runner.run(config)
    assert not list((tmp_path / "out").glob("part-*")), "all that is finished is in the journal"
    monkeypatch.setattr(runner, "load_engine", lambda *_: FakeEngine())
    runner.run(config)
    texts = [row["completion"] for row in read(tmp_path / "out")]
    assert sum(text.startswith("\ufffd ") and text.endswith(" \ufffd") for text in texts) == 48
    assert sum(text.startswith("a") for text in texts) == 12


def test_broken_utf8_in_a_column_is_that_row_s_alone(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    values = [b"w5 w6", b"w5 \xff\xfe w6", b"w7"]
    offsets = pa.py_buffer(np.cumsum([0, *map(len, values)]).astype(np.int32).tobytes())
    broken = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"".join(values)))
    pq.write_table(pa.table({"id": [0, 1, 2], "text": broken}), tmp_path / "in" / "a.parquet")
    assert runner.run(job(tiny, tmp_path / "in", tmp_path / "out", output__columns=["id"])) == 0
    rows = read(tmp_path / "out")
    assert [row["error_type"] for row in rows] == [None, "invalid_row", None]
    assert rows[1]["error"].startswith("column text: ")
    assert runner.run(job(tiny, tmp_path / "in", tmp_path / "whole")) == 0
    kept = pq.read_table(tmp_path / "whole" / "part-00000-000000.parquet")["text"].cast(pa.binary()).to_pylist()
    assert kept == values

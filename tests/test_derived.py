"""Columns that are made of an output row's other columns, and the shipped jobs that live on them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import cli, runner
from batchrun.compose import compose_config
from batchrun.config import Config, OutputConfig
from batchrun.data.derived import normalised
from batchrun.data.reparse import reparse_parts
from batchrun.engine.params import Completion
from batchrun.errors import FingerprintMismatch, InputError
from tests import fake
from tests.engine.families import build_model, make_model
from tests.engine.speller import VOCABULARY, make_tokenizer
from tests.test_runner import job, read, write_input

CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads any text, with room for the shipped prompts and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    build_model("llama", vocab_size=VOCABULARY, max_position_embeddings=2048).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


class Engine(fake.FakeEngine):
    """Says `says[ids of the prompt]`, or what `answer` makes of them."""

    says: ClassVar[dict[tuple[int, ...], str]] = {}

    def _complete(self, request: Any) -> Completion:
        completion = super()._complete(request)
        completion.text = self.says.get(tuple(request.prompt_ids), completion.text)
        return completion


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], str]:
    monkeypatch.setattr(Engine, "says", {})
    monkeypatch.setattr(runner, "load_engine", lambda *_: Engine())
    return Engine.says


def test_texts_of_a_row_s_columns(tiny: Path, tmp_path: Path, says: dict[tuple[int, ...], str]) -> None:
    says.update({(5,): "Answer: B.", (6,): "none", (7,): "Answer: A, as \ud835"})
    source = write_input(tmp_path / "in", ["w5", "w6", None, "w7"])
    derived = {"letter": "{{ completion | find('Answer: ([AB])') }}", "odd": "{{ 1 / (id % 2) }} {{ finish_reason }}"}
    runner.run(job(tiny, source, tmp_path / "out", output__derived=derived, output__prefix=""))
    found = [(row["letter"], row["odd"], row["derived_error"]) for row in read(tmp_path / "out")]
    assert found == [
        ("B", None, "odd: division by zero"),
        (None, "1.0 stop", None),
        (None, None, None),
        ("A", "1.0 stop", None),
    ]
    (part,) = (tmp_path / "out").glob("part-*")
    assert pq.read_schema(part).names[-3:] == ["letter", "odd", "derived_error"]
    summary = json.loads((tmp_path / "out" / "__batchrun" / "summary.json").read_text())
    assert summary["values"] == {"letter": {"B": 1, "A": 1}, "odd": {"1.0 stop": 2}}


def test_many_values_are_not_counted(tiny: Path, tmp_path: Path, says: dict[tuple[int, ...], str]) -> None:
    source = write_input(tmp_path / "in", [fake.words(i) for i in range(100)])
    derived = {"same": "{{ completion }}", "even": "{{ id % 2 == 0 }}"}
    runner.run(job(tiny, source, tmp_path / "out", output__derived=derived, output__chunk_rows=10))
    summary = json.loads((tmp_path / "out" / "__batchrun" / "summary.json").read_text())
    assert summary["values"] == {"even": {"True": 50, "False": 50}}


def test_derived_columns_are_made_anew_without_the_model(
    tiny: Path, tmp_path: Path, says: dict[tuple[int, ...], str]
) -> None:
    source = write_input(tmp_path / "in", ["w5", "w5", "w6"])
    out, first = tmp_path / "out", {"a": "{{ completion }}"}
    config = job(tiny, source, out, output__derived=first, output__duplicates=True, output__prefix="p_")
    config.output.derived = {"a": "{{ p_completion }}"}
    runner.run(config)
    assert [row["p_duplicate_of"] for row in read(out)] == [None, {"source_row": 0, "sample": 0}, None]
    other = job(tiny, source, out, output__derived={"b": "{{ text }}"}, output__prefix="p_")
    with pytest.raises(FingerprintMismatch, match=r"output\.derived"):
        runner.run(other)
    reparse_parts(out, OutputConfig(derived={"b": "{{ text }}"}))
    rows = read(out)
    assert [row["p_b"] for row in rows] == ["w5", "w5", "w6"]
    assert not {"p_a", "p_duplicate_of"} & rows[0].keys()
    assert runner.run(other) == 0
    reparse_parts(out, OutputConfig())
    assert not {"p_b", "p_derived_error"} & read(out)[0].keys()


def test_what_cannot_be_is_refused(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", ["w5"])
    for derived, message in (
        ({"a": "{{ nothing }}"}, r"output\.derived\.a uses nothing"),
        ({"a": "w", "b": "{{ a }}"}, r"output\.derived\.b uses a"),
        ({"status": "w"}, r"output\.derived\.status is the name of another"),
        ({"text": "w"}, "adds to the output: text"),
    ):
        with pytest.raises(InputError, match=message):
            runner.run(job(tiny, source, tmp_path / "out", output__derived=derived))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("A b.", " a  B ", True),
        ("\ufb01ne, naïve!", "fine nai\u0308ve", True),
        ("日本語。", "日本語", True),
        ("a b", "ab", False),
        ("1.5", "15", False),
    ],
)
def test_what_counts_as_equal(one: str, other: str, equal: bool) -> None:
    assert (normalised(one) == normalised(other)) == equal


def shipped(name: str, model: Path, source: Path, output: Path, *more: str) -> Config:
    return compose_config(
        [
            f"job={name}",
            f"model={model}",
            f"input.path={source}",
            f"output.path={output}",
            "engine.kv_cache_gib=0.05",
            "engine.workers=1",
            *more,
        ]
    )


def write_pairs(folder: Path) -> Path:
    folder.mkdir()
    table = pa.table({"question": ["q"] * 5, "answer_a": list("vwxyz"), "answer_b": list("VWXYZ")})
    pq.write_table(table, folder / "pairs.parquet")
    return folder


def test_judge_says_what_both_orders_say(
    chatty: Path, tmp_path: Path, says: dict[tuple[int, ...], str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = shipped("judge", chatty, write_pairs(tmp_path / "in"), tmp_path / "out")
    tokenizer = make_tokenizer()
    judged = {"v": ("1", "2"), "w": ("2", "1"), "x": ("1", "1"), "y": ("2", "2"), "z": ("tie", "1")}
    for a, answers in judged.items():
        for name, answer in zip(("a_first", "b_first"), answers, strict=True):
            text = config.prompt.prompts[name]
            for column, value in (("question", "q"), ("answer_a", a), ("answer_b", a.upper())):
                text = text.replace(f"{{{{ {column} }}}}", value)
            says[tuple(tokenizer(f"{config.prompt.system} {text} ")["input_ids"])] = answer
    assert runner.run(config) == 0
    rows = read(tmp_path / "out")
    assert {row["answer_a"]: (row["a_first"], row["b_first"]) for row in rows} == judged
    assert [row["verdict"] for row in rows] == ["a", "b", "tie", "tie", "tie"]
    assert [row["favours"] for row in rows] == ["neither", "neither", "first", "second", "neither"]
    assert "verdict       tie 3, a 1, b 1" in capsys.readouterr().out


def test_judge_runs_on_a_model(chatty: Path, tmp_path: Path) -> None:
    assert runner.run(shipped("judge", chatty, write_pairs(tmp_path / "in"), tmp_path / "out")) == 0
    for row in read(tmp_path / "out"):
        assert {row["a_first"], row["b_first"]} <= {"1", "2", "tie"}
        assert row["verdict"] in ("a", "b", "tie")


def test_synthesize_marks_equal_texts_and_merges_without_them(
    chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_input(tmp_path / "in", ["x", "y", "z"]), tmp_path / "out"
    # Few tokens of few kinds: many texts are equal.
    config = shipped(
        "synthesize", chatty, source, out, "sampling.max_tokens=1", "sampling.top_k=4", "output.chunk_rows=2"
    )
    assert runner.run(config) == 0
    rows = read(out)
    assert [(row["id"], row["sample"]) for row in rows] == [(i, sample) for i in range(3) for sample in range(8)]
    for part in (rows[:16], rows[16:]):
        counts = Counter(normalised(row["synthetic"]) for row in part)
        assert sum(row["duplicate_of"] is None for row in part) == len(counts) < len(part)
        for row in part:
            if (first := row["duplicate_of"]) is not None:
                (other,) = [one for one in part if (one["source_row"], one["sample"]) == tuple(first.values())]
                assert normalised(other["synthetic"]) == normalised(row["synthetic"])
                assert other["duplicate_of"] is None
    capsys.readouterr()
    assert cli.main(["job=synthesize", "mode=merge", f"output.path={out}", f"output.merge_path={tmp_path / 'm'}"]) == 0
    (merged,) = (tmp_path / "m").glob("*.parquet")
    texts = [normalised(text) for text in pq.read_table(merged)["synthetic"].to_pylist()]
    assert texts == list(dict.fromkeys(normalised(row["synthetic"]) for row in rows))
    assert f"{24 - len(texts)} rows are left out" in capsys.readouterr().out

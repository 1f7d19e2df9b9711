"""Rows of several prompts: conversations, and prompts with names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from batchrun import LLM, runner
from batchrun.config import Config, InputConfig, OutputConfig, PromptConfig
from batchrun.engine.params import SamplingParams
from batchrun.errors import ConfigError, InputError
from tests import fake
from tests.engine.families import make_model
from tests.test_runner import job, read, words, write_input

CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}w4"
TALK: dict[str, Any] = {"prompt__kind": "chat", "prompt__chat_template": CHAT}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "load_engine", lambda *_: fake.FakeEngine())


def test_each_turn_is_what_the_model_says_to_all_before_it(tiny: Path, tmp_path: Path) -> None:
    texts = words(6)
    source = write_input(tmp_path / "in", texts)
    turns = ["w9 {{ answers[0] }} {{ id }}", "w10 {{ answers | length }}"]
    changes = {**TALK, "prompt__turns": turns, "sampling__ignore_eos": True}
    assert runner.run(job(tiny, source, tmp_path / "out", **changes)) == 0
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    with LLM(str(tiny), dtype="float32", kv_cache_gib=0.05, workers="1") as llm:
        for number, row in enumerate(read(tmp_path / "out")):
            said, answers = texts[number], []
            for after in (f" w9 {{}} {number}", " w10 2", None):
                (answer,) = llm.generate([f"{said} w4"], SamplingParams(max_tokens=6, ignore_eos=True))
                answers.append(answer.text)
                said += f" {answer.text}" + (after or "").replace("{}", answers[0])
            assert [turn["completion"] for turn in row["turns"]] == answers
            assert row["completion"] == answers[-1]
            assert row["prompt_tokens"] == sum(turn["prompt_tokens"] for turn in row["turns"])
            assert row["completion_tokens"] == 18
            # A chat template may close an answer before the block that it ends in is full.
            before = len(tokenizer(f"{texts[number]} w4")["input_ids"])
            assert row["turns"][0]["prompt_tokens"] == before
            assert row["turns"][1]["cached_tokens"] >= (before - 1) // 8 * 8
            assert row["turns"][2]["cached_tokens"] >= (row["turns"][1]["prompt_tokens"] - 1) // 8 * 8


@pytest.mark.usefixtures("engine")
def test_samples_of_a_conversation_go_their_own_ways(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", [fake.words(i) for i in range(3)])
    changes = {"sampling__n": 2, "sampling__temperature": 1.0, "prompt__turns": ["{{ answers[0] }}"]}
    runner.run(job(tiny, source, tmp_path / "out", **TALK, **changes))
    rows = read(tmp_path / "out")
    assert [(row["id"], row["sample"]) for row in rows] == [(i, sample) for i in range(3) for sample in range(2)]
    assert len({row["turns"][0]["completion"] for row in rows}) == 6
    assert {len(row["turns"]) for row in rows} == {2}


@pytest.mark.usefixtures("engine")
def test_equal_conversations_are_held_once_until_they_part(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHRUN_FAKE_LOG", str(tmp_path / "log"))
    source = write_input(tmp_path / "in", [fake.words(0)] * 40)
    runner.run(job(tiny, source, tmp_path / "out", **TALK, prompt__turns=["w{{ 4 + id % 4 }}"]))
    assert len((tmp_path / "log").read_text().splitlines()) == 1 + 4
    rows = read(tmp_path / "out")
    assert [row["completion"] for row in rows] == [rows[i % 4]["completion"] for i in range(40)]
    assert len({row["completion"] for row in rows}) == 4
    assert sum(row["deduplicated"] for row in rows) == 36


@pytest.mark.usefixtures("engine")
def test_a_turn_that_cannot_be_sent_ends_the_row_and_keeps_the_answers_before_it(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", ["w5", None, " ".join(["w6"] * 18), "w7"])
    turns = ["w8 w9", "{% if id == 3 %}{{ answers[5].x }}{% else %}w9{% endif %}"]
    changes = {"model__max_model_len": 22, "run__max_error_rate": 1.0, "prompt__turns": turns}
    runner.run(job(tiny, source, tmp_path / "out", **TALK, **changes))
    whole, empty, long, broken = read(tmp_path / "out")
    assert (whole["status"], len(whole["turns"])) == ("ok", 3)
    assert (empty["error_type"], empty["turns"]) == ("empty_prompt", None)
    assert (long["error_type"], long["completion"], len(long["turns"])) == ("prompt_too_long", None, 1)
    assert long["turns"][0]["completion"].startswith("a")
    assert (broken["error_type"], len(broken["turns"])) == ("template_error", 2)
    assert "prompt.turns[1]" in broken["error"]


def test_a_conversation_that_was_cut_short_is_held_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dies(fake.FakeEngine):
        def step(self) -> list[Any]:
            if self.completed > 30:
                raise KeyboardInterrupt
            return super().step()

    source = write_input(tmp_path / "in", [fake.words(i) for i in range(40)])
    config = job(tiny, source, tmp_path / "out", **TALK, prompt__turns=["w5", "w6"], output__journal_seconds=0.01)
    monkeypatch.setattr(runner, "load_engine", lambda *_: Dies(batch=4, room=8))
    with pytest.raises(KeyboardInterrupt):
        runner.run(config)
    monkeypatch.setattr(runner, "load_engine", lambda *_: fake.FakeEngine())
    assert runner.run(config) == 0
    config.output.path = str(tmp_path / "whole")
    runner.run(config)
    found, whole = ([(row["id"], row["turns"]) for row in read(tmp_path / name)] for name in ("out", "whole"))
    assert found == whole
    assert len({row["run"] for row in read(tmp_path / "out")}) == 2


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_named_prompts_have_columns_of_their_names_and_know_the_earlier_answers(
    tiny: Path, tmp_path: Path, kind: str
) -> None:
    source = write_input(tmp_path / "in", ["w5", "w6"])
    prompts = {"draft": "{{ text }} w8", "critique": "{{ text }} w9", "both": "w10 {{ answers | length }}"}
    template = {"prompt__chat_template": "{{ messages[0]['content'] }}"} if kind == "chat" else {}
    config = job(
        tiny, source, tmp_path / "out", prompt__template=None, prompt__kind=kind, prompt__prompts=prompts, **template
    )
    runner.run(config)
    (part,) = (tmp_path / "out").glob("part-*")
    assert pq.read_schema(part).names[2:6] == ["both", "draft", "critique", "turns"]
    first, second = read(tmp_path / "out")
    assert (first["draft"], first["critique"]) == ("a5-8", "a5-9")
    assert (second["draft"], second["critique"]) == ("a6-8", "a6-9")
    assert first["both"] == second["both"]
    assert second["deduplicated"] is False, "its first answers were its own"
    assert [turn["completion"] for turn in first["turns"]] == [first["draft"], first["critique"], first["both"]]


def test_what_does_not_go_together_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompt\.turns goes on with a conversation"):
        PromptConfig(kind="completion", template="x", turns=["y"])
    with pytest.raises(ConfigError, match=r"prompt\.template and prompt\.prompts are both set"):
        PromptConfig(template="x", prompts={"a": "y"})
    prompt = PromptConfig(prompts={"a": "x", "b": "y"})
    with pytest.raises(ConfigError, match=r"leave out output\.completion=c"):
        Config(prompt=prompt, output=OutputConfig(completion="c"), input=InputConfig())
    source = write_input(tmp_path / "in", ["w5"])
    for text, message in (("{{ nothing }}", r"prompt\.turns\[0\] uses nothing"), ("{% if %}", r"turns\[0\], line 1")):
        with pytest.raises(InputError, match=message):
            runner.run(job(tiny, source, tmp_path / "out", **TALK, prompt__turns=[text]))
    with pytest.raises(InputError, match="adds to the output: text"):
        runner.run(
            job(tiny, source, tmp_path / "out", prompt__template=None, prompt__prompts={"text": "w5", "b": "w6"})
        )

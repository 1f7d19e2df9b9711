"""Jobs that choose and score: the numbers are those of a loop over transformers, and rows come through a crash."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchrun import runner
from batchrun.config import Config
from batchrun.dry import plan, preview
from batchrun.engine.engine import Engine
from batchrun.engine.params import Completion
from batchrun.errors import ConfigError, InputError
from tests.engine.families import make_model
from tests.test_runner import job, read

LABELS = ["w7", "w8 w9", "w8 w10 w11", "w12"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny)


def texts(rows: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    head = " ".join(f"w{i}" for i in rng.integers(4, 256, 10))
    return [f"{head} " + " ".join(f"w{j}" for j in rng.integers(4, 256, rng.integers(1, 28))) for _ in range(rows)]


def write(folder: Path, **columns: Any) -> Path:
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return folder


def task(name: str, model: Path, source: Path, output: Path, **changes: Any) -> Config:
    config = job(model, source, output, **changes)
    config.task = name
    config.__post_init__()
    return config


@torch.inference_mode()
def tokens_after(reference: Any, prompt: str, text: str) -> tuple[np.ndarray, bool]:
    """Log-probabilities of the tokens of `text` after the prompt, and whether all are the likeliest."""
    model, tokenizer = reference
    ids, start = tokenizer(f"{prompt} {text}")["input_ids"], len(tokenizer(prompt)["input_ids"])
    logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
    following = torch.tensor(ids[start:])
    logprobs = logits.log_softmax(dim=-1)[torch.arange(len(following)), following]
    return logprobs.numpy().astype(np.float64), bool((logits.argmax(dim=-1) == following).all())


@pytest.mark.parametrize("normalize", ["none", "tokens", "bytes"])
def test_choose_says_what_a_loop_says(tiny: Path, tmp_path: Path, reference: Any, normalize: str) -> None:
    source = write(tmp_path / "in", id=range(40), text=texts(40))
    assert runner.run(
        task("choose", tiny, source, tmp_path / "out", choose__labels=LABELS, choose__normalize=normalize)
    ) == 0  # fmt: skip
    divisor = {"none": [1] * 4, "tokens": [1, 2, 3, 1], "bytes": [len(label) for label in LABELS]}[normalize]
    for row in read(tmp_path / "out"):
        total = np.array([tokens_after(reference, row["text"], label)[0].sum() for label in LABELS])
        expected = torch.tensor(total / divisor).softmax(dim=0).numpy()
        assert [one["label"] for one in row["probabilities"]] == LABELS
        assert [one["log_likelihood"] for one in row["probabilities"]] == pytest.approx(total, abs=1e-3)
        assert [one["probability"] for one in row["probabilities"]] == pytest.approx(expected, abs=1e-3)
        assert row["label"] == LABELS[int(expected.argmax())]
        assert row["margin"] == pytest.approx(np.sort(expected)[-1] - np.sort(expected)[-2], abs=1e-3)
        assert (row["status"], row["finish_reason"]) == ("ok", "stop")
        assert not {"completion", "completion_tokens", "max_tokens"} & row.keys()


def test_labels_of_each_row_and_equal_rows(tiny: Path, tmp_path: Path, reference: Any) -> None:
    text = texts(1)[0]
    labels = [["w7", "w8"], ["w8", "w7"], ["w7", "w8"], ["w7"], None, ["w7", "w7"], ["w9", "w10", "w11"]]
    source = write(tmp_path / "in", text=[text] * 7, labels=labels)
    config = task("choose", tiny, source, tmp_path / "out", choose__labels="labels", run__max_error_rate=1.0)
    assert runner.run(config) == 0
    rows = read(tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["error"] * 3 + ["ok"]
    assert [row["deduplicated"] for row in rows] == [False, False, True, False, False, False, False]
    assert rows[0]["label"] == rows[1]["label"] == rows[2]["label"]
    assert rows[0]["probabilities"] == rows[1]["probabilities"][::-1] == rows[2]["probabilities"]
    assert all(row["label"] is None and row["probabilities"] is None for row in rows[3:6])
    assert [row["error"] for row in rows[3:5]] == [
        f"column labels: {given!r} must be two labels or more, all different, none empty" for given in (["w7"], [])
    ]
    assert [one["label"] for one in rows[6]["probabilities"]] == labels[6]


def test_score_says_what_a_loop_says(tiny: Path, tmp_path: Path, reference: Any) -> None:
    source = write(tmp_path / "in", text=[*texts(30), "w5"])
    assert runner.run(task("score", tiny, source, tmp_path / "out")) == 0
    *rows, last = read(tmp_path / "out")
    model, tokenizer = reference
    for row in rows:
        ids = torch.tensor([tokenizer(row["text"])["input_ids"]])
        with torch.inference_mode():
            loss = float(model(ids, labels=ids).loss)
        assert row["num_tokens"] == ids.shape[1] - 1
        assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)
        assert row["log_likelihood"] == pytest.approx(-loss * row["num_tokens"], abs=1e-3)
    assert (last["status"], last["num_tokens"], last["log_likelihood"], last["perplexity"]) == ("ok", 0, 0.0, None)


def test_only_a_continuation_counts(tiny: Path, tmp_path: Path, reference: Any) -> None:
    prompts, answers = texts(20), [" ".join(text.split()[:4]) for text in texts(20, seed=1)]
    model, tokenizer = reference
    greedy = [model.generate(torch.tensor([tokenizer(text)["input_ids"]]), max_new_tokens=2) for text in prompts]
    answers[::2] = [tokenizer.decode(ids[0, -2:]) for ids in greedy][::2]
    source = write(tmp_path / "in", text=prompts, answer=answers)
    config = task("score", tiny, source, tmp_path / "out", score__continuation=" {{ answer }}")
    assert runner.run(config) == 0
    for row in read(tmp_path / "out"):
        logprobs, is_greedy = tokens_after(reference, row["text"], row["answer"])
        assert row["log_likelihood"] == pytest.approx(logprobs.sum(), abs=1e-3)
        assert (row["num_tokens"], row["is_greedy"]) == (len(logprobs), is_greedy)
    assert [row["is_greedy"] for row in read(tmp_path / "out")][::2] == [True] * 10


def test_long_texts_go_in_strided_windows(tiny: Path, tmp_path: Path, reference: Any) -> None:
    """As in the loop of transformers' page on perplexity."""
    long = [" ".join(f"w{4 + i * k % 250}" for i in range(n)) for k, n in ((7, 103), (11, 33), (3, 32), (5, 2))]
    source = write(tmp_path / "in", text=long)
    config = task("score", tiny, source, tmp_path / "out", score__stride=8, model__max_model_len=32)
    assert runner.run(config) == 0
    model, tokenizer = reference
    for row in read(tmp_path / "out"):
        ids, total, before = tokenizer(row["text"])["input_ids"], 0.0, 0
        for begin in range(0, len(ids), 8):
            end = min(begin + 32, len(ids))
            window = torch.tensor([ids[begin:end]])
            with torch.inference_mode():
                logprobs = model(window).logits[0, :-1].log_softmax(dim=-1)
            told = logprobs[torch.arange(window.shape[1] - 1), window[0, 1:]]
            total += float(told[-(end - before) :].sum())
            before = end
            if end == len(ids):
                break
        assert row["num_tokens"] == len(ids) - 1 == row["prompt_tokens"] - 1
        assert row["log_likelihood"] == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize(("tokens", "status"), [(32, "ok"), (33, "error")])
def test_a_text_may_fill_the_window_and_no_more(tiny: Path, tmp_path: Path, tokens: int, status: str) -> None:
    source = write(tmp_path / "in", text=[" ".join(["w5"] * tokens)])
    config = task("score", tiny, source, tmp_path / "out", model__max_model_len=32, run__max_error_rate=1.0)
    assert runner.run(config) == 0
    (row,) = read(tmp_path / "out")
    assert row["status"] == status
    assert row["error_type"] == (None if status == "ok" else "prompt_too_long")


def test_prompts_are_cut_so_that_the_longest_label_fits(tiny: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in", text=[" ".join(["w5"] * tokens) for tokens in (20, 29, 30, 50)])
    changes = {"model__max_model_len": 32, "choose__labels": LABELS, "prompt__overlong": "truncate_left"}
    assert runner.run(task("choose", tiny, source, tmp_path / "out", **changes)) == 0
    rows = read(tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert [row["prompt_tokens"] for row in rows] == [20, 29, 29, 29]
    assert [row["truncated_tokens"] for row in rows] == [0, 0, 1, 21]


@pytest.mark.slow
def test_two_processes_choose_what_one_does(tiny: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in", text=texts(40))
    for workers in ("1", "2"):
        changes = {"choose__labels": LABELS, "engine__workers": workers, "engine__num_threads": 1}
        assert runner.run(task("choose", tiny, source, tmp_path / workers, **changes)) == 0
    one, two = (read(tmp_path / workers) for workers in ("1", "2"))
    assert [row["source_row"] for row in two] == list(range(40))
    assert [row["label"] for row in two] == [row["label"] for row in one]
    assert [row["margin"] for row in two] == pytest.approx([row["margin"] for row in one], abs=1e-4)


class Dies(Exception):
    pass


def test_a_job_that_dies_goes_on_where_it_was(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in", id=range(200), text=texts(200))

    def config(output: str, **changes: Any) -> Config:
        changes |= {"choose__labels": LABELS, "output__journal_seconds": 0.01, "run__dedup": False}
        return task("choose", tiny, source, tmp_path / output, **changes)

    runner.run(config("whole"))
    seen: list[int] = []
    limits = [50, 60, 70, 10**9]
    step = Engine.step

    def counting(engine: Engine) -> list[Completion]:
        done = step(engine)
        seen.append(len(done))
        if sum(seen) >= limits[0]:
            raise Dies
        return done

    monkeypatch.setattr(Engine, "step", counting)
    while len(limits) > 1:
        with pytest.raises(Dies):
            runner.run(config("out"))
        limits.pop(0)
        seen.clear()
    assert runner.run(config("out")) == 0
    assert 0 < sum(seen) < 200 - 50
    columns = ["id", "label", "margin", "probabilities", "status", "source_row"]
    out, whole = ([{key: row[key] for key in columns} for row in read(tmp_path / name)] for name in ("out", "whole"))
    assert [row["id"] for row in out] == list(range(200))
    for mine, theirs in zip(out, whole, strict=True):
        assert mine["label"] == theirs["label"]
        assert mine["margin"] == pytest.approx(theirs["margin"], abs=1e-4)


def test_failed_rows_can_be_retried(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in", text=texts(6))
    changes = {"choose__labels": LABELS, "run__max_error_rate": 1.0}
    step = Engine.step

    def failing(engine: Engine) -> list[Completion]:
        return [
            done if done.key % 2 else Completion(done.key, "", [], "error", error_type="engine_error", error="died")  # type: ignore[operator]
            for done in step(engine)
        ]

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", failing)
        runner.run(task("choose", tiny, source, tmp_path / "out", **changes))
    before = read(tmp_path / "out")
    assert [row["status"] for row in before] == ["error", "ok"] * 3
    again = task("choose", tiny, source, tmp_path / "out", **changes)
    again.retry = ["error"]
    runner.run(again)
    after = read(tmp_path / "out")
    assert [row["status"] for row in after] == ["ok"] * 6
    assert [row["probabilities"] for row in after[1::2]] == [row["probabilities"] for row in before[1::2]]


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("choose", {}, "task=choose needs labels"),
        ("choose", {"choose__labels": "texts"}, "choose.labels=texts is not a column"),
        ("choose", {"choose__labels": "text"}, "choose.labels=text has type string: it must be a list of strings"),
        ("choose", {"choose__labels": ["a", "b"], "output__parse": "json"}, "output.parse=json is for completions"),
        ("choose", {"choose__labels": ["a", "b"], "prompt__params": "text"}, "prompt.params=text is for completions"),
        ("score", {"score__continuation": "{{ no }}"}, "score.continuation uses no"),
        ("score", {"score__stride": 512}, "score.stride=512 leaves nothing of a window of model.max_model_len=512"),
        ("score", {"input__format": "openai"}, "input.format=openai is for completions"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_loads(
    tiny: Path, tmp_path: Path, name: str, changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "load_engine", lambda *_: pytest.fail("the model was loaded"))
    source = write(tmp_path / "in", text=["w5"])
    with pytest.raises((ConfigError, InputError)) as caught:
        runner.run(task(name, tiny, source, tmp_path / "out", **changes))
    assert why in str(caught.value)


@pytest.mark.parametrize("labels", [["one"], ["a", "a"], ["a", ""]])
def test_labels_that_are_no_choice(labels: list[str]) -> None:
    from batchrun.config import ChooseConfig

    with pytest.raises(ConfigError, match=r"choose\.labels"):
        ChooseConfig(labels=labels)


def test_a_preview_shows_what_is_scored(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = [f"w{number} w5" for number in range(6, 16)]
    config = task("choose", tiny, write(tmp_path / "in", text=["w5 w6"]), tmp_path / "out", choose__labels=labels)
    assert preview(config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["w5 w6", "-> 'w6 w5': 2 tokens to score"]
    assert lines[-1] == "-> and 2 more"
    assert plan(config) == 0
    assert "to generate" not in capsys.readouterr().out

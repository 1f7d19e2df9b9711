"""Whole jobs on a tiny model: what lies in the output folder, and what a second run does to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from batchrun import runner
from batchrun.config import Config, ReasoningConfig
from batchrun.errors import ConfigError, FingerprintMismatch
from tests.engine.families import make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def words(rows: int, seed: int = 0) -> list[str]:
    """Prompts of 3 to 40 words that begin alike in groups of eight."""
    rng = np.random.default_rng(seed)
    shared = [" ".join(f"w{i}" for i in rng.integers(4, 256, 12)) for _ in range(-(-rows // 8))]
    return [
        f"{shared[i // 8]} " + " ".join(f"w{j}" for j in rng.integers(4, 256, rng.integers(3, 28))) for i in range(rows)
    ]


def write_input(folder: Path, texts: list[Any], files: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    per_file = -(-len(texts) // files)
    for i in range(files):
        mine = texts[i * per_file : (i + 1) * per_file]
        table = pa.table({"id": pa.array(range(len(mine)), pa.int32()), "text": pa.array(mine, pa.string())})
        pq.write_table(table, folder / f"rows-{i}.parquet", row_group_size=100)
    return folder


def job(model: Path, source: Path, output: Path, **changes: Any) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {
            "kv_cache_gib": 0.05,
            "block_size": 8,
            "max_num_seqs": 32,
            "max_batched_tokens": 256,
            "workers": "1",
        },
        "sampling": {"max_tokens": 6},
        "prompt": {"kind": "completion", "template": "{{ text }}"},
        "input": {"path": str(source)},
        "output": {"path": str(output), "chunk_rows": 64},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    types = get_type_hints(Config)
    return Config(**{name: types[name](**values) for name, values in sections.items()})


def read(output: Path) -> list[dict[str, Any]]:
    """All output rows, parts in order of their names."""
    parts = sorted(output.glob("part-*.parquet"))
    return pa.concat_tables([pq.read_table(part) for part in parts]).to_pylist()


def completions(output: Path) -> list[tuple[str, int, str]]:
    return [(row["source_file"], row["source_row"], row["completion"]) for row in read(output)]


def test_one_output_row_for_each_input_row_in_input_order(tiny: Path, tmp_path: Path) -> None:
    texts = words(300)
    source = write_input(tmp_path / "in", texts, files=3)
    assert runner.run(job(tiny, source, tmp_path / "out")) == 0
    rows = read(tmp_path / "out")
    assert [row["text"] for row in rows] == texts
    assert [(row["source_file"], row["source_row"], row["id"]) for row in rows] == [
        (f"rows-{i}.parquet", j, j) for i in range(3) for j in range(100)
    ]
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    assert all(1 <= row["completion_tokens"] <= 6 for row in rows)
    assert [row["prompt_tokens"] for row in rows] == [len(text.split()) for text in texts]
    assert sum(row["cached_tokens"] for row in rows) > 0
    assert all(0 <= row["queue_s"] <= row["first_token_s"] <= row["total_s"] for row in rows)
    assert not list((tmp_path / "out").glob(".*"))


def test_a_second_run_computes_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_input(tmp_path / "in", words(100))
    config = job(tiny, source, tmp_path / "out")
    runner.run(config)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    monkeypatch.setattr(runner, "load_engine", lambda *_: pytest.fail("the model was loaded"))
    assert runner.run(config) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")} == before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_deleted_part_comes_back_the_same(tiny: Path, tmp_path: Path, temperature: float) -> None:
    source = write_input(tmp_path / "in", words(200))
    config = job(tiny, source, tmp_path / "out", sampling__temperature=temperature)
    runner.run(config)
    before = completions(tmp_path / "out")
    others = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("part-*") if "000002" not in p.name}
    (tmp_path / "out" / "part-00000-000002.parquet").unlink()
    # Settings of the engine may change between runs: they do not change completions.
    runner.run(job(tiny, source, tmp_path / "out", sampling__temperature=temperature, engine__max_num_seqs=3))
    assert completions(tmp_path / "out") == before
    assert {p: p.stat().st_mtime_ns for p in others} == others


def test_sampled_rows_differ_from_each_other_and_by_seed(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", ["w7 w8 w9"] * 40)
    for seed in (0, 1):
        config = job(tiny, source, tmp_path / f"{seed}", sampling__temperature=1.0, sampling__seed=seed)
        runner.run(config)
    first, second = (completions(tmp_path / f"{seed}") for seed in (0, 1))
    assert len({text for _, _, text in first}) > 20
    assert first != second


def test_bad_rows_are_rows_with_a_reason(tiny: Path, tmp_path: Path) -> None:
    texts = [*words(10), None, "", "  ", "w9 " * 600, *words(5, seed=1)]
    source = write_input(tmp_path / "in", texts)
    assert runner.run(job(tiny, source, tmp_path / "out")) == 0
    rows = read(tmp_path / "out")
    assert [row["text"] for row in rows] == texts
    kinds = [row["error_type"] for row in rows]
    assert kinds == [None] * 10 + ["empty_prompt"] * 3 + ["prompt_too_long"] + [None] * 5
    assert all(row["completion"] is None and row["status"] == "error" for row in rows[10:14])
    assert "600" in rows[13]["error"]
    assert rows[13]["prompt_tokens"] == 600
    good = write_input(tmp_path / "good", [*texts[:10], *texts[14:]])
    runner.run(job(tiny, good, tmp_path / "clean"))
    assert [row["completion"] for row in read(tmp_path / "clean")] == [
        row["completion"] for row in rows if row["status"] == "ok"
    ]


def test_files_without_rows_make_parts_with_the_full_schema(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", words(10))
    pq.write_table(pq.read_table(source / "rows-0.parquet").slice(0, 0), source / "rows-1.parquet")
    runner.run(job(tiny, source, tmp_path / "out"))
    parts = sorted((tmp_path / "out").glob("part-*"))
    assert [pq.read_metadata(part).num_rows for part in parts] == [10, 0]
    assert pq.read_schema(parts[0]).remove_metadata() == pq.read_schema(parts[1]).remove_metadata()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling__max_tokens": 7}, "sampling.max_tokens: 6 -> 7"),
        ({"prompt__template": "w5 {{ text }}"}, "prompt.template"),
        ({"sampling__seed": 3}, "sampling.seed: 0 -> 3"),
        ({"output__chunk_rows": 32}, "output.chunk_rows: 64 -> 32"),
    ],
)
def test_another_job_is_refused_at_the_same_output(
    tiny: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    source = write_input(tmp_path / "in", words(10))
    runner.run(job(tiny, source, tmp_path / "out"))
    before = completions(tmp_path / "out")
    with pytest.raises(FingerprintMismatch, match=named.replace(".", r"\.")):
        runner.run(job(tiny, source, tmp_path / "out", **change))
    assert completions(tmp_path / "out") == before


def test_another_model_or_input_is_refused_at_the_same_output(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", words(10))
    runner.run(job(tiny, source, tmp_path / "out"))
    other = make_model("qwen2", tmp_path / "tiny-qwen2")
    with pytest.raises(FingerprintMismatch, match=r"model\.path.*tiny-llama.*tiny-qwen2"):
        runner.run(job(other, source, tmp_path / "out"))
    write_input(tmp_path / "in", words(10, seed=5))
    with pytest.raises(FingerprintMismatch, match=r"rows-0\.parquet"):
        runner.run(job(tiny, source, tmp_path / "out"))


def test_a_moved_model_and_input_go_on(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_input(tmp_path / "in", words(10))
    runner.run(job(tiny, source, tmp_path / "out"))
    source.rename(tmp_path / "moved")
    monkeypatch.setattr(runner, "load_engine", lambda *_: pytest.fail("the model was loaded"))
    assert runner.run(job(tiny, tmp_path / "moved", tmp_path / "out")) == 0


def test_workers_share_the_chunks(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", words(300), files=2)
    runner.run(job(tiny, source, tmp_path / "one"))
    for index in (2, 0, 1):
        runner.run(job(tiny, source, tmp_path / "three", launch__count=3, launch__index=index))
    assert completions(tmp_path / "three") == completions(tmp_path / "one")


def test_metrics_add_up_to_the_output(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", [*words(150), ""])
    runner.run(job(tiny, source, tmp_path / "out"))
    rows = read(tmp_path / "out")
    state = tmp_path / "out" / "__batchrun"
    summary = json.loads((state / "summary.json").read_text())
    assert summary["rows"] == 151
    assert summary["statuses"] == {"ok": 150, "error": 1}
    assert summary["error_types"] == {"empty_prompt": 1}
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert summary[name] == sum(row[name] for row in rows)
    (run,) = (state / "metrics").iterdir()
    of_rows = pq.read_table(run / "rows.parquet")
    assert sorted(of_rows["source_row"].to_pylist()) == list(range(151))
    steps = pq.read_table(run / "steps.parquet")
    computed = sum(row["prompt_tokens"] - row["cached_tokens"] + max(row["completion_tokens"] - 1, 0) for row in rows)
    assert sum(steps["tokens"].to_pylist()) == computed
    assert sum(steps["sampled"].to_pylist()) == summary["completion_tokens"]
    assert max(steps["running"].to_pylist()) <= 32
    assert 0 < max(steps["kv_used"].to_pylist()) <= 1


def test_metrics_can_be_left_out(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", words(5))
    runner.run(job(tiny, source, tmp_path / "out", report__metrics=False))
    assert not list((tmp_path / "out").rglob("steps.parquet"))
    assert (tmp_path / "out" / "__batchrun" / "summary.json").exists()


def test_progress_off_a_terminal_is_whole_lines(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_input(tmp_path / "in", words(40))
    runner.run(job(tiny, source, tmp_path / "out", report__interval=0.1))
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("batchrun:")]
    assert lines[0].startswith("batchrun: 0 of 40 rows")
    assert lines[-1].startswith("batchrun: 40 of 40 rows")
    assert "\r" not in captured.err
    assert "output" in captured.out
    assert str(tmp_path / "out") in captured.out


def test_readers_take_the_output_folder_as_it_is(tiny: Path, tmp_path: Path) -> None:
    from datasets import load_dataset

    source = write_input(tmp_path / "in", words(100))
    runner.run(job(tiny, source, tmp_path / "out"))
    expected = [row["completion"] for row in read(tmp_path / "out")]
    assert ds.dataset(tmp_path / "out").to_table()["completion"].to_pylist() == expected
    for arguments in ({"path": "parquet", "data_dir": str(tmp_path / "out")}, {"path": str(tmp_path / "out")}):
        loaded = load_dataset(**arguments, split="train", cache_dir=str(tmp_path / "cache"))
        assert loaded["completion"] == expected


def test_a_slow_row_does_not_stop_the_rows_behind_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "OPEN_ROWS", 100)
    source = write_input(tmp_path / "in", words(500))
    config = job(tiny, source, tmp_path / "out", output__chunk_rows=10, sampling__ignore_eos=True)
    assert runner.run(config) == 0
    assert len(read(tmp_path / "out")) == 500


def test_input_columns_keep_their_types_and_can_be_chosen(tiny: Path, tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": words(6),
            "big": pa.array([1, None, 2**63 - 1, 0, -1, 5], pa.int64()),
            "when": pa.array([1, 2, 3, 4, 5, None], pa.timestamp("ns", tz="Europe/Paris")),
            "tags": pa.array([["a"], [], None, ["b", "c"], ["d"], [None]], pa.list_(pa.string())),
        }
    )
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    runner.run(job(tiny, tmp_path / "in", tmp_path / "all"))
    kept = pq.read_table(tmp_path / "all" / "part-00000-000000.parquet").select(table.column_names)
    assert kept.cast(table.schema).equals(table)
    runner.run(job(tiny, tmp_path / "in", tmp_path / "one", output__columns=["big"], output__completion="answer"))
    names = pq.read_schema(tmp_path / "one" / "part-00000-000000.parquet").names
    assert names[:2] == ["big", "answer"]
    assert "text" not in names


MEMORY = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
from batchrun import runner
from tests.test_runner import job
config = job(Path({model!r}), Path({source!r}), Path({output!r}), sampling__max_tokens=1, output__chunk_rows=500)
assert runner.run(config) == 0
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_megabytes(model: Path, source: Path, output: Path) -> float:
    script = MEMORY.format(
        root=str(Path(__file__).parents[1]), model=str(model), source=str(source), output=str(output)
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(done.stdout.rpartition("peak")[2]) / 1024


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tiny: Path, tmp_path: Path) -> None:
    peaks = []
    for rows in (4_000, 20_000):
        source = write_input(tmp_path / f"in-{rows}", [f"w{4 + i % 250} w{4 + i % 7}" for i in range(rows)])
        peaks.append(peak_megabytes(tiny, source, tmp_path / f"out-{rows}"))
    assert peaks[1] < peaks[0] + 30, peaks


def test_output_inside_the_input_folder_is_refused(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", words(3))
    with pytest.raises(ConfigError, match="outside of it"):
        runner.run(job(tiny, source, source / "out"))
    assert not (source / "out").exists()


@pytest.mark.parametrize("below", ["", "/deeper/out"])
def test_output_at_a_file_is_refused_before_the_model_loads(below: str, tiny: Path, tmp_path: Path) -> None:
    write_input(tmp_path / "in", words(1))
    (tmp_path / "out").write_text("kept")
    with pytest.raises(ConfigError, match=r"out is a file: name a folder"):
        runner.run(job(tiny, tmp_path / "in", Path(f"{tmp_path / 'out'}{below}")))
    assert (tmp_path / "out").read_text() == "kept"


def test_other_input_columns_are_another_output(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", words(3))
    runner.run(job(tiny, source, tmp_path / "out"))
    with pytest.raises(FingerprintMismatch, match=r"output\.columns"):
        runner.run(job(tiny, source, tmp_path / "out", input__columns=["text"]))


def test_thinking_has_columns_of_its_own(tiny: Path, tmp_path: Path) -> None:
    """The tiny model never closes its thinking, but a budget does."""
    tokenizer_folder = tmp_path / "thinks"
    shutil.copytree(tiny, tokenizer_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = "{{ messages[0].content }} w50 {# <think> w50 </think> w60 #}"
    tokenizer.save_pretrained(tokenizer_folder)
    source = write_input(tmp_path / "in", words(6))
    thinks: dict[str, Any] = {
        "reasoning__start": "w50",
        "reasoning__end": " w60 w61",
        "reasoning__max_tokens": 3,
    }
    chat: dict[str, Any] = {"prompt__kind": "chat", "sampling__max_tokens": 9, "sampling__ignore_eos": True}
    config = job(tokenizer_folder, source, tmp_path / "out", **thinks, **chat)
    runner.run(config)
    rows = read(tmp_path / "out")
    for row in rows:
        assert (row["reasoning_tokens"], row["completion_tokens"]) == (5, 9)
        assert row["reasoning"] is not None
        assert len(row["completion"].split()) <= 4
    assert config.reasoning.start == "w50"
    plain = job(tokenizer_folder, source, tmp_path / "plain", reasoning__start=None, reasoning__end=None, **chat)
    runner.run(plain)
    assert "reasoning" not in ds.dataset(tmp_path / "plain", format="parquet").schema.names
    found = job(tokenizer_folder, source, tmp_path / "auto", **chat)
    runner.run(found)
    assert found.reasoning.start == "auto", "the caller's config stays as it is"
    assert [row["completion"] for row in read(tmp_path / "auto")] == [
        row["completion"] for row in read(tmp_path / "plain")
    ]
    with pytest.raises(ConfigError, match=r"no known markers are in the chat template: set reasoning\.start"):
        runner.run(job(tiny, source, tmp_path / "none", reasoning__max_tokens=3))


def test_markers_come_in_pairs() -> None:
    with pytest.raises(ConfigError, match=r"reasoning\.start=<a> and reasoning\.end=auto: set both"):
        ReasoningConfig(start="<a>")
    with pytest.raises(ConfigError, match=r"reasoning\.start=' ' must be the text of a marker"):
        ReasoningConfig(start=" ", end=" ")
    with pytest.raises(ConfigError, match=r"reasoning\.start is null: set reasoning\.start and reasoning\.end"):
        ReasoningConfig(start=None, end=None, stop_in_thinking=True)

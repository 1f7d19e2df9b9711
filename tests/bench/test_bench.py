"""`job=bench` as a whole: with stand-ins for rivals, and once with real engines on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.bench import bench, measure
from batchrun.bench.measure import as_table, same_rows, usable_cores
from batchrun.compose import compose_config, missing
from batchrun.config import InputConfig
from batchrun.errors import ConfigError
from tests.bench.conftest import bench_config
from tests.bench.test_table import measured

FIRST, SECOND, SHORT = "vllm:max_num_seqs=1", "vllm:max_num_seqs=2", "vllm:max_num_seqs=16"


def test_engines_run_in_turn_and_another_begins_each_round(
    tiny: Path, stand_ins: Path, known_limits: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = bench_config(
        tiny, tmp_path / "out", engines=[FIRST, SECOND], workloads=["single", "generate"], rounds=3
    )  # fmt: skip
    assert bench.run(config) == 0
    [path] = (tmp_path / "out").glob("*.parquet")
    rows = pq.read_table(path).to_pylist()
    order = [(row["workload"], row["round"], row["engine"]) for row in rows]
    assert order == [
        (workload, number, engine)
        for workload in ("single", "generate")
        for number, engines in enumerate([(FIRST, SECOND), (SECOND, FIRST), (FIRST, SECOND)])
        for engine in engines
    ]
    assert {row["same_rows"] for row in rows} == {1.0}
    assert all(row["seconds"] > 0 and row["load_s"] > 0 and row["version"] == "9.vllm" for row in rows)
    assert {row["rows"] for row in rows} == {1, 3}
    assert json.loads(rows[0]["settings"])["max_num_seqs"] == 1
    assert {(row["dtype"], row["threads"], row["gemm_flops"], row["read_bytes_per_s"]) for row in rows} == {
        ("float32", 1, 1e9, 1e9)
    }
    shown = capsys.readouterr().out
    assert "0.00 TFLOP/s" in shown
    assert shown.count(FIRST) == 2
    assert f"measurements: {path}" in shown


def test_an_engine_that_fails_is_left_out_and_the_others_go_on(
    tiny: Path, stand_ins: Path, known_limits: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = bench_config(
        tiny, tmp_path / "out", engines=[SHORT, FIRST], workloads=["single", "generate"], rounds=2
    )  # fmt: skip
    assert bench.run(config) == 1
    [path] = (tmp_path / "out").glob("*.parquet")
    rows = pq.read_table(path).to_pylist()
    failed = [row for row in rows if row["error"]]
    assert [(row["engine"], row["seconds"]) for row in failed] == [(SHORT, None)]
    assert [row["engine"] for row in rows].count(FIRST) == 4
    assert "generated 127 tokens in row 0, where 128 were asked for" in capsys.readouterr().out


@pytest.mark.slow
def test_real_engines_do_the_same_work_on_own_rows(tiny: Path, tmp_path: Path):
    rng = np.random.default_rng(0)
    ids = [rng.integers(4, 256, size=int(n)).tolist() for n in rng.integers(5, 60, size=6)]
    pq.write_table(pa.table({"prompt_ids": ids}), tmp_path / "rows.parquet")
    config = bench_config(
        tiny, tmp_path / "out", engines=["batchrun", "transformers"], workloads=[], rounds=1, rows=None
    )  # fmt: skip
    config.input = InputConfig(path=str(tmp_path / "rows.parquet"))
    config.sampling.max_tokens = 6
    assert bench.run(config) == 0
    [path] = (tmp_path / "out").glob("*.parquet")
    for row in pq.read_table(path).to_pylist():
        assert (row["workload"], row["rows"], row["prompt_tokens"], row["output_tokens"]) == (
            "input", 6, sum(map(len, ids)), 36,
        )  # fmt: skip
        assert row["same_rows"] == 1.0
        assert row["compute_floor_s"] > 0
        assert row["gemm_flops"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workloads": []}, "there is nothing to run"),
        ({"workloads": ["anotate"]}, "bench.workloads has 'anotate'"),
        ({"engines": ["nothing"]}, "the engines are batchrun"),
    ],
)
def test_mistakes_are_found_before_an_engine_loads(
    options: dict[str, Any], message: str, tiny: Path, known_limits: None, tmp_path: Path
):
    with pytest.raises(ConfigError, match=message):
        bench.run(bench_config(tiny, tmp_path / "out", **{"engines": ["batchrun"], **options}))
    assert not (tmp_path / "out").exists()


def test_a_type_that_others_have_not_is_refused(tiny: Path, tmp_path: Path):
    config = bench_config(tiny, tmp_path / "out")
    config.model.dtype = "tf32"
    with pytest.raises(ConfigError, match=r"bench\.kind=engines gives engines one type, .* set model\.dtype=float32"):
        bench.run(config)


def test_a_workload_too_long_for_the_model_is_named(tmp_path: Path, known_limits: None):
    from batchrun.bench.tiny import save_tiny_model

    config = bench_config(save_tiny_model(tmp_path / "m", positions=64), tmp_path / "out", engines=["batchrun"])
    with pytest.raises(ConfigError, match=r"workload annotate has a row of .* the model takes 64"):
        bench.run(config)


def test_what_the_command_line_needs():
    assert missing(compose_config(["job=bench", "bench=scheduler"])) == []
    [sentence] = missing(compose_config(["job=bench"]))
    assert sentence.startswith("model.path is not set")
    [sentence] = missing(compose_config(["job=article"]))
    assert sentence.startswith("model.path is not set")
    config = compose_config(["job=bench", "bench.python.vllm=/venv/python", "bench.engines=[batchrun, vllm:a=b]"])
    assert config.bench.python == {"vllm": "/venv/python"}
    assert config.bench.engines == ["batchrun", "vllm:a=b"]
    assert (config.mode, config.output.path) == ("bench", "out/bench")


def test_same_rows_is_a_share():
    assert same_rows([[1, 2], [3], [4], [5]], [[1, 2], [9], [4], [5]]) == 0.75


def test_a_table_has_a_type_for_each_column_even_if_all_are_null():
    table = as_table(measured("a", [None]), {"run": "r", "threads": 2, "flops": 1.0})
    types = {field.name: str(field.type) for field in table.schema}
    assert types["seconds"] == types["flops"] == "double"
    assert types["error"] == types["version"] == types["run"] == "string"
    assert types["threads"] == types["peak_rss_bytes"] == "int64"
    assert types["ours"] == "bool"


def test_cores_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure.os, "sched_getaffinity", lambda _: {5, 3, 4}, raising=False)
    assert usable_cores(None) == [3, 4, 5]
    assert usable_cores(2) == [3, 4]

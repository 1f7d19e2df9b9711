"""`job=bench_gpu`, with a tiny shape and few short rows in place of its own."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchrun.bench import bench, gpu
from batchrun.bench.gpu import WORKLOADS, achieved, make_workload, traffic
from batchrun.bench.measure import Measurement, Model
from batchrun.bench.shapes import SHAPES
from batchrun.bench.workloads import Row, Workload
from batchrun.compose import compose_config, missing
from batchrun.config.bench import GPU_SHAPES
from batchrun.errors import ConfigError


@pytest.mark.slow
def test_the_job_runs_on_a_cpu_with_a_tiny_shape(
    tmp_path: Path, known_limits: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "job=bench_gpu", "bench.shapes=[tiny]", "bench.engines=[batchrun, transformers:batch=32]", "bench.rows=3",
        "bench.workloads=[mixed, shared]", "bench.lengths=0.01", "bench.rounds=1", "bench.kv_cache_gib=0.05",
        "model.device=cpu", "model.dtype=float32", "engine.num_threads=1", f"output.path={tmp_path / 'out'}",
    ]  # fmt: skip
    config = compose_config(words)
    assert missing(config) == []
    assert bench.run(config) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("\ntiny\n")
    assert printed.count("x as fast") == 2
    [file] = (tmp_path / "out").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [(row["model"], row["workload"], row["engine"]) for row in rows] == [
        ("tiny", name, engine) for name in ("mixed", "shared") for engine in ("batchrun", "transformers:batch=32")
    ]
    assert all(row["seconds"] > 0 for row in rows)


def test_mixed_is_the_public_setting() -> None:
    rows = make_workload("mixed", 151936).rows
    assert (len(rows), sum(row.max_tokens for row in rows)) == (256, 133_966)
    assert {len(row.prompt_ids) for row in rows} <= set(range(100, 1025))


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_the_same_each_time_and_fit_their_shapes(name: str) -> None:
    workload = make_workload(name, 512, factor=0.1)
    assert workload == make_workload(name, 512, factor=0.1)
    assert {token for row in workload.rows for token in row.prompt_ids} <= set(range(4, 256))
    positions = min(sizes["max_position_embeddings"] for _, sizes in SHAPES.values())
    assert make_workload(name, 512).longest <= positions


def test_shapes_and_workloads_that_there_are_not() -> None:
    assert tuple(SHAPES) == GPU_SHAPES
    with pytest.raises(ConfigError, match=r"bench\.workloads has 'annotate': for bench\.kind=gpu there are mixed, "):
        make_workload("annotate", 512)
    with pytest.raises(ConfigError, match=r"bench\.shapes='huge'"):
        compose_config(["job=bench_gpu", "bench.shapes=[huge]"])
    with pytest.raises(ConfigError, match=r"bench\.lengths=2\.0 must be above 0 and at most 1"):
        compose_config(["job=bench_gpu", "bench.lengths=2"])


def test_rates_are_those_of_the_work_that_no_engine_can_leave_out(model: Model) -> None:
    workload = Workload("w", [Row([4, 5, 6], 2), Row([7], 1)])
    done = traffic(workload, model)
    kv = 2 * 2 * 1 * 16 * 4  # K and V, two layers, one head of 16, float32
    assert done.bytes == pytest.approx(2 * model.shape.weight_bytes + kv * (3 + 4 + 1))

    def measured(engine: str, seconds: float) -> Measurement:
        return Measurement("w", engine, engine == "batchrun", 0, 2, 4, 3, "{}", 0.0, 0.0, seconds)

    lines = achieved([measured("batchrun", 1.0), measured("other", 3.0)], [workload], model)
    assert [line.split()[:2] for line in lines[1:]] == [["w", "batchrun"], ["w", "other"]]
    assert lines[1].endswith(" -")
    assert lines[2].endswith("3.00x as fast")
    assert f"{done.bytes / 1e9:.1%}" in lines[1]  # of 1 GB/s, in one second


@pytest.fixture
def model(tmp_path: Path, known_limits: None) -> Model:
    from batchrun.bench.measure import open_model
    from batchrun.bench.shapes import save_random_model

    folder = save_random_model("tiny", tmp_path / "model", "float32", "cpu")
    return open_model(compose_config([f"model={folder}", "mode=bench", "model.dtype=float32", "model.device=cpu"]))


def test_kernels_are_timed_by_a_process_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds no GPU here, and says so."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu._time_kernels(tmp_path) == 1
    assert (tmp_path / "kernels.md").read_text() == ""

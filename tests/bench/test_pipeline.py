from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchrun.bench import bench, pipeline
from batchrun.bench.pipeline import Memory
from batchrun.config import BenchConfig, Config, OutputConfig


def test_rows_go_through_a_whole_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "FILE_ROWS", 1500)
    written: list[None] = []
    monkeypatch.setattr(pipeline.Echo, "check_integrity", lambda engine: written.append(None))
    config = Config(
        mode="bench", bench=BenchConfig(kind="pipeline", rows=4000), output=OutputConfig(path=str(tmp_path / "out"))
    )
    assert bench.run(config) == 0
    assert "4,000 rows of 8 words" in capsys.readouterr().out
    [path] = (tmp_path / "out" / "pipeline").iterdir()
    [cost] = pq.read_table(path).to_pylist()
    assert cost["rows"] == 4000
    assert cost["rows_per_s"] == pytest.approx(4000 / cost["seconds"])
    assert cost["mib_early"] > 0
    assert written == [None]


def test_quarters_are_the_most_of_the_first_and_the_last_samples() -> None:
    memory = Memory()
    memory.samples = [1.0, 5.0, 9.0, 9.0, 9.0, 2.0, 3.0]
    assert memory.quarters() == (5.0, 3.0)

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from batchrun import cli, runner
from batchrun.errors import ConfigError
from batchrun.report.status import lines, read_status
from tests import fake
from tests.engine.families import make_model
from tests.test_runner import job, write_input

ROWS = 100


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


class Engine(fake.FakeEngine):
    """Stops in the middle."""

    def step(self) -> list[Any]:
        if self.completed >= 64:
            raise RuntimeError("CUDA error: an illegal memory access")
        return super().step()


@pytest.fixture
def out(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of 100 rows in parts of 10, two rows of it bad, that broke off."""
    texts = [None if i in (0, 1) else fake.words(i) for i in range(ROWS)]
    source = write_input(tmp_path / "in", texts)
    monkeypatch.setattr(runner, "load_engine", lambda *_: Engine())
    with pytest.raises(RuntimeError, match="illegal memory"):
        runner.run(job(tiny, source, tmp_path / "out", output__chunk_rows=10))
    return tmp_path / "out"


def beat(out: Path, worker: str = "0-of-1", **changes: Any) -> float:
    """Change a heartbeat; returns its time."""
    path = out / "__batchrun" / "heartbeat" / f"{worker}.json"
    values = json.loads((path if path.exists() else path.with_stem("0-of-1")).read_text())
    values |= {"worker": worker, **changes}
    path.write_text(json.dumps(values))
    return float(values["beat"])


def test_a_run_that_broke_off(out: Path) -> None:
    status = read_status(out)
    assert (status.chunks, status.rows) == (10, ROWS)
    assert 0 < status.chunks_done < 10
    assert status.rows_done == 10 * status.chunks_done
    assert status.rows_done + status.rows_open == 66
    assert [worker.alive for worker in status.workers] == [False]
    assert status.seconds_left is None
    text = "\n".join(lines(status, out))
    assert "66 of 100 done, 66.0%" in text
    assert "by tiny-llama" in text
    assert "failure: RuntimeError: CUDA error: an illegal memory access" in text
    assert "last error: rows-0.parquet row 1: empty_prompt" in text
    assert "worker 0-of-1: failed" in text


def test_rates_are_those_of_workers_that_live(out: Path) -> None:
    now = beat(out, "0-of-3", state="running", rows_per_s=2.0, tokens_per_s=20.0, rows_open=0)
    beat(out, "1-of-3", state="running", rows_per_s=3.0, tokens_per_s=30.0, rows_open=4)
    beat(out, "2-of-3", state="running", rows_per_s=100.0, beat=now - 3600)
    beat(out, "0-of-1", state="running", rows_per_s=100.0, beat=now - 7200)
    status = read_status(out, now + 10)
    assert [worker.beat["worker"] for worker in status.workers] == ["0-of-3", "1-of-3", "2-of-3"]
    assert [worker.alive for worker in status.workers] == [True, True, False]
    assert (status.rows_per_s, status.tokens_per_s) == (5.0, 50.0)
    assert status.seconds_left == (ROWS - status.rows_done - status.rows_open) / 5
    text = "\n".join(lines(status, out))
    assert "5.0 rows/s, 50 tokens/s, about" in text
    assert "worker 2-of-3: gone (was running)" in text


def test_a_finished_job(out: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "load_engine", lambda *_: fake.FakeEngine())
    assert runner.run(job(tiny, out.parent / "in", out, output__chunk_rows=10)) == 0
    status = read_status(out)
    assert (status.chunks_done, status.rows_done, status.rows_open) == (10, ROWS, 0)
    assert status.errors == {"empty_prompt": 2}
    assert "done, 100.0%" in "\n".join(lines(status, out))


def test_nothing_is_written_and_no_model_is_asked_for(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert cli.main(["mode=status", f"output.path={out}"]) == 0
    assert "rows      66 of 100 done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert cli.main(["mode=status"]) == 2
    assert "output.path is not set" in capsys.readouterr().err


def test_a_folder_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no manifest"):
        read_status(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_command_merges(
    out: Path, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["mode=merge", f"output.path={out}"]) == 2
    assert "output.merge_path" in capsys.readouterr().err
    target = out.parent / "a=1, b"
    words = ["mode=merge", f"output.path={out}", f"output.merge_path={target}"]
    assert cli.main(words) == 2
    assert "finish the job first" in capsys.readouterr().err
    monkeypatch.setattr(runner, "load_engine", lambda *_: fake.FakeEngine())
    runner.run(job(tiny, out.parent / "in", out, output__chunk_rows=10))
    capsys.readouterr()
    assert cli.main(words) == 0
    assert "10 parts of" in capsys.readouterr().out
    assert os.listdir(target) == ["part-00000.parquet"]


def test_a_part_that_cannot_be_read_has_no_errors(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    next(out.glob("part-*")).write_bytes(b"half")
    with caplog.at_level(logging.WARNING):
        read_status(out)
    assert not caplog.messages


def test_a_worker_that_loads_tells_of_no_progress(out: Path) -> None:
    now = beat(out, state="loading", ended=None)
    (line,) = [line for line in lines(read_status(out, now=now + 1), out) if line.startswith("worker")]
    assert "rows" not in line
    beat(out, state="running")
    (line,) = [line for line in lines(read_status(out, now=now + 1), out) if line.startswith("worker")]
    assert f"of {ROWS} rows" in line

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchrun.bench import scheduler
from batchrun.bench.scheduler import JobCost, StepCost, measure_job, measure_steps
from batchrun.config import BenchConfig, Config, OutputConfig
from batchrun.engine import scheduler as scheduling
from batchrun.engine.batch import make_batch


def test_as_many_rows_run_and_wait_at_the_end_as_at_the_start(monkeypatch: pytest.MonkeyPatch):
    engine = scheduler._model_free_engine(8)
    monkeypatch.setattr(scheduler, "_model_free_engine", lambda running: engine)
    cost = measure_steps(waiting=40, running=8, steps=100)
    queue = engine.scheduler
    assert queue.slots.num_running + len(queue.waiting) == 48
    assert (cost.waiting, cost.running, cost.steps) == (40, 8, 100)
    assert 0 < cost.finished < 8 * 100 / 8
    engine.drop_waiting()
    while engine.has_work():
        engine.step()
    engine.check_integrity()


def test_every_phase_is_timed_once_a_step_and_nothing_stays_patched():
    cost = measure_steps(waiting=5, running=4, steps=10)
    parts = cost.schedule_us + cost.make_batch_us + cost.advance_us + cost.collect_us
    assert min(cost.schedule_us, cost.make_batch_us, cost.advance_us, cost.collect_us, cost.add_us) > 0
    assert cost.total_us == pytest.approx(parts)
    assert cost.longest_us >= cost.p99_us >= 0
    assert scheduling.make_batch is make_batch


def test_a_timer_counts_calls_that_raise_too_and_is_removed():
    class Owner:
        def call(self, x: int) -> float:
            return 1 / x

    owner, seconds = Owner(), list[float]()
    with scheduler._timed(owner, "call", seconds):
        assert owner.call(2) == 0.5
        with pytest.raises(ZeroDivisionError):
            owner.call(0)
    assert len(seconds) == 2
    assert owner.call(1) == 1.0
    assert owner.call.__func__ is Owner.call  # type: ignore[attr-defined]


def test_tables_are_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(scheduler, "measure_job", lambda config, rows: JobCost(rows, 2.0, rows / 2, 2e6 / rows))
    config = Config(
        mode="bench",
        bench=BenchConfig(kind="scheduler", waiting=[1, 30], running=4, steps=5, rows=10),
        output=OutputConfig(path=str(tmp_path)),
    )
    assert scheduler.run(config) == 0
    [steps] = (tmp_path / "steps").glob("*.parquet")
    assert pq.read_table(steps)["waiting"].to_pylist() == [1, 30]
    [job] = (tmp_path / "job").glob("*.parquet")
    assert pq.read_table(job)["rows_per_s"].to_pylist() == [5.0]
    shown = capsys.readouterr().out
    assert "10 tiny rows end to end: 2.0 s, 5 rows/s" in shown
    assert [line.split()[0] for line in shown.splitlines()[2:5]] == ["waiting", "1", "30"]


@pytest.mark.slow
def test_a_job_of_tiny_rows_writes_all_of_them():
    cost = measure_job(Config(), 40)
    assert cost.rows == 40
    assert cost.us_per_row == pytest.approx(cost.seconds / 40 * 1e6)


def test_step_costs_have_a_column_each():
    assert set(StepCost.__slots__) == {
        "waiting", "running", "steps", "finished", "schedule_us", "make_batch_us", "advance_us", "collect_us",
        "total_us", "p99_us", "longest_us", "add_us",
    }  # fmt: skip

"""What a run does when the world around it goes wrong, with an engine that only pretends."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchrun import runner
from batchrun.config import Config
from batchrun.data import journal as journal_module
from batchrun.data import store as store_module
from batchrun.errors import BatchrunError, ErrorBudgetExceeded, OutputInUse
from batchrun.report.report import Report
from tests import fake
from tests.engine.families import make_model
from tests.test_runner import job, read, write_input

ROWS = 200


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


class Engine(fake.FakeEngine):
    """Calls `at_step` with the number of rows made so far, before each step."""

    at_step: Callable[[int], object] = staticmethod(lambda made: None)
    made = 0

    def step(self) -> list[Any]:
        type(self).at_step(Engine.made)
        completions = super().step()
        Engine.made += len(completions)
        return completions


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    monkeypatch.setattr(Engine, "at_step", staticmethod(lambda made: None))
    monkeypatch.setattr(Engine, "made", 0)
    monkeypatch.setattr(runner, "load_engine", lambda *_: Engine())
    return Engine


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Config:
    source = write_input(tmp_path / "in", [fake.words(i) for i in range(ROWS)])
    return job(tiny, source, tmp_path / "out", output__chunk_rows=40, output__journal_seconds=0.01)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def check_whole(out: Path) -> None:
    assert [row["text"] for row in read(out)] == [fake.words(i) for i in range(ROWS)]
    assert not [path for path in out.rglob("*") if path.name.endswith(".tmp")]


def test_too_many_bad_rows_end_the_run_and_finished_rows_are_kept(
    tiny: Path, tmp_path: Path, out: Path, engine: type[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    texts = [None if i >= 40 and i % 4 else fake.words(i) for i in range(ROWS)]
    source = write_input(tmp_path / "in", texts)
    changes = {"output__chunk_rows": 20, "run__min_rows": 50}
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ErrorBudgetExceeded, match=r"max_error_rate=0\.3.*empty_prompt"),
    ):
        runner.run(job(tiny, source, out, run__max_error_rate=0.3, **changes))
    assert sum("empty_prompt" in message for message in caplog.messages) == 3
    assert 40 <= engine.made < 80
    assert runner.run(job(tiny, source, out, run__max_error_rate=1.0, **changes)) == 0
    assert [row["text"] for row in read(out)] == texts
    assert engine.made == 40 + 160 // 4, "no row was made twice"


def test_a_second_process_on_the_same_output_is_refused(config: Config, engine: type[Engine], out: Path) -> None:
    refused: list[BaseException] = []

    def start_another(made: int) -> None:
        if made == 64:
            with pytest.raises(OutputInUse, match=r"launch\.index=0 launch\.count=1") as caught:
                runner.run(config)
            refused.append(caught.value)

    engine.at_step = staticmethod(start_another)
    assert runner.run(config) == 0
    assert len(refused) == 1
    assert engine.made == ROWS
    check_whole(out)


@pytest.mark.parametrize("damage", ["gone", "broken"])
def test_a_part_that_is_damaged_during_the_run_is_not_reported_as_done(
    config: Config, engine: type[Engine], out: Path, damage: str
) -> None:
    def spoil(made: int) -> None:
        parts = sorted(out.glob("part-*"))
        if parts and not spoiled:
            spoiled.append(parts[0].name)
            parts[0].unlink() if damage == "gone" else parts[0].write_bytes(b"PAR1")

    spoiled: list[str] = []
    engine.at_step = staticmethod(spoil)
    with pytest.raises(BatchrunError, match=r"1 parts of .*gone or broken") as caught:
        runner.run(config)
    assert spoiled[0] in str(caught.value)
    engine.at_step = staticmethod(lambda made: None)
    assert runner.run(config) == 0
    assert engine.made == ROWS + 40
    check_whole(out)


def test_an_output_that_is_removed_during_the_run_ends_it(config: Config, engine: type[Engine], out: Path) -> None:
    def remove(made: int) -> None:
        if made >= 100:
            shutil.rmtree(out, ignore_errors=True)

    engine.at_step = staticmethod(remove)
    with pytest.raises(BatchrunError, match="removed while the job ran"):
        runner.run(config)
    engine.at_step = staticmethod(lambda made: None)
    shutil.rmtree(out, ignore_errors=True)
    assert runner.run(config) == 0
    check_whole(out)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("where", ["part", "journal", "metrics"])
def test_a_disk_that_refuses_ends_the_run_and_a_rerun_completes(
    config: Config, engine: type[Engine], out: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    refuse, refused = threading.Event(), threading.Event()
    write_part, write_block, add = store_module._write, journal_module.Journal._write, Report.add_step

    def failing(write: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            if refuse.is_set():
                refused.set()
                raise OSError(number, os.strerror(number))
            return write(*arguments)

        return wrapped

    def at_step(made: int) -> None:
        if made >= 100:
            refuse.set()
            # The journal is written by a thread of its own, which a fast engine would outrun.
            assert where != "journal" or refused.wait(10)

    with monkeypatch.context() as patch:
        if where == "part":
            patch.setattr(store_module, "_write", failing(write_part))
        elif where == "journal":
            patch.setattr(journal_module.Journal, "_write", failing(write_block))
        else:
            patch.setattr(Report, "add_step", failing(add))
        engine.at_step = staticmethod(at_step)
        with pytest.raises((BatchrunError, OSError), match=os.strerror(number)):
            runner.run(config)
    made = engine.made
    assert runner.run(config) == 0
    assert engine.made <= ROWS + (0 if where == "part" else 64), f"{made} rows were made before"
    check_whole(out)


def test_input_that_can_only_be_read_is_enough(config: Config, tmp_path: Path, out: Path) -> None:
    for path in [*(tmp_path / "in").iterdir(), tmp_path / "in"]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert runner.run(config) == 0
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["rows-0.parquet"]
    check_whole(out)


def test_a_chunk_whose_rows_are_all_journalled_needs_no_engine(
    config: Config, engine: type[Engine], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store_module.Store, "commit", lambda *_: (_ for _ in ()).throw(BatchrunError("disk")))
        with pytest.raises(BatchrunError, match="disk"):
            runner.run(config)
    made = engine.made
    assert made >= 40
    assert runner.run(config) == 0
    assert engine.made == ROWS
    check_whole(out)
    assert not list((out / "__batchrun" / "journal").iterdir())


def test_a_corrupt_part_is_made_again_from_a_rerun(config: Config, engine: type[Engine], out: Path) -> None:
    runner.run(config)
    (out / "part-00000-000003.parquet").write_bytes(b"half")
    assert runner.run(config) == 0
    assert engine.made == ROWS + 40
    check_whole(out)


def test_commits_cost_what_their_chunk_costs(
    tiny: Path, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files touched by a commit, the hundredth as the first."""
    source = write_input(tmp_path / "in", [fake.words(i) for i in range(1000)])
    opened: list[int] = []
    calls: dict[str, Any] = {"open": os.open, "replace": os.replace}
    count = 0

    def counted(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return calls[name](*arguments, **options)

        return call

    for name in calls:
        monkeypatch.setattr(os, name, counted(name))
    commit = store_module.Store.commit

    def noted(*arguments: Any) -> Path:
        nonlocal count
        count = 0
        path = commit(*arguments)
        opened.append(count)
        return path

    monkeypatch.setattr(store_module.Store, "commit", noted)
    changes = {"output__chunk_rows": 10, "output__journal_seconds": 1000.0, "run__heartbeat_seconds": 60.0}
    assert runner.run(job(tiny, source, out, **changes)) == 0
    assert len(opened) == 100
    assert set(opened) == {opened[0]}
    assert pq.read_metadata(out / "part-00000-000099.parquet").num_rows == 10

"""What a job does with signals: through the command, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchrun.errors import Drained
from batchrun.signals import Drain
from tests import fake
from tests.engine.families import make_model
from tests.test_runner import job, read, write_input

ROWS = 400


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def wait_for(condition: Callable[[], object], process: Any) -> None:
    """Until it holds, or the process is over."""
    while not condition():
        assert process.exitcode is None, f"ended with {process.exitcode} before"
        time.sleep(0.01)


class Running:
    """A job under way in another process, with rows in the engine and in the journal."""

    def __init__(self, model: Path, folder: Path, seconds: float = 0.05, **changes: Any) -> None:
        source = folder / "in"
        if not source.exists():
            write_input(source, [fake.words(i) for i in range(ROWS)])
        self.output = folder / "out"
        self.config = job(
            model, source, self.output, **{"output__chunk_rows": 150, "output__journal_seconds": 0.02, **changes}
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.fake", "batchrun.runner", "pyarrow.parquet"])
        self.log = folder / f"completed-{changes.get('launch__index', 0)}.log"
        self.log.unlink(missing_ok=True)
        environment = {"BATCHRUN_FAKE_LOG": str(self.log), "BATCHRUN_FAKE_SECONDS": str(seconds)}
        self.process = context.Process(target=fake.run_job, args=(self.config,), kwargs=environment)
        self.process.start()

    @property
    def made(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def work_for(self, rows: int) -> None:
        """Until the engine has completed so many rows."""
        wait_for(lambda: self.made >= rows, self.process)

    def send(self, *signals: int) -> None:
        assert self.process.pid is not None
        for number in signals:
            os.kill(self.process.pid, number)

    def end(self) -> int | None:
        self.process.join(timeout=60)
        return self.process.exitcode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_drains_and_the_rest_is_done_later(tiny: Path, tmp_path: Path, number: int) -> None:
    first = Running(tiny, tmp_path)
    first.work_for(50)
    first.send(number)
    assert first.end() == 75
    made = first.made
    assert 50 <= made < ROWS
    second = Running(tiny, tmp_path, seconds=0)
    assert second.end() == 0
    assert made + second.made == ROWS, "each row is made once"
    assert [row["text"] for row in read(second.output)] == [fake.words(i) for i in range(ROWS)]


def test_the_deadline_ends_the_draining(tiny: Path, tmp_path: Path) -> None:
    running = Running(tiny, tmp_path, seconds=0.5, run__drain_seconds=0)
    running.work_for(16)
    running.send(signal.SIGTERM)
    assert running.end() == 75
    assert running.made <= 48


def test_a_second_ctrl_c_ends_at_once_and_loses_nothing_that_was_journalled(tiny: Path, tmp_path: Path) -> None:
    first = Running(tiny, tmp_path, seconds=1.0, run__drain_seconds=1000)
    first.work_for(32)
    heartbeat = first.output / "__batchrun" / "heartbeat" / "0-of-1.json"
    journal = first.output / "__batchrun" / "journal"
    wait_for(lambda: list(journal.iterdir()), first.process)
    first.send(signal.SIGINT)
    wait_for(lambda: '"draining"' in heartbeat.read_text(), first.process)
    first.send(signal.SIGINT)
    assert first.end() == 130
    made = first.made
    second = Running(tiny, tmp_path, seconds=0)
    assert second.end() == 0
    assert made - 16 + second.made <= ROWS, "only the step that was under way is made again"


def test_four_workers_are_stopped_together_and_two_end_the_job(tiny: Path, tmp_path: Path) -> None:
    changes = {"output__chunk_rows": 25, "launch__count": 4}
    workers = [Running(tiny, tmp_path, seconds=1.0, launch__index=i, **changes) for i in range(4)]
    for worker in workers:
        worker.work_for(16)
    for worker in workers:
        worker.send(signal.SIGTERM)
    assert [worker.end() for worker in workers] == [75] * 4
    made = sum(worker.made for worker in workers)
    changes["launch__count"] = 2
    workers = [Running(tiny, tmp_path, seconds=0, launch__index=i, **changes) for i in range(2)]
    assert [worker.end() for worker in workers] == [0, 0]
    assert made + sum(worker.made for worker in workers) == ROWS, "each row is made once"
    assert [row["text"] for row in read(tmp_path / "out")] == [fake.words(i) for i in range(ROWS)]


def test_before_rows_are_in_flight_a_signal_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Drain(5)
    with drain.listening():
        with pytest.raises(Drained, match="SIGUSR2"):
            os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert drain.requested == "SIGUSR2"


def test_while_rows_are_in_flight_a_signal_is_noted() -> None:
    drain = Drain(1000)
    with drain.listening(), drain.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        assert drain.requested == "SIGINT"
        assert not drain.expired
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGUSR1])
@pytest.mark.parametrize("submitit", [True, False])
def test_submitit_still_hears_its_signal(number: int, submitit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    previous = signal.signal(number, lambda got, frame: heard.append(got))
    monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
    if submitit:
        monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    try:
        with Drain().listening(), pytest.raises(Drained):
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, previous)
    assert heard == ([number] if submitit and number == signal.SIGUSR2 else [])


@pytest.mark.parametrize(("signals", "code"), [([signal.SIGTERM], 75), ([signal.SIGINT, signal.SIGINT], 130)])
def test_the_command_ends_with_the_code_of_the_signal(
    tiny: Path, tmp_path: Path, signals: list[int], code: int
) -> None:
    source = write_input(tmp_path / "in", [fake.words(i) for i in range(ROWS)])
    words = [f"input.path={source}", f"output.path={tmp_path / 'out'}", "run.drain_seconds=1"]
    log = tmp_path / "log"
    process = subprocess.Popen(
        [*fake.COMMAND, f"model={tiny}", "prompt.kind=completion", "prompt.template={{ text }}", *words],
        cwd=fake.ROOT,
        env={**os.environ, "BATCHRUN_FAKE_LOG": str(log), "BATCHRUN_FAKE_SECONDS": "0.1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.01)
    assert process.stderr is not None
    stderr = ""
    for number in signals:
        process.send_signal(number)
        while "stopping within" not in stderr:
            stderr += process.stderr.readline()
    _, rest = process.communicate(timeout=60)
    stderr += rest
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert "the same command goes on" in stderr


STALLED = """
import sys, threading, time
from batchrun.watchdog import Watchdog
from pathlib import Path
with Watchdog(0.2, Path(sys.argv[1]) / "stalled.txt", lambda: (Path(sys.argv[1]) / "rescued").touch()) as dog:
    for _ in range(4):
        time.sleep(0.1)
        dog.beat()
    print("alive", flush=True)
    def a_call_that_hangs():
        time.sleep(60)
    a_call_that_hangs()
"""


def test_a_stalled_run_shows_its_stacks_and_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STALLED, str(tmp_path)], cwd=fake.ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "alive\n")
    assert "run.stall_seconds" in done.stderr
    for text in (done.stderr, (tmp_path / "stalled.txt").read_text()):
        assert "a_call_that_hangs" in text
        assert "Thread" in text
    assert (tmp_path / "rescued").exists()


def test_an_engine_that_hangs_ends_the_run_and_the_next_one_goes_on(tiny: Path, tmp_path: Path) -> None:
    first = Running(tiny, tmp_path, seconds=1.0, run__stall_seconds=0.3)
    assert first.end() == 1
    assert list((first.output / "__batchrun").glob("stalled-*.txt"))
    second = Running(tiny, tmp_path, seconds=0)
    assert second.end() == 0
    assert len(read(second.output)) == ROWS

"""Engine processes, with a stand-in for vLLM in them: the protocol, what is checked, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from batchrun.bench.fleet import Fleet
from batchrun.bench.process import EngineFailed, EngineProcess, Surroundings, environment
from batchrun.bench.workloads import Row
from tests.bench.conftest import spec_of

WARMUP = [Row([7, 8], 2)]
ROWS = [Row([1, 2, 3], 4), Row([200, 100], 2)]
ANSWERS = [[6, 7, 8, 9], [300 % 251, 301 % 251]]

pytestmark = pytest.mark.usefixtures("stand_ins")


@contextmanager
def engine(around: Surroundings, label: str = "vllm") -> Iterator[EngineProcess]:
    process = EngineProcess(spec_of(label), around, WARMUP)
    try:
        yield process
    finally:
        process.close()


def test_rows_come_back_complete_and_in_order_each_round(around: Surroundings):
    with engine(around, "vllm:max_num_seqs=4") as process:
        assert process.version == "9.vllm"
        assert process.load_seconds > 0
        assert process.warmup_seconds >= 0
        for rows, answers in ((ROWS, ANSWERS), (ROWS[::-1], ANSWERS[::-1]), (ROWS[:1], ANSWERS[:1])):
            timing = process.run(rows)
            assert timing.outputs == answers
            assert timing.seconds > 0
            assert timing.cpu_seconds >= 0
            assert timing.other_cpu_seconds >= 0
            assert timing.peak_rss_bytes > 2**20


def test_an_engine_is_stopped_while_it_has_nothing_to_do(around: Surroundings):
    with engine(around) as process:
        pid = process._process.pid
        assert wait_for_stop(pid) == signal.SIGSTOP
        process.run(ROWS)
        assert wait_for_stop(pid) == signal.SIGSTOP
    assert not psutil.pid_exists(pid)


def wait_for_stop(pid: int) -> int:
    """The signal that stopped a child; signals are delivered some time after they are sent."""
    state = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert state is not None
    return state.si_status


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("max_num_seqs=13", r"failed: MemoryError: no room for 13\n(?s:.*)Traceback"),
        ("max_num_seqs=14", "failed: the process ended"),
        ("max_num_seqs=16", "generated 3 tokens in row 0, where 4 were asked for"),
    ],
)
def test_an_engine_that_fails_says_how(settings: str, message: str, around: Surroundings):
    with pytest.raises(EngineFailed, match=f"vllm:{settings} {message}"), engine(around, f"vllm:{settings}") as process:
        process.run(ROWS)


def test_an_engine_that_hangs_is_given_up(around: Surroundings):
    with engine(around, "vllm:max_num_seqs=15") as process:
        process.around = replace(around, limit_seconds=0.1)
        with pytest.raises(EngineFailed, match=r"took longer than bench\.limit_seconds=0\.1"):
            process.run(ROWS)
        assert process._process.wait() == -signal.SIGKILL


def test_a_killed_bench_leaves_no_engine_behind(around: Surroundings, tmp_path: Path):
    program = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from batchrun.bench.process import EngineProcess, Surroundings\n"
        "from batchrun.bench.workloads import Row\n"
        "from tests.bench.conftest import spec_of\n"
        f"around = Surroundings('float32', 'cpu', [0], 512, 0.1, 60, Path({str(around.scratch)!r}))\n"
        "engine = EngineProcess(spec_of('vllm'), around, [Row([7], 1)])\n"
        "print(engine._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "kernels"), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        os.sched_yield()


def test_a_fleet_starts_engines_once_and_ends_what_is_not_needed(around: Surroundings):
    first, second, broken = (spec_of(f"vllm:max_num_seqs={n}") for n in (1, 2, 16))
    with Fleet(around, WARMUP) as fleet:
        one, timing = fleet.run(first, ROWS)
        two, _ = fleet.run(second, ROWS)
        assert fleet.run(first, ROWS)[0] is one
        assert timing.outputs == ANSWERS
        with pytest.raises(EngineFailed):
            fleet.run(broken, ROWS)
        fleet.keep([second.label])
        assert not psutil.pid_exists(one._process.pid)
        assert psutil.pid_exists(two._process.pid)
    assert not psutil.pid_exists(two._process.pid)


def test_threads_and_paths_of_an_engine(around: Surroundings):
    mine = environment(spec_of("vllm"), 2)
    assert {mine[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"2"}
    assert mine["PYTHONPATH"].split(os.pathsep)[0] == str(Path(__file__).parents[2])
    other = environment(spec_of("vllm", python={"vllm": "/elsewhere/python"}), 2)
    assert other["PYTHONPATH"] == os.environ["PYTHONPATH"]

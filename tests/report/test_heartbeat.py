from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from batchrun.errors import BatchrunError, Drained
from batchrun.report.heartbeat import Heartbeat


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def test_it_beats_until_the_end(tmp_path: Path) -> None:
    path, beats, counted = tmp_path / "heartbeat" / "0-of-1.json", threading.Semaphore(0), {"rows_done": 0}

    def counts() -> dict[str, Any]:
        beats.release()
        counted["rows_done"] += 1
        return counted

    with Heartbeat(path, "run1", 0.01, counts) as heartbeat:
        first = read(path)
        assert (first["state"], first["worker"], first["run"], first["pid"]) == (
            "loading",
            "0-of-1",
            "run1",
            os.getpid(),
        )
        heartbeat.state = "running"
        for _ in range(4):
            beats.acquire()
    last = read(path)
    assert last["state"] == "done"
    assert last["rows_done"] >= 4
    assert last["beat"] >= first["beat"]
    assert os.listdir(path.parent) == ["0-of-1.json"]


@pytest.mark.parametrize(
    ("error", "state", "failure"),
    [
        (Drained("stopped by SIGTERM"), "drained", None),
        (BatchrunError("no space"), "failed", "BatchrunError: no space"),
        (RuntimeError("CUDA \ud835 error"), "failed", "RuntimeError: CUDA ? error"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt: "),
    ],
)
def test_it_tells_how_the_run_ended(tmp_path: Path, error: BaseException, state: str, failure: str | None) -> None:
    path = tmp_path / "0-of-1.json"
    with pytest.raises(type(error)), Heartbeat(path, "run1", 60, dict):
        raise error
    assert (read(path)["state"], read(path)["failure"]) == (state, failure)


def test_what_goes_wrong_in_a_beat_is_raised_by_check(tmp_path: Path) -> None:
    def watch() -> None:
        raise BatchrunError("another process took over")

    with Heartbeat(tmp_path / "a.json", "run1", 0.01, dict, watch) as heartbeat:
        heartbeat._ticker._thread.join()
        with pytest.raises(BatchrunError, match="took over"):
            heartbeat.check()

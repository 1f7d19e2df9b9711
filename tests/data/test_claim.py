from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from batchrun.data import claim as claim_module
from batchrun.data.claim import Claim
from batchrun.errors import BatchrunError, OutputInUse

ROOT = Path(__file__).parents[2]
HOLD = """
import sys
from pathlib import Path
from batchrun.data.claim import Claim
with Claim(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], "other").held():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(claim_module, "POLL_S", 0.02)


def claim(folder: Path, index: int = 0, count: int = 1, fingerprint: str = "f1", silence: float = 0.2) -> Claim:
    return Claim(folder, index, count, fingerprint, "mine", silence)


class Other:
    """Another process that holds a share."""

    def __init__(self, folder: Path, index: int = 0, count: int = 1, fingerprint: str = "f1") -> None:
        words = [str(folder), str(index), str(count), fingerprint]
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, *words], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()

    def finish(self) -> None:
        self.process.communicate("")


def test_a_share_has_one_process(tmp_path: Path) -> None:
    with Other(tmp_path) as other:
        with (
            pytest.raises(OutputInUse, match=f"process {other.process.pid} on .*launch.index=0 launch.count=1"),
            claim(tmp_path).held(),
        ):
            pass
        other.process.kill()
        other.process.wait()
        with claim(tmp_path).held():
            pass


def test_shares_of_one_split_are_held_together_and_those_of_another_are_refused(tmp_path: Path) -> None:
    with Other(tmp_path, 1, 3):
        with claim(tmp_path, 0, 3).held(), claim(tmp_path, 2, 3).held():
            pass
        for index in (0, 1):
            with pytest.raises(OutputInUse, match=r"launch\.index=1 launch\.count=3"), claim(tmp_path, index, 2).held():
                pass
    with claim(tmp_path, 0, 2).held():
        pass


def test_a_worker_with_other_settings_is_in_the_way(tmp_path: Path) -> None:
    with Other(tmp_path, 1, 2, fingerprint="old"), pytest.raises(OutputInUse), claim(tmp_path, 0, 2, "new").held():
        pass


def test_a_share_that_was_given_back_is_free_at_once(tmp_path: Path) -> None:
    with Other(tmp_path) as other:
        other.finish()
        with claim(tmp_path, silence=1e9).held():
            pass
    assert (tmp_path / "locks" / "0-of-1.lock").read_text() == ""


def test_a_process_that_ends_soon_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_module, "PATIENCE_S", 60)
    with Other(tmp_path) as other:
        timer = threading.Timer(0.1, other.process.kill)
        timer.start()
        with claim(tmp_path).held():
            assert not timer.is_alive()


def elsewhere(folder: Path, worker: str = "0-of-1") -> Path:
    """A holder on another host, whose lock this host does not see; returns its heartbeat."""
    record = {"host": "elsewhere", "pid": 1, "run": "theirs", "fingerprint": "f1"}
    (folder / "locks").mkdir(exist_ok=True)
    (folder / "heartbeat").mkdir(exist_ok=True)
    (folder / "locks" / f"{worker}.lock").write_text(json.dumps(record))
    heartbeat = folder / "heartbeat" / f"{worker}.json"
    heartbeat.write_text("0")
    return heartbeat


@pytest.mark.parametrize("worker", ["0-of-1", "1-of-2"])
def test_a_holder_elsewhere_lives_while_its_heart_beats(tmp_path: Path, worker: str) -> None:
    heartbeat = elsewhere(tmp_path, worker)
    threading.Timer(0.05, heartbeat.write_text, ("1",)).start()
    with pytest.raises(OutputInUse, match="process 1 on elsewhere"), claim(tmp_path, silence=60).held():
        pass


@pytest.mark.parametrize("worker", ["0-of-1", "1-of-2"])
def test_a_holder_elsewhere_that_is_silent_is_dead(tmp_path: Path, worker: str) -> None:
    elsewhere(tmp_path, worker)
    with claim(tmp_path).held():
        pass


def test_without_locks_the_process_id_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Other(tmp_path) as other:
        with pytest.raises(OutputInUse, match=str(other.process.pid)), claim(tmp_path).held():
            pass
        other.process.kill()
        other.process.wait()
        with claim(tmp_path).held():
            pass


def test_a_share_that_was_taken_over_or_removed_is_noticed(tmp_path: Path) -> None:
    mine = claim(tmp_path)
    with mine.held():
        mine.check()
        mine.path.write_text(json.dumps({**mine.record, "host": "elsewhere"}))
        with pytest.raises(BatchrunError, match="another process took over"):
            mine.check()
        mine.path.unlink()
        with pytest.raises(BatchrunError, match="was removed while the job ran"):
            mine.check()


def test_the_record_names_this_process(tmp_path: Path) -> None:
    with claim(tmp_path).held():
        record = json.loads((tmp_path / "locks" / "0-of-1.lock").read_text())
    assert record["pid"] == os.getpid()
    assert record["run"] == "mine"

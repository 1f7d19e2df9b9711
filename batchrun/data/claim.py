"""One process for one share of an output: a lock that ends with the process, and a heartbeat where locks do not reach.

A lock file names its holder. On one host the kernel knows whether that process lives. A lock of another host may be
invisible, or its host may be gone: then the holder counts as dead once its heartbeat has stood still for a while, by
this host's own clock, so that no two clocks are compared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from batchrun.data.disk import alive, explained, read_json
from batchrun.errors import BatchrunError, OutputInUse

PATIENCE_S = 2.0  # for a holder that is about to end
SILENCE_S = 60.0  # four heartbeats
POLL_S = 0.1
LOCK = re.compile(r"(\d+)-of-(\d+)\.lock")
CONTENTION = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)


class Claim:
    """The right to a share, held while `held` runs. `silence` is how long a holder elsewhere must be silent."""

    def __init__(
        self, state_folder: Path, index: int, count: int, fingerprint: str, run: str, silence: float = SILENCE_S
    ) -> None:
        self.worker = f"{index}-of-{count}"
        self.count = count
        self.silence = silence
        self.heartbeat = state_folder / "heartbeat" / f"{self.worker}.json"
        self.path = state_folder / "locks" / f"{self.worker}.lock"
        self.record = {"host": socket.gethostname(), "pid": os.getpid(), "run": run, "fingerprint": fingerprint}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Take the share. Raises OutputInUse if a process that lives has it, or has one that overlaps it."""
        with ExitStack() as stack:
            with explained(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(self.path, "a+", encoding="utf-8"))
            self._take(file)
            stack.callback(self._give_back, file)
            self._check_others()
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What no two workers of this output may do at once; the others wait."""
        with explained(self.path), open(self.path.with_name("alone"), "a", encoding="utf-8") as file:
            # Without locks, two workers that start together on an output to be overwritten may meet here.
            with suppress(OSError):
                fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            yield

    def check(self) -> None:
        """Raise BatchrunError if another process has taken the share for abandoned and is at work on it."""
        if not self.path.exists():
            raise BatchrunError(
                f"{self.path.parent.parent.parent} was removed while the job ran: the same command makes what is lost"
            )
        if not self._still_mine():
            raise BatchrunError(
                f"another process took over {self.worker} of this output: this host was out of touch with the file "
                "system for too long. Finished parts are kept"
            )

    def _take(self, file: IO[str]) -> None:
        locked, give_up = _lock(file), time.monotonic() + PATIENCE_S
        while locked is False and time.monotonic() < give_up:
            time.sleep(POLL_S)
            locked = _lock(file)
        holder = _holder(self.path)
        if locked is False or (holder is not None and self._lives(holder, self.path, locked)):
            raise self._refusal(self.worker, holder)
        with explained(self.path):
            file.truncate(0)
            file.write(json.dumps(self.record))
            file.flush()
            os.fsync(file.fileno())

    def _give_back(self, file: IO[str]) -> None:
        with explained(self.path):
            if self._still_mine():
                file.truncate(0)

    def _check_others(self) -> None:
        """Shares of another split overlap with this one, and a worker with other settings must not be at work."""
        for path in self.path.parent.iterdir():
            name, holder = LOCK.fullmatch(path.name), _holder(path)
            if name is None or holder is None or path == self.path:
                continue
            if int(name[2]) == self.count and holder.get("fingerprint") == self.record["fingerprint"]:
                continue
            with open(path, "a+", encoding="utf-8") as file:
                locked = _lock(file)
                if locked is False or self._lives(holder, path, locked):
                    raise self._refusal(path.stem, holder)

    def _lives(self, holder: dict[str, Any], path: Path, locked: bool | None) -> bool:
        """Whether the holder that a lock file names is at work, given that its lock could be had or there is none."""
        if holder.get("host") == self.record["host"]:
            return locked is None and alive(int(holder.get("pid", 0)))
        heartbeat = self.heartbeat.with_stem(path.stem)
        before, until = _text(heartbeat), time.monotonic() + self.silence
        while time.monotonic() < until:
            time.sleep(POLL_S)
            if _text(heartbeat) != before or _holder(path) != holder:
                return _holder(path) is not None
        return False

    def _still_mine(self) -> bool:
        return _holder(self.path) == self.record

    def _refusal(self, worker: str, holder: dict[str, Any] | None) -> OutputInUse:
        who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
        index, _, count = worker.partition("-of-")
        return OutputInUse(
            f"{who} is writing to {self.path.parent.parent.parent} as launch.index={index} launch.count={count}: wait "
            "for it or stop it, use another output.path, or give each process its own launch.index under one "
            "launch.count"
        )


def _lock(file: IO[str]) -> bool | None:
    """True if this process has the lock, False if another one has, None if the file system knows no locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in CONTENTION else None
    return True


def _holder(path: Path) -> dict[str, Any] | None:
    return read_json(path)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None

"""A small file that a worker rewrites every few seconds: what it does, how fast, and what went wrong last."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from batchrun.data.disk import explained, replace_json
from batchrun.errors import Drained
from batchrun.ticker import Ticker


class Heartbeat:
    """Writes `counts()` and the state to `path` every `seconds`, between entering and leaving.

    The state is loading, running, draining, and at the end done, drained or failed. `watch` is called at each beat.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        seconds: float,
        counts: Callable[[], dict[str, Any]],
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.state = "loading"
        self._who = {"worker": path.stem, "run": run, "host": socket.gethostname(), "pid": os.getpid()}
        self._seconds = seconds
        self._started = time.time()
        self._counts = counts
        self._watch = watch
        self._failure: str | None = None
        self._ticker = Ticker("heartbeat", seconds, self._tick)

    def __enter__(self) -> Self:
        with explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.beat()
        self._ticker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticker.stop()
        self.state = "done" if error is None else "drained" if isinstance(error, Drained) else "failed"
        if self.state == "failed":
            self._failure = f"{type(error).__name__}: {error}"
        try:
            self.beat()
        except OSError:
            # The disk's own error is on its way already, or the run is done and nobody will miss the beat.
            return

    def check(self) -> None:
        """Raise what a beat raised."""
        self._ticker.check()

    def beat(self) -> None:
        """Write the file. Raises OSError."""
        times = {"started": self._started, "beat": time.time(), "seconds": self._seconds}
        replace_json(self.path, {**self._who, "state": self.state, **times, **self._counts(), "failure": self._failure})

    def _tick(self) -> None:
        self._watch()
        with explained(self.path):
            self.beat()

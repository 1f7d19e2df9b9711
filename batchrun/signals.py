"""Signals that ask a run to stop: it drains, and ends with exit code 75. A second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from batchrun.errors import Drained

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
INTERRUPTED = 130


class Drain:
    """Whether the run shall stop, who asked, and until when it may finish what it began.

    The first signal sets `requested`, and raises Drained then and there unless the run is in a `deferred` block,
    where it is for the run to see. A second one that comes from Ctrl-C raises KeyboardInterrupt, a third exits.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.requested: str | None = None
        self._deadline = float("inf")
        self._deferred = False
        self._interrupted = False
        self._previous: dict[int, Any] = {}

    @property
    def expired(self) -> bool:
        """Whether the time for finishing is over."""
        return time.monotonic() >= self._deadline

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals. Handlers that were there come back afterwards; only the main thread can have any."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Rows are in flight: a signal sets `requested`, and the block looks at it."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _handle(self, number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if self.requested is None:
            self.requested = name
            self._deadline = time.monotonic() + self.seconds
            _say(f"{name}: stopping within {self.seconds:g} s; what is finished is kept")
            self._chain(number, frame)
            if not self._deferred:
                raise Drained(f"stopped by {name} before any row was sent to the model; the same command starts again")
        elif number == signal.SIGINT:
            if self._interrupted:
                os._exit(INTERRUPTED)
            self._interrupted = True
            raise KeyboardInterrupt

    def _chain(self, number: int, frame: Any) -> None:
        """submitit requeues its job from its own handler of USR2."""
        previous: Callable[[int, Any], Any] | Any = self._previous.get(number)
        if number == signal.SIGUSR2 and "SUBMITIT_EXECUTOR" in os.environ and callable(previous):
            previous(number, frame)


def _say(text: str) -> None:
    """A line on stderr. A handler may run in the middle of a print, where a second one is refused."""
    os.write(2, f"batchrun: {text}\n".encode())

"""A function called every few seconds in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Ticker:
    """Calls `tick` every `seconds` between entering and leaving, and never twice at once.

    An exception of `tick` ends the thread and is raised by the next `check`.
    """

    def __init__(self, name: str, seconds: float, tick: Callable[[], None]) -> None:
        self._seconds = seconds
        self._tick = tick
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread, after the call that is under way."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self) -> None:
        """Raise what a call raised."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._tick()
            except BaseException as error:
                self._error = error
                return

"""A run that hangs is worth less than one that ends: stacks to stderr and to a file, then exit."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from batchrun.ticker import Ticker

STALLED = 1


class Watchdog:
    """Ends the process with exit code 1 if nobody calls `beat` for `seconds`, between entering and leaving.

    Before that, the stacks of all threads go to stderr and into `report`, and `rescue` is called to save what there
    is, for a few seconds at most.
    """

    def __init__(self, seconds: float, report: Path, rescue: Callable[[], None]) -> None:
        self.seconds = seconds
        self.report = report
        self._rescue = rescue
        self._last = time.monotonic()
        self._ticker = Ticker("watchdog", min(1.0, seconds / 4), self._look)

    def __enter__(self) -> Self:
        self.beat()
        self._ticker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticker.stop()
        faulthandler.cancel_dump_traceback_later()

    def beat(self) -> None:
        """The engine made a step."""
        self._last = time.monotonic()

    def _look(self) -> None:
        # A call that hangs while it holds the interpreter's lock stops this thread too: the C timer outlives that.
        faulthandler.dump_traceback_later(2 * self.seconds, exit=True)
        if time.monotonic() - self._last < self.seconds:
            return
        print(
            f"batchrun: no step of the engine for {self.seconds:g} s (run.stall_seconds): giving up. The stacks of all "
            f"threads follow and are in {self.report}. Finished rows are kept, and the same command goes on from them",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(all_threads=True)
        with suppress(OSError), open(self.report, "w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        rescue = threading.Thread(target=self._rescue, daemon=True)
        rescue.start()
        rescue.join(timeout=10)
        os._exit(STALLED)

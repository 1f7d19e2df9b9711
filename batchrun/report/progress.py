"""Progress on stderr: a live bar on a terminal, whole lines elsewhere, so that logs stay readable."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from batchrun.data.outputs import RowResult


class Progress:
    """Counts rows of this worker's share. All of them count as done until `expect` says what is to do."""

    def __init__(self, rows: int, interval: float) -> None:
        self.rows = rows
        self.done = rows
        self.tokens = 0
        self.errors = 0
        self._before = rows
        self._interval = interval
        self._started = self._printed = time.monotonic()
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self.done > self._before:
            self._print_line()

    def start(self) -> None:
        """The model is loaded: the clock of the rates starts here."""
        self._started = self._printed = time.monotonic()
        if sys.stderr.isatty():
            self._bar = tqdm(total=self.rows, initial=self.done, unit="row", dynamic_ncols=True, smoothing=0.1)
        else:
            self._print_line()

    def expect(self, rows: int) -> None:
        """So many rows more are to do."""
        self.done -= rows
        self._before -= rows

    @property
    def left(self) -> int:
        """Rows without a result."""
        return self.rows - self.done

    def restored(self, rows: int) -> None:
        """So many of them have a result from an earlier run."""
        self.done += rows
        self._before += rows
        if self._bar is not None:
            self._bar.update(rows)

    def update(self, result: RowResult) -> None:
        """A row is finished."""
        self.done += 1
        if not result.deduplicated:
            # Tasks that complete no text are as fast as they read.
            self.tokens += result.completion_tokens if result.values is None else result.prompt_tokens
        self.errors += result.status == "error"
        if self._bar is not None:
            self._bar.set_postfix_str(self._postfix(), refresh=False)
            self._bar.update()
        elif time.monotonic() - self._printed >= self._interval:
            self._print_line()

    def _postfix(self) -> str:
        rate = self.tokens / max(time.monotonic() - self._started, 1e-9)
        return f"{rate:,.0f} tok/s" + (f", {self.errors} errors" if self.errors else "")

    def _print_line(self) -> None:
        self._printed = time.monotonic()
        elapsed = self._printed - self._started
        new = self.done - self._before
        left = f", {(self.rows - self.done) * elapsed / new:,.0f} s left" if new else ""
        print(
            f"batchrun: {self.done:,} of {self.rows:,} rows, {new / max(elapsed, 1e-9):.1f} rows/s, "
            f"{self._postfix()}{left}",
            file=sys.stderr,
            flush=True,
        )

"""Everything that a run tells while it is at work, behind one door: progress, metrics, failures, heartbeat."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from batchrun.config import Config
from batchrun.data.disk import explained
from batchrun.data.outputs import RowResult
from batchrun.engine.stats import StepStats
from batchrun.output import Output
from batchrun.report.failures import Failures
from batchrun.report.heartbeat import Heartbeat
from batchrun.report.metrics import Metrics
from batchrun.report.progress import Progress


class Report:
    """Told of every row and step of a run, between entering and leaving."""

    def __init__(self, config: Config, output: Output) -> None:
        self.output = output
        rows = output.job.plan.results_of(output.ledger.own)
        self.metrics = Metrics(config, output.store.state_folder)
        self.progress = Progress(rows, config.report.interval)
        # Of rows that are made again because they failed, many may fail again.
        self.failures = Failures(1.0 if config.retry else config.run.max_error_rate, config.run.min_rows)
        self.heartbeat = Heartbeat(
            output.claim.heartbeat, output.run, config.run.heartbeat_seconds, self._counts, output.claim.check
        )
        self._working_since: float | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for part in (self.heartbeat, self.metrics, self.progress):
                stack.enter_context(part)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def start(self) -> None:
        """The model is loaded."""
        self.progress.start()
        self.heartbeat.state = "running"
        self._working_since = self._working_since or time.monotonic()

    def draining(self) -> None:
        """Rows in flight are finished, and no more are begun."""
        self.heartbeat.state = "draining"
        with explained(self.heartbeat.path):
            self.heartbeat.beat()

    def add_row(self, source_name: str, number: int, result: RowResult) -> None:
        """A row is finished."""
        self.metrics.add_row(source_name, number, result)
        self.progress.update(result)
        self.failures.add(source_name, number, result)

    def add_part(self, part: pa.Table) -> None:
        """A part is in place."""
        self.metrics.add_part(self.output.schema, part)

    def add_step(self, step: StepStats | None) -> None:
        """The engine made a step."""
        self.metrics.add_step(step)

    def check(self, under_way: int = 0) -> None:
        """Raise ErrorBudgetExceeded if too many rows failed, BatchrunError if the output can no longer be written.

        `under_way` are rows that have been sent and are not finished.
        """
        self.failures.check(under_way)
        self.output.check()
        self.heartbeat.check()

    def _counts(self) -> dict[str, Any]:
        metrics, progress = self.metrics, self.progress
        seconds = 0.0 if self._working_since is None else time.monotonic() - self._working_since
        per_second = 1 / seconds if seconds else 0.0
        return {
            "rows": progress.rows,
            "rows_done": progress.done,
            "rows_open": self.output.journal.rows,
            "rows_made": metrics.rows,
            "rows_per_s": round(metrics.rows * per_second, 3),
            "tokens_per_s": round((metrics.prompt_tokens + metrics.completion_tokens) * per_second, 1),
            "errors": dict(self.failures.kinds),
            "last_error": self.failures.last,
        }

"""How far a job is, from its output folder alone: the manifest, the names of the parts, and the heartbeats."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.config import Config
from batchrun.data.disk import read_json
from batchrun.data.manifest import plan_of, read_manifest
from batchrun.data.outputs import COUNTS
from batchrun.data.plan import STATE_FOLDER
from batchrun.errors import ConfigError

WORKING = ("loading", "running", "draining")
BEATS_MISSED = 4  # after which a worker counts as gone
FOOTERS = 20_000  # of more parts, none are opened: errors then are those of the last runs
THREADS = 8


@dataclass(slots=True)
class Worker:
    """One worker as its last heartbeat shows it."""

    beat: dict[str, Any]
    age: float  # seconds since then, by this host's clock

    @property
    def working(self) -> bool:
        """Whether it said that it works."""
        return self.beat.get("state") in WORKING

    @property
    def alive(self) -> bool:
        """Whether it works and its last sign of life is not too old."""
        return self.working and self.age < BEATS_MISSED * float(self.beat.get("seconds", 15.0))


@dataclass(slots=True)
class Status:
    """How far a job is. `rows_open` have a result whose part is not complete yet."""

    model: str
    chunks: int
    chunks_done: int
    rows: int
    rows_done: int
    rows_open: int
    errors: Counter[str]
    workers: list[Worker]

    @property
    def rows_per_s(self) -> float:
        return sum(worker.beat.get("rows_per_s", 0.0) for worker in self.workers if worker.alive)

    @property
    def tokens_per_s(self) -> float:
        return sum(worker.beat.get("tokens_per_s", 0.0) for worker in self.workers if worker.alive)

    @property
    def seconds_left(self) -> float | None:
        """Until the last row, at the present rate; None if nobody works."""
        left = self.rows - self.rows_done - self.rows_open
        return left / self.rows_per_s if self.rows_per_s > 0 else None


def status(config: Config) -> int:
    """Print how far the job of `output.path` is. Nothing is written, and neither model nor input is needed."""
    folder = Path(str(config.output.path)).expanduser()
    print("\n".join(lines(read_status(folder), folder)))
    return 0


def read_status(folder: Path, now: float | None = None) -> Status:
    """The state of an output folder. Raises ConfigError if it is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(f"output.path={folder} is not the output of a job: it has no manifest")
    plan = plan_of(manifest)
    numbers = plan.present(folder)
    workers = _workers(folder, time.time() if now is None else now)
    rows_done = plan.results_of(numbers)
    if len(numbers) <= FOOTERS:
        errors = _errors([folder / plan.chunk(number).part for number in numbers.tolist()])
    else:
        errors = sum((Counter(worker.beat.get("errors", {})) for worker in workers), Counter())
    return Status(
        model=str(manifest["settings"].get("model.path")),
        chunks=plan.num_chunks,
        chunks_done=len(numbers),
        rows=plan.results,
        rows_done=rows_done,
        rows_open=min(plan.results - rows_done, sum(int(worker.beat.get("rows_open", 0)) for worker in workers)),
        errors=errors,
        workers=workers,
    )


def lines(status: Status, folder: Path) -> list[str]:
    """The state as text."""
    share = (status.rows_done + status.rows_open) / max(status.rows, 1)
    shown = [
        f"{'output':<10}{folder}, by {status.model}",
        f"{'chunks':<10}{status.chunks_done:,} of {status.chunks:,} done",
        f"{'rows':<10}{status.rows_done + status.rows_open:,} of {status.rows:,} done, {share:.1%}"
        + (f"; {status.rows_open:,} of them in open chunks" if status.rows_open else ""),
    ]
    if status.seconds_left is not None:
        left = f"about {_duration(status.seconds_left)} left"
        shown.append(f"{'rate':<10}{status.rows_per_s:,.1f} rows/s, {status.tokens_per_s:,.0f} tokens/s, {left}")
    if status.errors:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in status.errors.most_common())
        shown.append(f"{'errors':<10}{kinds}")
    if not status.workers and status.chunks_done < status.chunks:
        shown.append(f"{'workers':<10}none has begun")
    return shown + [line for worker in status.workers for line in _worker_lines(worker)]


def _worker_lines(worker: Worker) -> list[str]:
    beat = worker.beat
    state = beat.get("state") if worker.alive or not worker.working else f"gone (was {beat.get('state')})"
    # What is left is counted once the model is loaded; before that a beat has no progress to tell.
    progress = (
        f", {beat.get('rows_done', 0):,} of {beat.get('rows', 0):,} rows, {beat.get('rows_per_s', 0.0):,.1f} rows/s"
        if beat.get("state") != "loading"
        else ""
    )
    shown = [
        f"worker {beat.get('worker')}: {state}{progress}; {_duration(worker.age)} ago, process {beat.get('pid')} on "
        f"{beat.get('host')}, run {beat.get('run')}"
    ]
    for key in ("failure", "last_error"):
        if beat.get(key):
            shown.append(f"  {key.replace('_', ' ')}: {beat[key]}")
    return shown


def _workers(folder: Path, now: float) -> list[Worker]:
    """Workers of the split that beat last; those of an earlier one are history."""
    beats = [read_json(path) for path in sorted((folder / STATE_FOLDER / "heartbeat").glob("[!.]*.json"))]
    workers = [Worker(beat, max(0.0, now - float(beat.get("beat", 0.0)))) for beat in beats if beat is not None]
    if not workers:
        return []
    last = min(workers, key=lambda worker: worker.age)
    count = str(last.beat.get("worker")).partition("-of-")[2]
    workers = [worker for worker in workers if str(worker.beat.get("worker")).endswith(f"-of-{count}")]
    return sorted(workers, key=lambda worker: int(str(worker.beat.get("worker")).partition("-")[0]))


def _errors(parts: list[Path]) -> Counter[str]:
    """Errors by type in the footers of the parts. A part that cannot be read has none."""
    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(_counts, parts), Counter())


def _counts(part: Path) -> Counter[str]:
    try:
        return Counter(json.loads((pq.read_metadata(part).metadata or {}).get(COUNTS, b"{}")))
    except (OSError, ValueError, pa.ArrowException):
        return Counter()


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"

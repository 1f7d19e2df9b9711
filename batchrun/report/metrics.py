"""Metrics as Parquet, written while the job runs, and a summary as JSON at its end."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.config import Config
from batchrun.data.disk import explained, replace_json
from batchrun.data.outputs import OutputSchema, RowResult
from batchrun.engine.stats import StepStats

TALLIED = 32  # distinct values of a column that are counted
BUFFERED = 8192  # rows of metrics held before they are written

ROWS = pa.schema(
    {
        "source_file": pa.string(),
        "source_row": pa.int64(),
        "sample": pa.int32(),
        "status": pa.string(),
        "finish_reason": pa.string(),
        "prompt_tokens": pa.int32(),
        "cached_tokens": pa.int32(),
        "completion_tokens": pa.int32(),
        "queue_s": pa.float32(),
        "first_token_s": pa.float32(),
        "total_s": pa.float32(),
        "deduplicated": pa.bool_(),
    }
)
STEPS = pa.schema(
    {
        "at_s": pa.float64(),
        "seconds": pa.float32(),
        "tokens": pa.int32(),
        "sampled": pa.int32(),
        "forced": pa.int32(),
        "running": pa.int32(),
        "waiting": pa.int32(),
        "kv_used": pa.float32(),
        "hit_rate": pa.float32(),
        "ideal_hit_rate": pa.float32(),
        "preemptions": pa.int64(),
        "padding": pa.int32(),
    }
)


class Metrics:
    """Totals of this run, and with `report.metrics` one Parquet row per row and per step.

    Tokens are those that the engine saw: rows that took the result of another are counted, and their tokens are not.
    """

    def __init__(self, config: Config, state_folder: Path) -> None:
        self.config = config
        self.folder = state_folder / "metrics" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.started_at = time.time()
        self.rows = 0
        self.deduplicated = 0
        self.parse_errors = 0
        self.tallies: dict[str, Counter[str]] = {}
        self._untold: set[str] = set()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.forced_tokens = 0
        self.statuses: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.error_types: Counter[str] = Counter()
        self.engine_seconds = 0.0
        self.computed_tokens = 0
        self.padding = 0
        self.last_step: StepStats | None = None
        self._first_step: float | None = None
        self._origin = time.perf_counter()
        self._rows: list[tuple[str, int, RowResult]] = []
        self._tables: dict[str, _Table] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rows:
            self._write_rows()
        for table in self._tables.values():
            table.close()
        if self.rows:
            with explained(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                replace_json(self.folder / "summary.json", self.summary())
                replace_json(self.folder.parent.parent / "summary.json", self.summary())

    def add_row(self, source: str, number: int, result: RowResult) -> None:
        """A row is finished."""
        self.rows += 1
        if result.deduplicated:
            self.deduplicated += 1
        else:
            self.prompt_tokens += result.prompt_tokens
            self.cached_tokens += result.cached_tokens
            self.completion_tokens += result.completion_tokens
        self.statuses[result.status] += 1
        self.finish_reasons[result.finish_reason or "none"] += 1
        if result.status == "error":
            self.error_types[result.error_type or "error"] += 1
        if self.config.report.metrics:
            self._rows.append((source, number, result))
            if len(self._rows) >= BUFFERED:
                self._write_rows()

    def add_part(self, schema: OutputSchema, part: pa.Table) -> None:
        """A part is in place, with what was made of its completions."""
        self.parse_errors += schema.parse_errors(part)
        for name, counts in schema.tally(part).items():
            self.tallies.setdefault(name, Counter()).update(counts)
            # Of a column with more values than these, none is told: it is text, not a verdict.
            if len(self.tallies[name]) > TALLIED:
                self.tallies[name] = Counter()
                self._untold.add(name)

    def add_step(self, step: StepStats | None) -> None:
        """The engine made a step."""
        if step is None:
            return
        # From the beginning of the first step on: steps of several engine processes overlap.
        now = time.perf_counter()
        self._first_step = now - step.seconds if self._first_step is None else self._first_step
        self.engine_seconds = now - self._first_step
        self.last_step = step
        self.forced_tokens += step.forced
        self.computed_tokens += step.tokens
        self.padding += step.padding
        if self.config.report.metrics:
            values = {"at_s": now - self._origin, **dataclasses.asdict(step)}
            self._table("steps", STEPS).add({name: [values[name]] for name in STEPS.names})

    @property
    def values(self) -> dict[str, Counter[str]]:
        """How often each value came in the derived columns, by column, save those with many values."""
        return {name: counts for name, counts in self.tallies.items() if name not in self._untold}

    def summary(self) -> dict[str, Any]:
        """What the run came to, as plain values. Rates are over the time from the first engine step to the last."""
        per_second = 1 / max(self.engine_seconds, 1e-9)
        return {
            "job": self.config.job.name,
            "model": self.config.model.path,
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.started_at)),
            "wall_s": round(time.time() - self.started_at, 3),
            "engine_s": round(self.engine_seconds, 3),
            "rows": self.rows,
            "deduplicated": self.deduplicated,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "forced_tokens": self.forced_tokens,
            "forced_share": round(self.forced_tokens / max(self.completion_tokens, 1), 4),
            "hit_rate": round(self.last_step.hit_rate, 4) if self.last_step else None,
            "ideal_hit_rate": round(self.last_step.ideal_hit_rate, 4) if self.last_step else None,
            "padding": round(self.padding / max(self.computed_tokens + self.padding, 1), 4),
            "rows_per_s": round(self.rows * per_second, 3),
            "total_tokens_per_s": round((self.prompt_tokens + self.completion_tokens) * per_second, 1),
            "completion_tokens_per_s": round(self.completion_tokens * per_second, 1),
            "statuses": dict(self.statuses),
            "finish_reasons": dict(self.finish_reasons),
            "error_types": dict(self.error_types),
            "parse_errors": self.parse_errors,
            "values": {name: dict(counts.most_common()) for name, counts in self.values.items()},
        }

    def _write_rows(self) -> None:
        sources, numbers, results = zip(*self._rows, strict=True)
        columns = {name: [getattr(result, name) for result in results] for name in ROWS.names[2:]}
        self._rows = []
        self._table("rows", ROWS).add({"source_file": sources, "source_row": numbers, **columns})

    def _table(self, name: str, schema: pa.Schema) -> _Table:
        if name not in self._tables:
            self._tables[name] = _Table(self.folder, name, schema)
        return self._tables[name]


class _Table:
    """A Parquet file that grows by row groups of BUFFERED rows. A run that dies leaves it without a footer.

    Raises BatchrunError if the disk refuses.
    """

    def __init__(self, folder: Path, name: str, schema: pa.Schema) -> None:
        self.path = folder / f"{name}.parquet"
        self.schema = schema
        with explained(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self.path, schema, compression="zstd")
        self._columns: dict[str, list[Any]] = {column: [] for column in schema.names}

    def add(self, columns: Mapping[str, Sequence[Any]]) -> None:
        for name, values in columns.items():
            self._columns[name].extend(values)
        if len(self._columns[self.schema.names[0]]) >= BUFFERED:
            self._flush()

    def close(self) -> None:
        self._flush()
        with explained(self.path):
            self._writer.close()

    def _flush(self) -> None:
        with explained(self.path):
            self._writer.write_table(pa.table(self._columns, schema=self.schema))
        self._columns = {column: [] for column in self.schema.names}

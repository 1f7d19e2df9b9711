"""A job's name, its share of the chunks, how a run goes on and ends, and what it shows."""

from __future__ import annotations

from dataclasses import dataclass

from batchrun.config.base import LONGEST_S, in_range, setting
from batchrun.errors import ConfigError


@dataclass
class JobConfig:
    """What `job=` selected."""

    name: str = setting("", "name of the job, for messages and metrics", identity=False)
    description: str = setting("", "what the job does, in one line", identity=False)


@dataclass
class LaunchConfig:
    """Which share of the chunks this process takes: chunk i is done by worker i mod count."""

    index: int = setting(0, "this worker's number, from 0", identity=False)
    count: int = setting(1, "number of workers", identity=False)

    def __post_init__(self) -> None:
        in_range("launch.count", self.count, 1)
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"launch.index={self.index} is out of range: launch.count={self.count} workers are numbered from 0 to "
                f"{self.count - 1}"
            )


@dataclass
class RunConfig:
    """How a run works, when it ends before its work does, and how it shows that it lives."""

    dedup: bool = setting(
        True, "compute rows with equal prompts once, where sampling is greedy or seeded by content", identity=False
    )
    max_error_rate: float = setting(0.5, "stop when a larger share of the rows fails; 1: never", identity=False)
    min_rows: int = setting(100, "rows that must be finished before the share counts", identity=False)
    drain_seconds: float = setting(20.0, "time to finish rows in flight after a signal to stop", identity=False)
    stall_seconds: float = setting(900.0, "give up when the engine makes no step for so long", identity=False)
    heartbeat_seconds: float = setting(15.0, "seconds between signs of life in the output folder", identity=False)

    def __post_init__(self) -> None:
        in_range("run.max_error_rate", self.max_error_rate, 0, 1)
        in_range("run.min_rows", self.min_rows, 1)
        in_range("run.drain_seconds", self.drain_seconds, 0, LONGEST_S)
        in_range("run.stall_seconds", self.stall_seconds, 0.1, LONGEST_S)
        in_range("run.heartbeat_seconds", self.heartbeat_seconds, 0.1, 60)


@dataclass
class ReportConfig:
    """Progress and metrics."""

    interval: float = setting(30.0, "seconds between progress lines when stderr is not a terminal", identity=False)
    metrics: bool = setting(True, "write per-row and per-step metrics as Parquet", identity=False)

    def __post_init__(self) -> None:
        in_range("report.interval", self.interval, 0.1, LONGEST_S)

"""Engines on workloads, in turn: one engine at work, the others loaded and stopped, for a number of rounds."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.bench.engines import EngineSpec
from batchrun.bench.fleet import Fleet
from batchrun.bench.limits import Floor, Limits, ModelShape, count_work, floor, measure_limits
from batchrun.bench.process import EngineFailed, Surroundings
from batchrun.bench.workloads import Workload, warmup_rows
from batchrun.config import Config
from batchrun.data.runs import new_run_id
from batchrun.engine.checkpoint import Checkpoint, load_tokenizer, open_checkpoint
from batchrun.engine.model import choose_device, choose_dtype
from batchrun.errors import ConfigError
from batchrun.job import versions

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Trial:
    """A workload and the engines that run it. What the others generate is compared with the first one's tokens."""

    workload: Workload
    engines: list[EngineSpec]


@dataclass(slots=True)
class Measurement:
    """One engine, workload and round: a row of the Parquet file. One that failed has `error` and no seconds."""

    workload: str
    engine: str
    ours: bool
    round: int
    rows: int
    prompt_tokens: int
    output_tokens: int
    settings: str  # JSON
    compute_floor_s: float
    weights_floor_s: float
    seconds: float | None = None
    cpu_s: float | None = None
    other_cpu_s: float | None = None
    peak_rss_bytes: int | None = None
    load_s: float | None = None
    warmup_s: float | None = None
    same_rows: float | None = None  # share of the rows with the tokens of the trial's first engine, first round
    version: str | None = None
    error: str | None = None


@dataclass(slots=True)
class Model:
    """The model that is measured, where it runs, and the machine's limits for it."""

    checkpoint: Checkpoint
    tokenizer: Any
    dtype: str
    device: str
    cores: list[int]
    shape: ModelShape
    limits: Limits


class Bench:
    """Runs trials; keeps their measurements in memory and in one Parquet file, which is written after each."""

    def __init__(self, config: Config, model: Model, name: str | None = None) -> None:
        self.config = config
        self.model = model
        self.name = name or model.checkpoint.name
        self.run = new_run_id()
        self.measurements: list[Measurement] = []
        self._outputs: dict[str, list[list[int]]] = {}  # of each workload, from its first engine
        self._failed: set[str] = set()

    @property
    def path(self) -> Path:
        """The Parquet file of this run."""
        return output_folder(self.config) / f"{self.run}.parquet"

    def measure(self, trials: Sequence[Trial]) -> None:
        """Run all trials. An engine that fails is left out from then on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        workloads = [trial.workload for trial in trials]
        warmup = warmup_rows(workloads, self.model.shape.vocabulary)
        longest = max(workload.longest for workload in [*workloads, Workload("warm-up", warmup)])
        with TemporaryDirectory(prefix="batchrun-bench-") as scratch:
            around = Surroundings(
                dtype=self.model.dtype,
                device=self.model.device,
                cores=self.model.cores,
                max_model_len=longest,
                kv_cache_gib=self.config.engine.kv_cache_gib or self.config.bench.kv_cache_gib,
                limit_seconds=self.config.bench.limit_seconds,
                scratch=Path(scratch),
            )
            with Fleet(around, warmup) as fleet:
                for number, trial in enumerate(trials):
                    self._run_trial(fleet, trial)
                    fleet.keep({spec.label for later in trials[number + 1 :] for spec in later.engines})

    def finish(self) -> int:
        """Say where the measurements are; the exit code, which is 1 if an engine failed."""
        print(f"\nmeasurements: {self.path}")
        return 1 if any(m.error for m in self.measurements) else 0

    def _run_trial(self, fleet: Fleet, trial: Trial) -> None:
        least = floor(count_work(trial.workload.rows), self.model.shape, self.model.limits)
        for number in range(self.config.bench.rounds):
            # Another engine begins each round, in case it matters who comes after whom.
            first = number % len(trial.engines)
            for spec in [*trial.engines[first:], *trial.engines[:first]]:
                if spec.label not in self._failed:
                    self.measurements.append(self._measure(fleet, trial.workload, spec, number, least))
                    self._save()

    def _measure(self, fleet: Fleet, workload: Workload, spec: EngineSpec, number: int, least: Floor) -> Measurement:
        measured = Measurement(
            workload=workload.name,
            engine=spec.label,
            ours=spec.ours,
            round=number,
            rows=len(workload.rows),
            prompt_tokens=workload.prompt_tokens,
            output_tokens=workload.output_tokens,
            settings=json.dumps(spec.settings),
            compute_floor_s=least.compute,
            weights_floor_s=least.weights,
        )
        try:
            engine, timing = fleet.run(spec, workload.rows)
        except EngineFailed as error:
            log.warning("%s", error)
            self._failed.add(spec.label)
            measured.error = str(error)
            return measured
        log.info("%s, round %d: %s took %.2f s", workload.name, number + 1, spec.label, timing.seconds)
        measured.seconds, measured.peak_rss_bytes = timing.seconds, timing.peak_rss_bytes
        measured.cpu_s, measured.other_cpu_s = timing.cpu_seconds, timing.other_cpu_seconds
        measured.load_s, measured.warmup_s, measured.version = (
            engine.load_seconds, engine.warmup_seconds, engine.version,
        )  # fmt: skip
        measured.same_rows = same_rows(self._outputs.setdefault(workload.name, timing.outputs), timing.outputs)
        return measured

    def _save(self) -> None:
        """Write all measurements again, under a scratch name first: a killed bench leaves whole files."""
        model = self.model
        about = {
            "run": self.run,
            "model": self.name,
            "dtype": model.dtype,
            "device": model.device,
            "threads": len(model.cores),
            "machine": machine_name(),
            "gemm_flops": model.limits.flops,
            "read_bytes_per_s": model.limits.read,
            "versions": json.dumps(versions()),
        }
        table = as_table(self.measurements, about)
        scratch = self.path.with_name(f".{self.path.name}")
        pq.write_table(table, scratch)
        os.replace(scratch, self.path)


def open_model(config: Config) -> Model:
    """Find the model and measure the machine. Raises ConfigError."""
    checkpoint = open_checkpoint(config.model, weights=True, offline=config.offline)
    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, checkpoint, device, config.engine)
    shape, name = ModelShape.of(checkpoint, dtype), str(dtype).removeprefix("torch.")
    cores = usable_cores(config.engine.num_threads)
    log.info("measuring the machine's limits")
    limits = measure_limits(shape, name, str(device), len(cores))
    tokenizer = load_tokenizer(checkpoint, offline=config.offline)
    return Model(checkpoint, tokenizer, name, str(device), cores, shape, limits)


def check_lengths(workloads: Sequence[Workload], model: Model) -> None:
    """Raise ConfigError unless the model can hold the longest row."""
    for workload in workloads:
        if workload.longest > model.checkpoint.max_model_len:
            raise ConfigError(
                f"workload {workload.name} has a row of {workload.longest} tokens, but the model takes "
                f"{model.checkpoint.max_model_len}: leave it out of bench.workloads, or choose another model"
            )


def print_limits(model: Model) -> None:
    """What the machine can do at most, and with which model."""
    print(
        f"{machine_name()}, {len(model.cores)} threads on {model.device}; {model.checkpoint.name} in {model.dtype}\n"
        f"at most {model.limits.flops / 1e12:.2f} TFLOP/s in a matrix product, {model.limits.read / 1e9:.1f} GB/s read "
        f"from memory\n",
        flush=True,
    )


def output_folder(config: Config) -> Path:
    """Where Parquet files of measurements go."""
    assert config.output.path is not None
    return Path(config.output.path).expanduser()


def usable_cores(count: int | None) -> list[int]:
    """Numbers of the cores given to this process, the first `count` of them."""
    try:
        cores = sorted(os.sched_getaffinity(0))
    except AttributeError:
        cores = list(range(os.cpu_count() or 1))
    return cores[:count]


def same_rows(reference: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> float:
    """Share of rows with the same tokens. Rounding alone makes engines differ where two tokens are about as likely."""
    return sum(list(a) == list(b) for a, b in zip(reference, outputs, strict=True)) / max(len(reference), 1)


def machine_name() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def as_table(rows: Sequence[Any], about: dict[str, Any]) -> pa.Table:
    """Dataclass instances as a table, with the values of `about` in front of each row."""
    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}

    def arrow(hint: Any) -> pa.DataType:
        return kinds[next(arm for arm in typing.get_args(hint) or (hint,) if arm is not type(None))]

    hints = typing.get_type_hints(type(rows[0]))
    fields = [(key, kinds[type(value)]) for key, value in about.items()]
    schema = pa.schema([*fields, *((name, arrow(hint)) for name, hint in hints.items())])
    return pa.Table.from_pylist([about | dataclasses.asdict(row) for row in rows], schema=schema)

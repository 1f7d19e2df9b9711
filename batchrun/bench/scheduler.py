"""What the engine costs beside the model: host time of a step by phase, and a whole job of tiny rows."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from batchrun.bench.measure import as_table, machine_name, output_folder
from batchrun.bench.process import PACKAGE_ROOT
from batchrun.bench.table import align
from batchrun.bench.tiny import save_tiny_model
from batchrun.config import Config
from batchrun.data.runs import new_run_id
from batchrun.engine import scheduler as scheduling
from batchrun.engine.batch import Batch
from batchrun.engine.engine import Engine
from batchrun.engine.executor import Drawn
from batchrun.engine.kv_cache import BlockPool
from batchrun.engine.params import Request, SamplingParams
from batchrun.errors import BatchrunError

BLOCK_SIZE = 32
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 64  # of each row; a row ends with each token at a chance of 1 in so many
MOST_TOKENS = 4 * OUTPUT_TOKENS
SETTLING_STEPS = 4 * OUTPUT_TOKENS  # before the first one that counts: rows that began together end apart
JOB_ROWS = 100_000
JOB_OUTPUT_TOKENS = 4
TOKEN, END = 5, 1  # what rows generate
MICRO = 1e6


@dataclass(slots=True)
class StepCost:
    """Mean microseconds of a step at some number of waiting rows. `schedule` is without `make_batch`."""

    waiting: int
    running: int
    steps: int
    finished: int  # rows, each replaced by one that waited
    schedule_us: float
    make_batch_us: float
    advance_us: float
    collect_us: float
    total_us: float  # of the phases together
    p99_us: float
    longest_us: float
    add_us: float  # to queue one row, which no step waits for


@dataclass(slots=True)
class JobCost:
    """A whole job of tiny rows on a tiny model, from the command line to the last part."""

    rows: int
    seconds: float
    rows_per_s: float
    us_per_row: float


def run(config: Config) -> int:
    """Measure, print both tables and write them as Parquet; returns the exit code."""
    bench = config.bench
    print(f"{machine_name()}: host time of a step without a model, {bench.running} rows running\n", flush=True)
    costs = []
    for waiting in bench.waiting:
        costs.append(measure_steps(waiting, bench.running, bench.steps))
        print("\n".join(align(_step_lines(costs))[0 if len(costs) == 1 else -1 :]), flush=True)
    job = measure_job(config, bench.rows or JOB_ROWS)
    print(f"\n{job.rows:,} tiny rows end to end: {job.seconds:.1f} s, {job.rows_per_s:,.0f} rows/s, "
          f"{job.us_per_row:.0f} us a row")  # fmt: skip
    print(f"\nmeasurements: {', '.join(map(str, _save(config, costs, job)))}")
    return 0


def measure_steps(waiting: int, running: int, steps: int) -> StepCost:
    """Time `steps` steps with `running` rows at work while `waiting` more wait; rows that end are replaced."""
    engine, numbers = _model_free_engine(running), iter(range(sys.maxsize))
    timers: dict[str, list[float]] = {name: [] for name in ("schedule", "make_batch", "advance", "receive", "collect")}
    adding = _add(engine, numbers, running + waiting)
    for _ in range(SETTLING_STEPS):
        _add(engine, numbers, len(engine.step()))
    engine.take_steps()
    with (
        _timed(engine.scheduler, "schedule", timers["schedule"]),
        _timed(scheduling, "make_batch", timers["make_batch"]),
        _timed(engine.scheduler, "advance", timers["advance"]),
        _timed(engine.scheduler, "receive", timers["receive"]),
        _timed(engine, "_find_ends", timers["collect"]),
    ):
        finished = 0
        for _ in range(steps):
            done = len(engine.step())
            finished += done
            _add(engine, numbers, done)
            engine.take_steps()
    micro = {name: MICRO * np.array(times) for name, times in timers.items()}
    micro["schedule"] = micro["schedule"] - micro["make_batch"]
    micro["advance"] = micro["advance"] + micro.pop("receive")
    totals = np.sum(list(micro.values()), axis=0)
    return StepCost(
        waiting=waiting,
        running=running,
        steps=steps,
        finished=finished,
        schedule_us=float(micro["schedule"].mean()),
        make_batch_us=float(micro["make_batch"].mean()),
        advance_us=float(micro["advance"].mean()),
        collect_us=float(micro["collect"].mean()),
        total_us=float(totals.mean()),
        p99_us=float(np.percentile(totals, 99)),
        longest_us=float(totals.max()),
        add_us=MICRO * adding / (running + waiting),
    )


def measure_job(config: Config, rows: int) -> JobCost:
    """Run the command on `rows` rows of a few tokens each, with a random model that computes next to nothing."""
    with TemporaryDirectory(prefix="batchrun-bench-") as scratch:
        folder = Path(scratch)
        save_tiny_model(folder / "model")
        words = np.random.default_rng(0).integers(4, 256, size=(rows, 8))
        texts = [" ".join(f"w{word}" for word in row) for row in words.tolist()]
        pq.write_table(pa.table({"text": texts}), folder / "rows.parquet")
        command = [
            *(sys.executable, "-m", "batchrun"),
            *("job=generate", "prompt=completion", "prompt.template={{ text }}"),
            f"model={folder / 'model'}",
            f"input.path={folder / 'rows.parquet'}",
            f"output.path={folder / 'out'}",
            f"sampling.max_tokens={JOB_OUTPUT_TOKENS}",
            "sampling.ignore_eos=true",
            "engine.kv_cache_gib=0.5",
            f"engine.max_num_seqs={config.engine.max_num_seqs}",
        ]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=PACKAGE_ROOT, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        if done.returncode:
            raise BatchrunError(f"the job of tiny rows ended with exit code {done.returncode}:\n{done.stderr.strip()}")
        written = sum(pq.read_metadata(part).num_rows for part in (folder / "out").glob("*.parquet"))
        if written != rows:
            raise BatchrunError(f"the job of tiny rows wrote {written:,} rows of {rows:,}")
    return JobCost(rows, seconds, rows / seconds, MICRO * seconds / rows)


def _model_free_engine(running: int) -> Engine:
    """An engine whose model computes nothing, with pages for all the rows that run."""
    longest = PROMPT_TOKENS + MOST_TOKENS
    pool = BlockPool(running * (-(-longest // BLOCK_SIZE) + 1), BLOCK_SIZE)
    model: Any = SimpleNamespace(
        vocab_size=256, device=torch.device("cpu"), hidden=lambda batch: None, logits=lambda hidden, index: None
    )
    tokenizer: Any = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
    engine = Engine(model, tokenizer, pool, {END}, longest, running, running * PROMPT_TOKENS)
    rng = np.random.default_rng(0)

    def draw(batch: Batch, logits: Any, masks: None) -> Drawn:
        return Drawn(torch.from_numpy(np.where(rng.random(len(batch.sampled)) < 1 / OUTPUT_TOKENS, END, TOKEN)))

    engine.executor.draw = draw  # type: ignore[method-assign, assignment]
    return engine


def _add(engine: Engine, numbers: Iterator[int], count: int) -> float:
    """Queue rows that share no prefix; returns the seconds of the engine's part."""
    seconds, params = 0.0, SamplingParams(max_tokens=MOST_TOKENS)
    for number in (next(numbers) for _ in range(count)):
        ids = np.random.default_rng(number).integers(0, 256, size=PROMPT_TOKENS)
        started = time.perf_counter()
        engine.add(Request(number, ids, params))
        seconds += time.perf_counter() - started
    return seconds


@contextmanager
def _timed(owner: Any, name: str, seconds: list[float]) -> Iterator[None]:
    """Note how long each call of `owner.name` takes. Timed from outside, so that the engine carries no timers."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*arguments)
        finally:
            seconds.append(time.perf_counter() - started)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _step_lines(costs: list[StepCost]) -> list[list[str]]:
    head = ["waiting", "", "schedule", "make_batch", "advance", "collect", "us a step", "99 %", "longest", "us to add"]
    rows = []
    for c in costs:
        phases = (c.schedule_us, c.make_batch_us, c.advance_us, c.collect_us, c.total_us, c.p99_us, c.longest_us)
        rows.append([f"{c.waiting:,}", "", *(f"{value:,.0f}" for value in phases), f"{c.add_us:,.1f}"])
    return [head, *rows]


def _save(config: Config, costs: list[StepCost], job: JobCost) -> list[Path]:
    """Both tables as Parquet files of this run."""
    run, folder = new_run_id(), output_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    about = {"run": run, "machine": machine_name(), "threads": torch.get_num_threads()}
    tables: dict[str, list[Any]] = {"steps": costs, "job": [job]}
    paths = []
    for name, rows in tables.items():
        paths.append(folder / name / f"{run}.parquet")
        paths[-1].parent.mkdir(exist_ok=True)
        pq.write_table(as_table(rows, about), paths[-1])
    return paths

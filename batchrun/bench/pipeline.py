"""Everything but the engine: how many rows a second reading, prompts, results, the journal and parts can take."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrun import runner
from batchrun.bench.measure import as_table, machine_name, output_folder
from batchrun.bench.tiny import save_tiny_model
from batchrun.config import Config, InputConfig, ModelConfig, OutputConfig, PromptConfig
from batchrun.data.runs import new_run_id
from batchrun.engine.params import Completion, Request
from batchrun.engine.stats import StepStats

ROWS = 1_000_000
FILE_ROWS, GROUP_ROWS, CHUNK_ROWS = 1_000_000, 50_000, 10_000
WORDS = 8  # of each row's text
SAMPLE_S = 0.25
MIB = 2**20


class Echo:
    """An engine that ends every request in the step after it came, in no particular order, with the same word."""

    def __init__(self, batch: int = 256) -> None:
        self.batch = batch
        self._waiting: deque[Request] = deque()

    @property
    def room(self) -> int:
        return 2 * self.batch - len(self._waiting)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Completion]:
        running = [self._waiting.pop() for _ in range(min(self.batch, len(self._waiting)))]
        return [
            Completion(request.key, "positive", [5, 1], "stop", prompt_tokens=len(request.prompt_ids))
            for request in running
        ]

    def take_steps(self) -> list[StepStats]:
        return []

    def drop_waiting(self) -> list[object]:
        keys: list[object] = [request.key for request in self._waiting]
        self._waiting.clear()
        return keys

    def check_integrity(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(slots=True)
class PipelineCost:
    """What a job of short rows takes beside its model. Memory is that of the process, imports and all."""

    rows: int
    seconds: float
    rows_per_s: float
    cpu_seconds: float
    rows_per_cpu_s: float
    mib_early: float  # the most in the first quarter of the time
    mib_late: float  # the most in the last quarter


def run(config: Config) -> int:
    """Measure, print and write the numbers as Parquet; returns the exit code."""
    rows = config.bench.rows or ROWS
    print(f"{machine_name()}: {rows:,} rows of {WORDS} words through a job whose engine computes nothing\n", flush=True)
    cost = measure(config, rows)
    print(
        f"{cost.rows_per_s:,.0f} rows/s in {cost.seconds:,.1f} s; {cost.rows_per_cpu_s:,.0f} rows a second of one core"
    )
    print(f"at most {cost.mib_early:,.0f} MiB in the first quarter of the time, {cost.mib_late:,.0f} MiB in the last")
    path = output_folder(config) / "pipeline" / f"{new_run_id()}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(as_table([cost], {"machine": machine_name()}), path)
    print(f"\n{path}")
    return 0


def measure(config: Config, rows: int) -> PipelineCost:
    """A job of `rows` rows in this process, with the tokenizer of model.path, or one of whole words."""
    with TemporaryDirectory(prefix="batchrun-bench-") as scratch:
        folder = Path(scratch)
        job = dataclasses.replace(
            config,
            mode="run",
            model=config.model if config.model.path else ModelConfig(path=str(save_tiny_model(folder / "model"))),
            prompt=PromptConfig(kind="completion", template="{{ text }}"),
            input=InputConfig(path=str(_write_rows(folder / "in", rows))),
            output=OutputConfig(path=str(folder / "out"), chunk_rows=CHUNK_ROWS),
        )
        with Memory() as memory, redirect_stdout(StringIO()):
            started, cpu = time.perf_counter(), time.process_time()
            runner.run(job, load=lambda *_: Echo())
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    early, late = memory.quarters()
    return PipelineCost(rows, seconds, rows / seconds, cpu, rows / cpu, early, late)


class Memory:
    """Samples the resident memory of this process, in MiB, between entering and leaving."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def quarters(self) -> tuple[float, float]:
        """The most in the first and in the last quarter of the samples."""
        quarter = -(-len(self.samples) // 4)
        return max(self.samples[:quarter]), max(self.samples[-quarter:])

    def _sample(self) -> None:
        process = psutil.Process()
        while True:
            self.samples.append(process.memory_info().rss / MIB)
            if self._stopped.wait(SAMPLE_S):
                return


def _write_rows(folder: Path, rows: int) -> Path:
    """Parquet files of short texts, the same ones for the same number."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    vocabulary = np.array([f"w{i}" for i in range(4, 256)])
    numbers = iter(range(rows))
    while part := list(islice(numbers, FILE_ROWS)):
        columns = [pa.array(vocabulary[rng.integers(0, len(vocabulary), len(part))]) for _ in range(WORDS)]
        table = pa.table({"id": part, "text": pc.binary_join_element_wise(*columns, " ")})
        pq.write_table(table, folder / f"{part[0]:012d}.parquet", row_group_size=GROUP_ROWS)
    return folder

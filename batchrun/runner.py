"""The whole job on one screen: plan, rows, prompts, engine, outputs, commit."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count, repeat

import numpy as np
import pyarrow as pa

from batchrun.config import Config
from batchrun.data.buffer import ChunkBuffer
from batchrun.data.outputs import RowResult
from batchrun.data.prompts import Prompt
from batchrun.engine.engine import Engine, row_seed
from batchrun.engine.llm import load_engine
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.job import open_job
from batchrun.output import Output, open_output
from batchrun.prefetch import prefetch
from batchrun.report.metrics import Metrics
from batchrun.report.progress import Progress
from batchrun.report.summary import print_summary

BATCHES_AHEAD = 2  # read, rendered and tokenised before the engine asks
# What may be read and not yet committed: a slow row keeps its chunk open, and the chunks after it go on
# until this much waits for it.
OPEN_ROWS = 65_536
OPEN_BYTES = 512 * 2**20


def run(config: Config) -> int:
    """Do what is left of the job; returns the exit code. Raises BatchrunError for what the user can mend."""
    with open_output(open_job(config, weights=True)) as output:
        rows = output.job.plan.rows_of(output.ledger.own)
        with (
            Metrics(config, output.store.state_folder) as metrics,
            Progress(rows, config.report.interval) as progress,
        ):
            for buffer in finished_chunks(output, metrics, progress):
                output.commit(buffer)
        output.check_complete()
        print_summary(output, metrics)
    return 0


def finished_chunks(output: Output, metrics: Metrics, progress: Progress) -> Iterator[ChunkBuffer]:
    """Each chunk to do as soon as its last row is there. Rows of several chunks run together."""
    job, engine = output.job, None
    for numbers in output.todo():
        progress.expect(job.plan.rows_of(numbers))
        _, starts, stops = job.plan.bounds(numbers)
        for number in numbers[starts == stops].tolist():
            yield output.buffer(job.plan.chunk(number))
        numbers = numbers[starts < stops]
        if not len(numbers):
            continue
        engine = engine or load_engine(job.checkpoint, job.tokenizer, job.config.engine)
        progress.start()
        backlog = Backlog(output, numbers, progress)
        for row, result in complete(engine, backlog, job.config, metrics):
            if result is not None:
                row.buffer.add(row.number, result)
                metrics.add_row(row.buffer.source_name, row.number, result)
                progress.update(result)
            if row.buffer.complete:
                backlog.close(row.buffer)
                yield row.buffer
        engine.pool.check_integrity()


@dataclass(slots=True)
class Row:
    """One input row on its way; `number` counts within its file. Without a prompt: the last row of a chunk is read,
    and all results are there."""

    buffer: ChunkBuffer
    number: int
    prompt: Prompt | None


class Backlog:
    """Rows to complete in the order they are read, and how much of what was read is not yet committed."""

    def __init__(self, output: Output, numbers: np.ndarray, progress: Progress) -> None:
        self.rows = 0
        self.bytes = 0
        self._output = output
        self._numbers = numbers
        self._progress = progress

    @property
    def full(self) -> bool:
        return self.rows >= OPEN_ROWS or self.bytes >= OPEN_BYTES

    def __iter__(self) -> Iterator[Row]:
        with closing(prefetch(self._read(), BATCHES_AHEAD)) as items:
            for buffer, first, batch, rows, prompts in items:
                buffer.add_batch(first, batch)
                self.rows += batch.num_rows
                self.bytes += batch.nbytes
                self._progress.restored(batch.num_rows - len(rows))
                yield from map(Row, repeat(buffer), rows, prompts)
                if not rows and buffer.complete:
                    yield Row(buffer, first, None)

    def close(self, buffer: ChunkBuffer) -> None:
        """The chunk is complete and leaves the backlog."""
        self.rows -= buffer.chunk.rows
        self.bytes -= sum(batch.nbytes for batch in buffer.batches)

    def _read(self) -> Iterator[tuple[ChunkBuffer, int, pa.RecordBatch, list[int], list[Prompt]]]:
        """Batches with the rows in them that have no result yet, and the prompts of those."""
        output, kept = self._output, self._output.schema.kept
        prompts = output.job.prompts
        buffer: ChunkBuffer | None = None
        for chunk, first, batch in output.job.read(self._numbers, list(dict.fromkeys([*kept, *prompts.columns]))):
            if buffer is None or buffer.chunk != chunk:
                buffer = output.buffer(chunk)
            rows = buffer.without_result(first, first + batch.num_rows)
            left = batch if len(rows) == batch.num_rows else batch.take([row - first for row in rows])
            yield buffer, first, batch.select(kept), rows, prompts.build(left)


def complete(
    engine: Engine, backlog: Backlog, config: Config, metrics: Metrics
) -> Iterator[tuple[Row, RowResult | None]]:
    """Every row of the backlog with its result, in the order they finish."""
    rows, keys = iter(backlog), count()
    flying: dict[Hashable, Row] = {}
    more = True
    while more or engine.has_work():
        while more and engine.room > 0 and not (backlog.full and engine.has_work()):
            row = next(rows, None)
            if row is None:
                more = False
            elif row.prompt is None:
                yield row, None
            elif row.prompt.error_type is not None:
                yield row, refused(row.prompt)
            else:
                key = next(keys)
                flying[key] = row
                engine.add(Request(key, row.prompt.ids, sampling_params(config, row)))
        for completion in engine.step():
            yield flying.pop(completion.key), finished(completion)
        metrics.add_step(engine.last_step)


def sampling_params(config: Config, row: Row) -> SamplingParams:
    """The job's parameters with the row's own seed, which follows from the job's seed and the row's identity."""
    s = config.sampling
    return SamplingParams(
        max_tokens=s.max_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        seed=row_seed(s.seed, row.buffer.source_name, row.number) if s.temperature > 0 else 0,
        stop=tuple(s.stop),
        stop_token_ids=tuple(s.stop_token_ids),
        ignore_eos=s.ignore_eos,
        skip_special_tokens=s.skip_special_tokens,
    )


def refused(prompt: Prompt) -> RowResult:
    """A row that could not be sent to the engine."""
    return RowResult(
        status="error",
        finish_reason="error",
        error_type=prompt.error_type,
        error=prompt.error,
        prompt_tokens=len(prompt.ids),
    )


def finished(completion: Completion) -> RowResult:
    """A row that the engine is done with."""
    failed = completion.error_type is not None
    return RowResult(
        text=None if failed else completion.text,
        finish_reason=completion.finish_reason,
        status="error" if failed else "ok",
        error_type=completion.error_type,
        error=completion.error,
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        completion_tokens=len(completion.token_ids),
        queue_s=completion.queue_s,
        first_token_s=completion.first_token_s,
        total_s=completion.total_s,
    )

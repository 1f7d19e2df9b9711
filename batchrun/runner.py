"""The whole job on one screen: plan, rows, prompts, engine, outputs, commit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa

from batchrun.config import Config
from batchrun.data.buffer import ChunkBuffer
from batchrun.data.outputs import RowResult
from batchrun.engine.engine import Engine
from batchrun.engine.loading import load_engine
from batchrun.engine.pool import EnginePool
from batchrun.errors import Drained
from batchrun.flight import Flight
from batchrun.job import open_job
from batchrun.output import Output, open_output
from batchrun.prefetch import prefetch
from batchrun.report.progress import Progress
from batchrun.report.report import Report
from batchrun.report.summary import print_summary
from batchrun.row import Row
from batchrun.signals import Drain
from batchrun.watchdog import Watchdog

BATCHES_AHEAD = 2  # read, rendered and tokenised before the engine asks
# What may be read and not yet committed: a slow row keeps its chunk open, and the chunks after it go on
# until this much waits for it.
OPEN_ROWS = 65_536
OPEN_BYTES = 512 * 2**20
TURN_ROWS = 4096  # looked at between two steps of the engine; most of them may need none


def run(config: Config, drain: Drain | None = None, load: Callable[..., Any] | None = None) -> int:
    """Do what is left of the job; returns the exit code. Raises BatchrunError for what the user can mend.

    `load` makes the engine, in place of `load_engine`.
    """
    drain = drain or Drain()
    with open_output(open_job(config, weights=True)) as output:
        with Report(config, output) as report:
            for buffer in finished_chunks(output, report, drain, load or load_engine):
                report.add_part(output.commit(buffer))
            if drain.requested and report.progress.left:
                raise Drained(
                    f"stopped by {drain.requested}: {report.progress.left:,} of {report.progress.rows:,} rows left; "
                    "the same command goes on with them"
                )
            done = output.check_complete()
        print_summary(output, done, report.metrics)
    return 0


def finished_chunks(
    output: Output, report: Report, drain: Drain, load: Callable[..., Any] = load_engine
) -> Iterator[ChunkBuffer]:
    """Each chunk to do as soon as its last row is there. Rows of several chunks run together."""
    job, engine = output.job, None
    try:
        for numbers in output.todo():
            report.progress.expect(job.plan.results_of(numbers))
            _, starts, stops = job.plan.bounds(numbers)
            for number in numbers[starts == stops].tolist():
                yield output.buffer(job.plan.chunk(number))
            numbers = numbers[starts < stops]
            if not len(numbers) or drain.requested:
                continue
            engine = engine or load(job.checkpoint, job.tokenizer, job.config.engine, job.plan.results, job.task.pooler)
            report.start()
            backlog = Backlog(output, numbers, report.progress)
            with drain.deferred(), output.watchdog() as watchdog:
                for row, result in complete(engine, backlog, report, drain, watchdog):
                    if result is not None:
                        result.run, result.sample = output.run, row.sample
                        row.buffer.add(row.number, result)
                        report.add_row(row.buffer.source_name, row.number, result)
                    if row.buffer.complete:
                        backlog.close(row.buffer)
                        yield row.buffer
            engine.check_integrity()
    finally:
        if engine is not None:
            engine.close()


class Backlog:
    """Rows to complete in the order they are read, and how much of what was read is not yet committed."""

    def __init__(self, output: Output, numbers: np.ndarray, progress: Progress) -> None:
        self.rows = 0
        self.bytes = 0
        self.job = output.job
        self._output = output
        self._numbers = numbers
        self._progress = progress

    @property
    def full(self) -> bool:
        return self.rows >= OPEN_ROWS or self.bytes >= OPEN_BYTES

    def __iter__(self) -> Generator[Row, None, None]:
        with closing(prefetch(self._read(), BATCHES_AHEAD)) as items:
            for buffer, first, batch, rows in items:
                buffer.add_batch(first, batch)
                results = batch.num_rows * buffer.chunk.samples
                self.rows += results
                self.bytes += batch.nbytes
                self._progress.restored(results - len(rows))
                yield from rows
                if not rows and buffer.complete:
                    yield Row(buffer, first, None)

    def close(self, buffer: ChunkBuffer) -> None:
        """The chunk is complete and leaves the backlog."""
        self.rows -= buffer.chunk.results
        self.bytes -= sum(batch.nbytes for batch in buffer.batches)

    def _read(self) -> Iterator[tuple[ChunkBuffer, int, pa.RecordBatch, list[Row]]]:
        """Batches with the rows in them that have no result yet, the samples of a row side by side."""
        output, kept = self._output, self._output.schema.carried
        prompts = output.job.prompts
        buffer: ChunkBuffer | None = None
        for chunk, first, batch in output.job.read(self._numbers, list(dict.fromkeys([*kept, *prompts.columns]))):
            if buffer is None or buffer.chunk != chunk:
                buffer = output.buffer(chunk)
            places = buffer.without_result(first, first + batch.num_rows)
            numbers = list(dict.fromkeys(number for number, _ in places))
            left = batch
            if len(numbers) < batch.num_rows:
                left = batch.take(pa.array([number - first for number in numbers], pa.int64()))
            built = dict(zip(numbers, prompts.build(left), strict=True))
            rows = [Row(buffer, number, built[number], sample) for number, sample in places]
            yield buffer, first, batch.select(kept), rows


def complete(
    engine: Engine | EnginePool, backlog: Backlog, report: Report, drain: Drain, watchdog: Watchdog
) -> Iterator[tuple[Row, RowResult | None]]:
    """Every row of the backlog with its result, in the order they finish; fewer if the run is asked to stop."""
    flight = Flight(backlog.job.task, backlog.job.config.run.dedup)
    with closing(iter(backlog)) as rows:
        more = True
        while more or engine.has_work():
            if drain.requested:
                if more:
                    engine.drop_waiting()
                    report.draining()
                more = False
                if drain.expired:
                    return
            room = engine.room if more and not (backlog.full and engine.has_work()) else 0
            for _ in range(TURN_ROWS if room else 0):
                row = next(rows, None)
                if row is None:
                    more = False
                    break
                what = flight.board(row)
                if isinstance(what, list):
                    for request in what:
                        engine.add(request)
                    room -= len(what)
                elif what is not None or row.prompt is None:
                    yield row, what
                    # Rows that take the result of another are free; others count, those too that cannot be sent.
                    room -= what is not None and not what.deduplicated
                if room <= 0:
                    break
            if engine.has_work():
                for completion in engine.step():
                    for row, what in flight.land(completion):
                        if isinstance(what, RowResult):
                            yield row, what
                        else:  # its next prompt takes the place of the last one, whatever the room
                            for request in what:
                                engine.add(request)
            steps = engine.take_steps()
            for step in steps:
                report.add_step(step)
            if steps or not engine.has_work():
                watchdog.beat()
            report.check(len(flight))

"""The whole job on one screen: plan, rows, prompts, engine, outputs, commit."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import pyarrow as pa

from batchrun.config import Config
from batchrun.data.outputs import OutputSchema, RowResult
from batchrun.data.plan import Chunk
from batchrun.data.prompts import Prompt
from batchrun.data.store import ChunkBuffer
from batchrun.engine.engine import Engine, row_seed
from batchrun.engine.llm import load_engine
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.job import Job, open_job
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
    job = open_job(config, weights=True)
    store, schema = job.open_store()
    own = list(job.own_chunks())
    todo = [chunk for chunk in own if not store.finished(chunk, job.source.files[chunk.file].name)]
    rows, left = (sum(chunk.rows for chunk in chunks) for chunks in (own, todo))
    with (
        Metrics(config, store.state_folder) as metrics,
        Progress(rows, rows - left, config.report.interval) as progress,
    ):
        for buffer in finished_chunks(job, schema, todo, metrics, progress):
            store.commit(buffer.chunk, schema.table(buffer.batches, buffer.chunk, buffer.source_name, buffer.results))
    print_summary(store.folder, schema, own, left, metrics)
    return 0


def finished_chunks(
    job: Job, schema: OutputSchema, todo: Sequence[Chunk], metrics: Metrics, progress: Progress
) -> Iterator[ChunkBuffer]:
    """Each chunk of `todo` as soon as its last row is there. Rows of several chunks run together."""
    yield from (ChunkBuffer(chunk, job.source.files[chunk.file].name) for chunk in todo if not chunk.rows)
    todo = [chunk for chunk in todo if chunk.rows]
    if not todo:
        return
    engine = load_engine(job.checkpoint, job.tokenizer, job.config.engine)
    progress.start()
    backlog = Backlog(job, schema, todo)
    for row, result in complete(engine, backlog, job.config, metrics):
        row.buffer.add(row.number, result)
        metrics.add_row(row.buffer.source_name, row.number, result)
        progress.update(result)
        if row.buffer.complete:
            backlog.close(row.buffer)
            yield row.buffer
    engine.pool.check_integrity()


@dataclass(slots=True)
class Row:
    """One input row on its way; `number` counts within its file."""

    buffer: ChunkBuffer
    number: int
    prompt: Prompt


class Backlog:
    """Rows in the order they are read, and how much of what was read is not yet committed."""

    def __init__(self, job: Job, schema: OutputSchema, todo: Sequence[Chunk]) -> None:
        self.rows = 0
        self.bytes = 0
        self._job = job
        self._kept = schema.kept
        self._todo = todo

    @property
    def full(self) -> bool:
        return self.rows >= OPEN_ROWS or self.bytes >= OPEN_BYTES

    def __iter__(self) -> Iterator[Row]:
        buffer: ChunkBuffer | None = None
        for chunk, first, batch, prompts in prefetch(self._read(), BATCHES_AHEAD):
            if buffer is None or buffer.chunk != chunk:
                buffer = ChunkBuffer(chunk, self._job.source.files[chunk.file].name)
            buffer.add_batch(first, batch)
            self.rows += batch.num_rows
            self.bytes += batch.nbytes
            for i in range(len(prompts)):
                yield Row(buffer, first + i, prompts[i])

    def close(self, buffer: ChunkBuffer) -> None:
        """The chunk is complete and leaves the backlog."""
        self.rows -= buffer.chunk.rows
        self.bytes -= sum(batch.nbytes for batch in buffer.batches)

    def _read(self) -> Iterator[tuple[Chunk, int, pa.RecordBatch, list[Prompt]]]:
        job = self._job
        columns = list(dict.fromkeys([*self._kept, *job.prompts.columns]))
        for chunk, first, batch in job.read(self._todo, columns):
            yield chunk, first, batch.select(self._kept), job.prompts.build(batch)


def complete(engine: Engine, backlog: Backlog, config: Config, metrics: Metrics) -> Iterator[tuple[Row, RowResult]]:
    """Every row of the backlog with its result, in the order they finish."""
    rows, keys = iter(backlog), count()
    flying: dict[Hashable, Row] = {}
    more = True
    while more or engine.has_work():
        while more and engine.room > 0 and not (backlog.full and engine.has_work()):
            row = next(rows, None)
            if row is None:
                more = False
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

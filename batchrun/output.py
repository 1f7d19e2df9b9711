"""The output folder of a job, claimed for a run: its manifest, store, ledger and journal."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchrun.data.batch_output import write_batch_output
from batchrun.data.buffer import ChunkBuffer
from batchrun.data.claim import Claim
from batchrun.data.journal import Journal
from batchrun.data.ledger import Ledger
from batchrun.data.manifest import build_manifest, check_manifest, read_manifest, write_manifest
from batchrun.data.outputs import OutputSchema
from batchrun.data.plan import Chunk
from batchrun.data.store import Store
from batchrun.engine.model import choose_device
from batchrun.job import Job, versions
from batchrun.ticker import Ticker
from batchrun.watchdog import Watchdog

PLANNING_S = 5.0  # how long footers may hold up the start; the rest are read while the engine works


@dataclass(slots=True)
class Output:
    """What one run needs to put its rows in their place. `run` names the run."""

    job: Job
    run: str
    claim: Claim
    store: Store
    schema: OutputSchema
    ledger: Ledger
    journal: Journal
    flusher: Ticker

    def buffer(self, chunk: Chunk) -> ChunkBuffer:
        """A chunk with the results that earlier runs have journalled. Those that come in are journalled too."""
        name = self.job.source.files[chunk.file].name
        buffer = ChunkBuffer(chunk, name, self.journal.restore(chunk, name))
        self.journal.watch(buffer)
        return buffer

    def check(self) -> None:
        """Raise BatchrunError if the journal could not be written."""
        self.flusher.check()

    def commit(self, buffer: ChunkBuffer) -> None:
        """Put the part of a complete chunk in place."""
        chunk = buffer.chunk
        self.store.commit(chunk, self.schema.table(buffer.batches, chunk, buffer.source_name, buffer.results))
        self.ledger.note(chunk)
        self.journal.close(chunk)

    def watchdog(self) -> Watchdog:
        """Ends the process when the engine makes no step, after saving what is finished."""
        report = self.store.state_folder / f"stalled-{self.run}.txt"
        return Watchdog(self.job.config.run.stall_seconds, report, self.journal.flush)

    def todo(self) -> Iterator[np.ndarray]:
        """Chunks to do: those without a part, then those whose part is broken."""
        early = self.ledger.broken(timeout=PLANNING_S)
        yield self.ledger.missing if early is None else np.union1d(self.ledger.missing, early)
        if early is None and (late := self.ledger.broken()) is not None:
            yield late

    def check_complete(self) -> None:
        """Raise BatchrunError unless every chunk of this worker's share has its part."""
        self.ledger.check_complete(self.ledger.own)
        self.journal.discard(stem for stem in self.journal.stems() if self.ledger.owns(f"{stem}.parquet"))
        if self.job.config.input.format == "openai":
            parts = [chunk.part for chunk in self.job.plan.chunks()]
            write_batch_output(self.store.folder, parts, self.job.checkpoint.name, self.schema.names)


@contextmanager
def open_output(job: Job) -> Iterator[Output]:
    """The output folder, claimed for this job by its manifest. On leaving, the journal is brought to the disk.

    Raises FingerprintMismatch if the folder belongs to a job with other settings or input, touching nothing;
    InputError for output columns that cannot be.
    """
    config, launch = job.config, job.config.launch
    folder = job.output_folder()
    manifest, run = make_manifest(job), new_run_id()
    schema = OutputSchema(config.output, job.source.schema, manifest["fingerprint"], job.source.numbered)
    if (old := read_manifest(folder)) is not None:
        check_manifest(old, manifest)
    store = Store(folder, manifest["fingerprint"], config.output.compression)
    claim = Claim(store.state_folder, launch.index, launch.count, manifest["fingerprint"], run)
    with claim.held():
        store.sweep()
        if not write_manifest(folder, manifest):
            check_manifest(read_manifest(folder) or {}, manifest)
        journal = Journal(folder, manifest["fingerprint"], run)
        ledger = Ledger(store, job.plan, job.plan.share(launch.index, launch.count))
        flusher = Ticker("journal", config.output.journal_seconds, journal.flush)
        try:
            with ledger.checking(), flusher:
                yield Output(job, run, claim, store, schema, ledger, journal, flusher)
        finally:
            journal.flush()


def make_manifest(job: Job) -> dict[str, Any]:
    """What a later run compares itself with, and what anyone may want to know of how the output was made."""
    return build_manifest(
        job.settings(),
        job.source.files,
        plan={"rows": job.plan.rows, "chunks": job.plan.num_chunks, "chunk_rows": job.plan.chunk_rows},
        config=dataclasses.asdict(job.config),
        versions=versions(),
        device=str(choose_device(job.config.model.device)),
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def new_run_id() -> str:
    """A name for a run that sorts by time and that no other run has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"

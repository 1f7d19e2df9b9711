"""The output folder of a job, claimed for a run: its manifest, store, ledger and journal."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchrun.config import Config
from batchrun.data.batch_output import write_batch_output
from batchrun.data.buffer import ChunkBuffer
from batchrun.data.claim import Claim
from batchrun.data.journal import Journal
from batchrun.data.ledger import Ledger
from batchrun.data.manifest import build_manifest, changed_settings, check_manifest, read_manifest, write_manifest
from batchrun.data.outputs import OutputSchema
from batchrun.data.overwrite import remove_output
from batchrun.data.parsing import Parser
from batchrun.data.plan import STATE_FOLDER, Chunk
from batchrun.data.reparse import check_parsing
from batchrun.data.retry import MAY_DIFFER, Retry
from batchrun.data.runs import Runs, new_run_id
from batchrun.data.store import Store
from batchrun.data.token_bytes import TokenBytes
from batchrun.engine.model import choose_device
from batchrun.errors import ConfigError
from batchrun.job import Job, versions
from batchrun.ticker import Ticker
from batchrun.watchdog import Watchdog

PLANNING_S = 5.0  # how long footers may hold up the start; the rest are read while the engine works

logger = logging.getLogger(__name__)


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
    runs: Runs
    record: dict[str, Any]  # of this run, written once there is something to do
    retry: Retry | None = None

    def buffer(self, chunk: Chunk) -> ChunkBuffer:
        """A chunk with the results that earlier runs have left. Those that come in are journalled."""
        name = self.job.source.files[chunk.file].name
        kept = {} if self.retry is None else self.retry.keep(chunk)
        buffer = ChunkBuffer(chunk, name, kept | self.journal.restore(chunk, name))
        self.journal.watch(buffer)
        return buffer

    def check(self) -> None:
        """Raise BatchrunError if the journal could not be written."""
        self.flusher.check()

    def commit(self, buffer: ChunkBuffer) -> pa.Table:
        """Put the part of a complete chunk in place, and return it."""
        chunk = buffer.chunk
        table = self.schema.table(buffer.batches, chunk, buffer.source_name, buffer.results)
        self.store.commit(chunk, table if self.retry is None else self.retry.mark(chunk, table))
        self.ledger.note(chunk)
        self.journal.close(chunk)
        return table

    def watchdog(self) -> Watchdog:
        """Ends the process when the engine makes no step, after saving what is finished."""
        report = self.store.state_folder / f"stalled-{self.run}.txt"
        return Watchdog(self.job.config.run.stall_seconds, report, self.journal.flush)

    def todo(self) -> Iterator[np.ndarray]:
        """Chunks to do, if any: those without a part, then those whose part is broken. In a retry: those with rows
        to make again."""
        for numbers in self._todo():
            if len(numbers):
                self.runs.begin(self.run, self.record)
                yield numbers

    def _todo(self) -> Iterator[np.ndarray]:
        if self.retry is not None:
            self.ledger.broken()
            found = [int(self.job.plan.first[file]) + index for file, index in self.retry.found]
            yield np.array(sorted(found), dtype=np.int64)
            return
        early = self.ledger.broken(timeout=PLANNING_S)
        yield self.ledger.missing if early is None else np.union1d(self.ledger.missing, early)
        if early is None and (late := self.ledger.broken()) is not None:
            yield late

    def check_complete(self) -> np.ndarray:
        """The finished chunks of this worker's share: all of them, save that a retry leaves the unfinished.

        Raises BatchrunError for a part that is gone or broken.
        """
        done = self.ledger.own
        if self.retry is not None:
            broken = self.ledger.broken()
            left = np.union1d(self.ledger.missing, self.ledger.missing if broken is None else broken)
            done = np.setdiff1d(done, left)
            if len(left):
                logger.warning("%s chunks are not finished: the same job without retry makes them", f"{len(left):,}")
        self.ledger.check_complete(done)
        self.journal.discard(stem for stem in self.journal.stems() if self.ledger.owns(f"{stem}.parquet"))
        self.runs.end(self.run)
        if self.job.config.input.format == "openai":
            parts = [chunk.part for chunk in self.job.plan.chunks()]
            tokens = TokenBytes(self.job.tokenizer)
            name, samples = self.job.checkpoint.name, self.job.plan.samples
            write_batch_output(self.store.folder, parts, name, self.schema.names, samples, tokens)
        return done


@contextmanager
def open_output(job: Job) -> Iterator[Output]:
    """The output folder, claimed for this job by its manifest. On leaving, the journal is brought to the disk.

    Raises FingerprintMismatch if the folder belongs to a job with other settings or input, touching nothing;
    InputError for output columns that cannot be; OutputInUse while another process works on the same share.
    """
    config, launch = job.config, job.config.launch
    folder = job.output_folder()
    manifest = make_manifest(job)
    # The parts of a retry keep the fingerprint of the job that made them.
    whole = _check_belongs(folder, manifest, config)
    schema = OutputSchema(
        config.output,
        job.source.schema,
        whole,
        job.source.numbered,
        job.task.columns,
        config.sampling.n,
        job.task.more_columns,
    )
    runs, record = Runs(folder), _record(job, folder, manifest)
    run = (config.retry and runs.unfinished(record)) or new_run_id()
    claim = Claim(folder / STATE_FOLDER, launch.index, launch.count, manifest["fingerprint"], run)
    with claim.held():
        _take(folder, manifest, config, claim)
        check_parsing(folder, read_manifest(folder) or manifest, schema.parser)
        store = Store(folder, whole, config.output.compression)
        store.sweep()
        retry = Retry(folder, schema, config.retry, run) if config.retry else None
        journal = Journal(folder, manifest["fingerprint"] + (f" {run}" if retry else ""), run)
        ledger = Ledger(store, job.plan, job.plan.share(launch.index, launch.count))
        flusher = Ticker("journal", config.output.journal_seconds, journal.flush)
        try:
            with ledger.checking(retry.look if retry else None), flusher:
                yield Output(job, run, claim, store, schema, ledger, journal, flusher, runs, record, retry)
        finally:
            journal.flush()


def _check_belongs(folder: Path, manifest: dict[str, Any], config: Config) -> str:
    """The fingerprint of the parts. Raises unless the folder is free, or this job's, or may be overwritten."""
    old = read_manifest(folder)
    if old is None and config.retry:
        raise ConfigError(f"retry={','.join(config.retry)}: there is no output in {folder} to make rows of again")
    if old is not None and not config.output.overwrite:
        check_manifest(old, manifest, MAY_DIFFER if config.retry else ())
    return str((old if old is not None and config.retry else manifest)["fingerprint"])


def _take(folder: Path, manifest: dict[str, Any], config: Config, claim: Claim) -> None:
    """Make the folder this job's, now that no other process can."""
    with claim.alone():
        old = read_manifest(folder)
        if old is not None and old.get("fingerprint") != manifest["fingerprint"] and config.output.overwrite:
            remove_output(folder, old)
    if not write_manifest(folder, manifest):
        check_manifest(read_manifest(folder) or {}, manifest, MAY_DIFFER if config.retry else ())


def _record(job: Job, folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """What tells this run from others: the same work with the same settings has the same record."""
    launch = job.config.launch
    old = (read_manifest(folder) if job.config.retry else None) or manifest
    return {
        "retry": job.config.retry,
        "worker": f"{launch.index}-of-{launch.count}",
        "fingerprint": manifest["fingerprint"],
        "changed": changed_settings(old["settings"], manifest["settings"]),
        "versions": manifest["versions"],
        "device": manifest["device"],
    }


def make_manifest(job: Job) -> dict[str, Any]:
    """What a later run compares itself with, and what anyone may want to know of how the output was made."""
    return build_manifest(
        job.settings(),
        job.source.files,
        plan={"rows": job.plan.rows, "chunks": job.plan.num_chunks, "chunk_rows": job.plan.chunk_rows},
        config=_shown(job.config),
        parsing=Parser(job.config.output).settings,
        versions=versions(),
        device=str(choose_device(job.config.model.device)),
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def _shown(config: Config) -> dict[str, Any]:
    """The whole config, without what may be secret."""
    shown = dataclasses.asdict(config)
    shown["input"]["storage_options"] = sorted(config.input.storage_options)
    return shown

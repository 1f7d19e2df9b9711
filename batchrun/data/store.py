"""Chunks under way, and finished parts: written whole, checked, renamed into place. A part is its own done mark."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.outputs import RowResult, footer
from batchrun.data.plan import STATE_FOLDER, Chunk
from batchrun.errors import BatchrunError, FingerprintMismatch

GROUP_ROWS = 100_000
GROUP_BYTES = 64 << 20
FOREIGN_TEMP_AGE_S = 24 * 3600.0

logger = logging.getLogger(__name__)


def fault(name: str) -> None:
    """A named point where crash tests kill the process: the one that BATCHRUN_FAULT names."""
    if os.environ.get("BATCHRUN_FAULT") == name:
        os.kill(os.getpid(), signal.SIGKILL)


class ChunkBuffer:
    """A chunk under way: results arrive in any order and leave in input order.

    Rows are numbered within the input file, as in the chunk's bounds.

    Raises ValueError for a row outside the chunk, or one that comes twice.
    """

    def __init__(self, chunk: Chunk, source_name: str) -> None:
        self.chunk = chunk
        self.source_name = source_name
        self._batches: dict[int, pa.RecordBatch] = {}
        self._results: list[RowResult | None] = [None] * chunk.rows
        self._rows_left = chunk.rows
        self._results_left = chunk.rows

    def add_batch(self, first_row: int, batch: pa.RecordBatch) -> None:
        """Input rows from `first_row` on."""
        stop = first_row + batch.num_rows
        if first_row < self.chunk.start or stop > self.chunk.stop:
            raise ValueError(f"rows {first_row} to {stop} are not all in {self.chunk}")
        if any(first_row < at + other.num_rows and at < stop for at, other in self._batches.items()):
            raise ValueError(f"rows {first_row} to {stop} of {self.chunk} are here already")
        if batch.num_rows:
            self._batches[first_row] = batch
        self._rows_left -= batch.num_rows

    def add(self, row: int, result: RowResult) -> None:
        """The result of one row."""
        if not self.chunk.start <= row < self.chunk.stop:
            raise ValueError(f"row {row} is not in {self.chunk}")
        if self._results[row - self.chunk.start] is not None:
            raise ValueError(f"row {row} of {self.chunk} has a result already")
        self._results[row - self.chunk.start] = result
        self._results_left -= 1

    @property
    def complete(self) -> bool:
        """Whether all input rows and all results are here."""
        return self._rows_left == 0 and self._results_left == 0

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """Input rows in order."""
        return [self._batches[first] for first in sorted(self._batches)]

    @property
    def results(self) -> Sequence[RowResult]:
        """Results in row order. Raises ValueError while any is missing."""
        results = [result for result in self._results if result is not None]
        if len(results) < self.chunk.rows:
            raise ValueError(f"{self._results_left} rows of {self.chunk} have no result yet")
        return results


class Store:
    """The output folder of one job, shared by all its workers.

    Creates the folder and removes temporary files that dead processes left. Raises BatchrunError where the file
    system refuses, naming the path and what to do.
    """

    def __init__(self, folder: str | os.PathLike[str], fingerprint: str, compression: str = "zstd") -> None:
        self.folder = Path(folder)
        self.state_folder = self.folder / STATE_FOLDER
        self.fingerprint = fingerprint
        self.compression = compression
        with _explained(self.folder):
            self.state_folder.mkdir(parents=True, exist_ok=True)
            _remove_stale(self.folder)

    def finished(self, chunk: Chunk, source_name: str) -> bool:
        """Whether the chunk's part is in place and whole. A broken one is reported, and will be made again.

        Raises FingerprintMismatch for a part of another job, or a file of that name that no job made.
        """
        path = self.folder / chunk.part
        try:
            metadata = pq.read_metadata(path)
        except FileNotFoundError:
            return False
        except PermissionError as error:
            raise BatchrunError(f"cannot read {path}: {error}: check its permissions") from error
        except (OSError, pa.ArrowException) as error:
            logger.warning("%s is broken and will be made again: %s", path, error)
            return False
        found = metadata.metadata or {}
        expected = footer(self.fingerprint, chunk, source_name)
        if found.get(b"batchrun.fingerprint") != expected[b"batchrun.fingerprint"]:
            raise FingerprintMismatch(
                f"{path} was made with other settings or other input, or not by batchrun: "
                "use another output.path, or remove the file"
            )
        if metadata.num_rows != chunk.rows or not _same_rows(found, expected):
            logger.warning("%s does not hold %s of %s and will be made again", path, chunk, source_name)
            return False
        return True

    def commit(self, chunk: Chunk, table: pa.Table) -> Path:
        """Publish the chunk's part, whole or not at all, and return its path.

        Raises BatchrunError if it cannot be written, or reads back as something else.
        """
        target = self.folder / chunk.part
        temporary = self.folder / f".{chunk.part}.{_owner()}-{uuid.uuid4().hex}.tmp"
        with _explained(target):
            try:
                fault("before_write")
                _write(table, temporary, self.compression)
                fault("after_write")
                _verify(table, chunk, temporary)
                fault("after_verify")
                _sync(temporary)
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            fault("after_rename")
            _sync(self.folder)
        return target


def _same_rows(found: dict[bytes, bytes], expected: dict[bytes, bytes]) -> bool:
    return all(found.get(key) == expected[key] for key in (b"batchrun.chunk", b"batchrun.source"))


def _write(table: pa.Table, path: Path, compression: str) -> None:
    """Row groups are bounded in rows and bytes: a reader that takes one whole must be able to hold it."""
    row_bytes = table.nbytes / max(1, table.num_rows)
    group_rows = max(1, min(GROUP_ROWS, int(GROUP_BYTES / max(1.0, row_bytes))))
    pq.write_table(table, path, row_group_size=group_rows, compression=compression, write_page_checksum=True)


def _verify(table: pa.Table, chunk: Chunk, path: Path) -> None:
    with pq.ParquetFile(path) as file:
        rows, schema = file.metadata.num_rows, file.schema_arrow
    same_footer = all((schema.metadata or {}).get(key) == value for key, value in (table.schema.metadata or {}).items())
    if rows != chunk.rows or not schema.equals(table.schema) or not same_footer:
        raise BatchrunError(
            f"{path.name} was written but reads back differently ({rows} of {chunk.rows} rows): "
            "check the disk that holds output.path"
        )


def _sync(path: Path) -> None:
    """fsync of a file or a folder: after it, a power cut does not undo what was written or renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _owner() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _remove_stale(folder: Path) -> None:
    """Remove temporary files whose process is gone: on this host by its id, on another one by a day's age."""
    for path in folder.glob(".part-*.tmp"):
        owner, _, _ = path.name.removesuffix(".tmp").partition(".parquet.")[2].rpartition("-")
        host, _, pid = owner.rpartition("-")
        try:
            if host == socket.gethostname():
                stale = not pid.isdigit() or int(pid) == os.getpid() or not _alive(int(pid))
            else:
                stale = time.time() - path.stat().st_mtime > FOREIGN_TEMP_AGE_S
            if stale:
                path.unlink()
        except FileNotFoundError:
            continue


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a message with a remedy."""
    try:
        yield
    except OSError as error:
        remedies = {
            errno.ENOSPC: "free some space",
            errno.EDQUOT: "free some of the quota",
            errno.EACCES: "check its permissions, or use another output.path",
            errno.EPERM: "check its permissions, or use another output.path",
            errno.EROFS: "use an output.path that can be written",
            errno.EEXIST: "a file is in the way: use another output.path",
            errno.ENOTDIR: "a file is in the way: use another output.path",
        }
        remedy = remedies.get(error.errno or 0, "check the disk that holds output.path")
        raise BatchrunError(
            f"cannot write {path}: {error}: {remedy}. Finished parts are kept, and the same command goes on from them"
        ) from error

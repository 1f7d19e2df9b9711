"""Finished parts: written whole, checked, renamed into place. A part is its own done mark."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.disk import explained, is_temporary, remove_stale, sync, temporary
from batchrun.data.outputs import footer
from batchrun.data.plan import STATE_FOLDER, Chunk
from batchrun.errors import BatchrunError, ConfigError, FingerprintMismatch
from batchrun.faults import fault

GROUP_ROWS = 100_000
GROUP_BYTES = 64 << 20

logger = logging.getLogger(__name__)


class Store:
    """The output folder of one job, shared by all its workers.

    Creates the folder. Raises BatchrunError where the file system refuses, naming the path and what to do.
    """

    def __init__(self, folder: str | os.PathLike[str], fingerprint: str, compression: str = "zstd") -> None:
        self.folder = Path(folder)
        self.state_folder = self.folder / STATE_FOLDER
        self.fingerprint = fingerprint
        self.compression = compression
        with explained(self.folder):
            self.state_folder.mkdir(parents=True, exist_ok=True)

    def entries(self) -> Iterator[os.DirEntry[str]]:
        """Every file of the folder that is named like a part, in one listing.

        Removes temporary files that dead processes left: on this host by their id, on another by a day's age.
        """
        with explained(self.folder), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith("part-"):
                    yield entry
                elif is_temporary(entry.name):
                    remove_stale(Path(entry.path))

    def sweep(self) -> None:
        """Remove temporary files that dead processes left among the job's own records."""
        for folder in (self.state_folder, self.state_folder / "heartbeat", self.state_folder / "runs"):
            with explained(folder):
                for path in folder.glob(".*") if folder.is_dir() else ():
                    if is_temporary(path.name):
                        remove_stale(path)

    def finished(self, chunk: Chunk, source_name: str) -> bool:
        """Whether the chunk's part is in place and whole. A broken one is reported, and will be made again.

        Raises FingerprintMismatch for a part of another job, or a file of that name that no job made.
        """
        path = self.folder / chunk.part
        try:
            metadata = own_footer(path, self.fingerprint)
        except FileNotFoundError:
            return False
        except PermissionError as error:
            raise BatchrunError(f"cannot read {path}: {error}: check its permissions") from error
        except (OSError, pa.ArrowException) as error:
            logger.warning("%s is broken and will be made again: %s", path, error)
            return False
        found = metadata.metadata or {}
        expected = footer(self.fingerprint, chunk, source_name)
        if metadata.num_rows != chunk.results or not _same_rows(found, expected):
            logger.warning("%s does not hold %s of %s and will be made again", path, chunk, source_name)
            return False
        return True

    def commit(self, chunk: Chunk, table: pa.Table) -> Path:
        """Publish the chunk's part, whole or not at all, and return its path.

        Raises BatchrunError if it cannot be written, or reads back as something else.
        """
        target = self.folder / chunk.part
        written = temporary(target)
        with explained(target):
            try:
                fault("before_write")
                _write(table, written, self.compression)
                fault("after_write")
                _verify(table, chunk, written)
                fault("after_verify")
                sync(written)
                os.replace(written, target)
            except BaseException:
                written.unlink(missing_ok=True)
                raise
            fault("after_rename")
            sync(self.folder)
        return target


def own_footer(path: Path, fingerprint: str) -> pq.FileMetaData:
    """The footer of a part of the job with this fingerprint.

    Raises FingerprintMismatch for a part of another job, or a file of that name that no job made; OSError or
    ArrowException for one that cannot be read.
    """
    metadata = pq.read_metadata(path)
    if (metadata.metadata or {}).get(b"batchrun.fingerprint") != fingerprint.encode():
        raise FingerprintMismatch(
            f"{path} was made with other settings or other input, or not by batchrun: "
            "use another output.path, or remove the file"
        )
    return metadata


def check_parts(paths: Iterable[Path], fingerprint: str) -> None:
    """Raise FingerprintMismatch for a file that is no part of the job, ConfigError for a part that is broken."""
    for path in paths:
        try:
            own_footer(path, fingerprint)
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"{path} is broken: {error}: run the job again, which makes it anew") from error


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
    if rows != chunk.results or not schema.equals(table.schema) or not same_footer:
        raise BatchrunError(
            f"{path.name} was written but reads back differently ({rows} of {chunk.results} rows): "
            "check the disk that holds output.path"
        )

"""The parts of a finished job as fewer, larger files, in another folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.derived import normalised
from batchrun.data.disk import explained, is_temporary, remove_stale, sync, temporary
from batchrun.data.manifest import plan_of, read_manifest
from batchrun.data.store import GROUP_BYTES, GROUP_ROWS, check_parts
from batchrun.errors import ConfigError
from batchrun.faults import fault

MIB = 2**20
SHOWN_PARTS = 3
# What a footer says of one part only.
OF_A_PART = (b"batchrun.chunk", b"batchrun.source", b"batchrun.counts", b"batchrun.retried")


class Merged(NamedTuple):
    """What a merge came to: how many parts became how many files, and the rows that were left out."""

    parts: int
    files: int
    left_out: int


class Unique:
    """Lets the first of equal texts pass, and remembers 16 bytes of each. Rows without a text all pass."""

    def __init__(self, column: str) -> None:
        self.column = column
        self.left_out = 0
        self._seen: set[bytes] = set()

    def __call__(self, table: pa.Table) -> pa.Table:
        new = [text is None or self._is_new(text) for text in table[self.column].to_pylist()]
        self.left_out += len(new) - sum(new)
        return table.filter(pa.array(new, pa.bool_()))

    def _is_new(self, text: str) -> bool:
        digest = hashlib.blake2b(normalised(text).encode(), digest_size=16).digest()
        known = len(self._seen)
        self._seen.add(digest)
        return len(self._seen) > known


def merge_parts(folder: Path, target: Path, mib: int, compression: str, unique: bool = False) -> Merged:
    """Write the parts of `folder`, which stays as it is, to files of about `mib` MiB in the new folder `target`.

    Rows keep their order, and files their schema with its metadata. With `unique`, rows whose completion equals that of
    one before them are left out. `target` appears whole or not at all. Raises ConfigError if the job is not finished or
    `target` is there already, FingerprintMismatch for a file among the parts that is none, BatchrunError if the disk
    refuses.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder} is not the output of a job: it has no manifest")
    parts = _parts(folder, manifest)
    settings = manifest["settings"]
    keep = Unique(settings["output.prefix"] + settings["output.completion"]) if unique else None
    if keep is not None and keep.column not in pq.read_schema(parts[0]).names:
        raise ConfigError(f"output.merge_unique compares completions, and {folder} has no column {keep.column}")
    if target.exists() or target.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"output.merge_path={target} is there already, or lies in the output: name a new folder")
    with explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for path in target.parent.glob(f".{target.name}.*"):
            if is_temporary(path.name):
                remove_stale(path)
        written = temporary(target)
        written.mkdir()
        try:
            files = _write(parts, written, mib * MIB, compression, keep)
            sync(written)
            fault("merge_before_rename")
            os.rename(written, target)
            sync(target.parent)
        finally:
            shutil.rmtree(written, ignore_errors=True)
    return Merged(len(parts), files, 0 if keep is None else keep.left_out)


def _parts(folder: Path, manifest: Mapping[str, Any]) -> list[Path]:
    """Every part of the job in input order. Raises ConfigError if one is missing or broken, FingerprintMismatch if one
    is not the job's."""
    plan = plan_of(manifest)
    missing = np.setdiff1d(np.arange(plan.num_chunks), plan.present(folder))
    if len(missing):
        names = [plan.chunk(number).part for number in missing[:SHOWN_PARTS].tolist()]
        raise ConfigError(
            f"{len(missing):,} of {plan.num_chunks:,} parts are not there yet ({', '.join(names)}): finish the "
            "job first"
        )
    parts = [folder / chunk.part for chunk in plan.chunks()]
    check_parts(parts, manifest["fingerprint"])
    return parts


def _write(parts: list[Path], folder: Path, size: int, compression: str, keep: Unique | None) -> int:
    """Files of at least `size` bytes of parts, save the last one."""
    schema = _without_part(pq.read_schema(parts[0]))
    groups: list[list[Path]] = [[]]
    filled = 0
    for part in parts:
        if filled >= size:
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += part.stat().st_size
    for number, group in enumerate(groups):
        path = folder / f"part-{number:05d}.parquet"
        with pq.ParquetWriter(path, schema, compression=compression, write_page_checksum=True) as writer:
            for table in _row_groups(group, schema, keep):
                writer.write_table(table, row_group_size=len(table) or None)
        sync(path)
        fault("merge_file")
    return len(groups)


def _row_groups(parts: list[Path], schema: pa.Schema, keep: Unique | None) -> Iterator[pa.Table]:
    """The rows of the parts, in tables that make good row groups."""
    waiting: list[pa.Table] = []
    rows = bytes_ = 0
    for part in parts:
        with pq.ParquetFile(part) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group).replace_schema_metadata(schema.metadata)
                table = table if keep is None else keep(table)
                if waiting and (rows + len(table) > GROUP_ROWS or bytes_ + table.nbytes > GROUP_BYTES):
                    yield pa.concat_tables(waiting)
                    waiting, rows, bytes_ = [], 0, 0
                waiting.append(table)
                rows += len(table)
                bytes_ += table.nbytes
    if waiting:
        yield pa.concat_tables(waiting)


def _without_part(schema: pa.Schema) -> pa.Schema:
    return schema.with_metadata({key: value for key, value in (schema.metadata or {}).items() if key not in OF_A_PART})

"""The parts of a finished job as fewer, larger files, in another folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.disk import explained, is_temporary, remove_stale, sync, temporary
from batchrun.data.manifest import plan_of, read_manifest
from batchrun.data.store import GROUP_BYTES, GROUP_ROWS
from batchrun.errors import ConfigError
from batchrun.faults import fault

MIB = 2**20
SHOWN_PARTS = 3
# What a footer says of one part only.
OF_A_PART = (b"batchrun.chunk", b"batchrun.source", b"batchrun.counts", b"batchrun.retried")


def merge_parts(folder: Path, target: Path, mib: int, compression: str) -> tuple[int, int]:
    """Write the parts of `folder`, which stays as it is, to files of about `mib` MiB in the new folder `target`.

    Rows keep their order, and files their schema with its metadata. `target` appears whole or not at all. Returns the
    numbers of parts and of files. Raises ConfigError if the job is not finished or `target` is there already,
    BatchrunError if the disk refuses.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder} is not the output of a job: it has no manifest")
    parts = _parts(folder, manifest)
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
            files = _write(parts, written, mib * MIB, compression)
            sync(written)
            fault("merge_before_rename")
            os.rename(written, target)
            sync(target.parent)
        finally:
            shutil.rmtree(written, ignore_errors=True)
    return len(parts), files


def _parts(folder: Path, manifest: Mapping[str, Any]) -> list[Path]:
    """Every part of the job in input order. Raises ConfigError if one is missing."""
    plan = plan_of(manifest)
    missing = np.setdiff1d(np.arange(plan.num_chunks), plan.present(folder))
    if len(missing):
        names = [plan.chunk(number).part for number in missing[:SHOWN_PARTS].tolist()]
        raise ConfigError(
            f"{len(missing):,} of {plan.num_chunks:,} parts are not there yet ({', '.join(names)}): finish the "
            "job first"
        )
    return [folder / chunk.part for chunk in plan.chunks()]


def _write(parts: list[Path], folder: Path, size: int, compression: str) -> int:
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
            for table in _row_groups(group, schema):
                writer.write_table(table, row_group_size=len(table) or None)
        sync(path)
        fault("merge_file")
    return len(groups)


def _row_groups(parts: list[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of the parts, in tables that make good row groups."""
    waiting: list[pa.Table] = []
    rows = bytes_ = 0
    for part in parts:
        with pq.ParquetFile(part) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group).replace_schema_metadata(schema.metadata)
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

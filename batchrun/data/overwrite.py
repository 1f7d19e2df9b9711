"""Removing the output of another job: what its manifest names, and nothing else."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.disk import explained
from batchrun.data.manifest import plan_of
from batchrun.data.plan import MANIFEST, STATE_FOLDER
from batchrun.faults import fault

# Everything that a job keeps in its state folder, save the manifest, which goes last, and the locks, which are held.
RECORDS = (
    "journal",
    "heartbeat",
    "runs",
    "metrics",
    "parsing.json",
    "summary.json",
    "batch_output.jsonl",
    "report.html",
)
STALLED = "stalled-*.txt"

logger = logging.getLogger(__name__)


def remove_output(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Remove the parts and records of the job that wrote the manifest, then the manifest.

    A file that is named like a part but was made by something else stays. A removal that is cut short is taken up by
    the next one, for the manifest is there until all else is gone. Raises BatchrunError if the disk refuses.
    """
    with explained(folder):
        for path in list(_parts(folder, manifest)):
            path.unlink(missing_ok=True)
            fault("overwrite_part")
        state = folder / STATE_FOLDER
        for path in [*(state / name for name in RECORDS), *state.glob(STALLED)]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        fault("overwrite_records")
        (folder / MANIFEST).unlink(missing_ok=True)


def _parts(folder: Path, manifest: Mapping[str, Any]) -> Iterator[Path]:
    plan = plan_of(manifest)
    with os.scandir(folder) as entries:
        for entry in entries:
            if plan.number(entry.name) is None:
                continue
            if _is_foreign(Path(entry.path), manifest["fingerprint"]):
                logger.warning("%s was not made by the job that is overwritten and stays", entry.path)
            else:
                yield Path(entry.path)


def _is_foreign(path: Path, fingerprint: str) -> bool:
    """Whether a whole Parquet file is not the job's. A broken one is a part of the job that did not survive."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except (OSError, pa.ArrowException):
        return False
    return metadata.get(b"batchrun.fingerprint") != fingerprint.encode()

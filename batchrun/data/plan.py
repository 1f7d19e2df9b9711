"""Which rows make which part, and the proof that a later run would make the same ones."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchrun.data.disk import temporary
from batchrun.data.sources import InputFile
from batchrun.errors import BatchrunError, ConfigError, FingerprintMismatch, InputError
from batchrun.faults import fault

# `datasets.load_dataset` takes every file below an output folder for data, whatever its ending, save those in
# hidden folders and in folders that begin with two underscores.
STATE_FOLDER = "__batchrun"
MANIFEST = f"{STATE_FOLDER}/manifest.json"
MAX_FILES = 100_000
MAX_CHUNKS_PER_FILE = 1_000_000
PART = re.compile(r"part-(\d{5})-(\d{6})\.parquet")
SHOWN_CHARS = 60
SHOWN_LINES = 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, stop) of one input file: the unit of work and of commit. `index` counts within the file."""

    file: int
    index: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def part(self) -> str:
        """Name of the output part. Sorted names are in input order, within the limits that Plan checks."""
        return f"part-{self.file:05d}-{self.index:06d}.parquet"


class Plan:
    """All chunks of a job. Bounds follow from the files' row counts and `chunk_rows` alone, never from workers.

    Chunks are numbered from 0 in input order. Sets of them are arrays of numbers, int64 and ascending: a job may
    have millions, and a Chunk is made when its turn comes.
    A file without rows makes one chunk of none, so that its part exists and shows the schema.
    Raises InputError or ConfigError where part names would no longer sort in input order.
    """

    def __init__(self, files: Sequence[InputFile], chunk_rows: int) -> None:
        self.files = files
        self.chunk_rows = chunk_rows
        self.file_rows = np.array([file.rows for file in files], dtype=np.int64)
        counts = np.maximum(1, -(-self.file_rows // chunk_rows))
        self.first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # number of each file's first chunk
        self.rows = int(self.file_rows.sum())
        self.num_chunks = int(self.first[-1])
        if len(files) > MAX_FILES:
            raise InputError(f"input.path finds {len(files)} files, and a job takes at most {MAX_FILES}: split the job")
        for file, count in zip(files, counts.tolist(), strict=True):
            if count > MAX_CHUNKS_PER_FILE:
                enough = -(-file.rows // MAX_CHUNKS_PER_FILE)
                raise ConfigError(
                    f"output.chunk_rows={chunk_rows} cuts {file.name} into {count} parts, and a file makes "
                    f"at most {MAX_CHUNKS_PER_FILE}: use output.chunk_rows={enough} or more"
                )

    def chunk(self, number: int) -> Chunk:
        """The chunk of a number."""
        file = int(np.searchsorted(self.first, number, side="right")) - 1
        index = int(number - self.first[file])
        start = index * self.chunk_rows
        return Chunk(file, index, start, min(start + self.chunk_rows, int(self.file_rows[file])))

    def number(self, part: str) -> int | None:
        """The number of the chunk that makes a part of this name, or None if no chunk does."""
        found = PART.fullmatch(part)
        if found is None or int(found[1]) >= len(self.file_rows):
            return None
        number = int(self.first[int(found[1])]) + int(found[2])
        return number if number < self.first[int(found[1]) + 1] else None

    def share(self, index: int, count: int) -> np.ndarray:
        """Chunks of worker `index` of `count`: every count-th."""
        return np.arange(index, self.num_chunks, count, dtype=np.int64)

    def bounds(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(file, first row, row after the last) of each chunk, int64 [n]."""
        file = np.searchsorted(self.first, numbers, side="right") - 1
        start = (numbers - self.first[file]) * self.chunk_rows
        return file, start, np.minimum(start + self.chunk_rows, self.file_rows[file])

    def rows_of(self, numbers: np.ndarray) -> int:
        """Rows in these chunks."""
        _, start, stop = self.bounds(numbers)
        return int((stop - start).sum())

    def chunks(self) -> Iterator[Chunk]:
        """Every chunk in input order, made as it is asked for."""
        return map(self.chunk, range(self.num_chunks))


def _canonical(value: Any) -> Any:
    """Plain JSON values in which 1.0 and 1 are one number, as they are to a reader of the diff."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _file_entries(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    return [{"name": file.name, "size": file.size, "rows": file.rows, "digest": file.digest} for file in files]


def fingerprint(settings: Mapping[str, Any], files: Sequence[InputFile]) -> str:
    """SHA-256, in hex, of the settings that change a completion and of the input's identity (not its location)."""
    identity = {"settings": _canonical(settings), "files": _file_entries(files)}
    return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def build_manifest(settings: Mapping[str, Any], files: Sequence[InputFile], **extra: Any) -> dict[str, Any]:
    """What a later run needs to compare itself with this one. `extra` is kept and never compared (versions, times)."""
    return {
        **extra,
        "fingerprint": fingerprint(settings, files),
        "settings": _canonical(settings),
        "files": _file_entries(files),
    }


def write_manifest(folder: str | os.PathLike[str], manifest: Mapping[str, Any]) -> bool:
    """Create the manifest whole or not at all. Returns False, and changes nothing, if there is one already.

    Raises BatchrunError if the folder cannot be written.
    """
    target = Path(folder, MANIFEST)
    written = temporary(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(written, "x", encoding="utf-8") as file:
                json.dump(manifest, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            fault("manifest_before_publish")
            published = _publish(written, target)
            fault("manifest_after_publish")
            return published
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        raise BatchrunError(
            f"cannot write {target}: {error}: check output.path, its permissions and the free space"
        ) from error


def _publish(written: Path, target: Path) -> bool:
    try:
        os.link(written, target)
    except FileExistsError:
        return False
    except OSError:
        # A file system without hard links: rename is still whole-or-nothing, only the race for first place is open.
        if target.exists():
            return False
        os.replace(written, target)
    return True


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest of an output folder, or None if it has none. Raises BatchrunError if it cannot be read."""
    path = Path(folder, MANIFEST)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BatchrunError(f"cannot read {path}: {error}: use another output.path, or remove that folder") from error
    if not isinstance(manifest, dict):
        raise BatchrunError(f"{path} is not a manifest of batchrun: use another output.path")
    return manifest


def check_manifest(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise FingerprintMismatch, with one line for each difference, unless both describe the same job."""
    if old.get("fingerprint") == new.get("fingerprint"):
        return
    lines = _changed_settings(old.get("settings", {}), new.get("settings", {}))
    lines += _changed_files(old.get("files", []), new.get("files", []))
    if not lines:
        lines = [f"fingerprint: {old.get('fingerprint')} -> {new.get('fingerprint')}"]
    shown = lines[:SHOWN_LINES]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    raise FingerprintMismatch(
        "the output folder belongs to a job with other settings or other input:\n  "
        + "\n  ".join(shown)
        + "\nuse another output.path, or go back to the old settings and input"
    )


def _changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key not in old or key not in new or old[key] != new[key]:
            before, after = _shown(old.get(key), new.get(key))
            lines.append(f"{key}: {before} -> {after}")
    return lines


def _shown(old: Any, new: Any) -> tuple[str, str]:
    """Both values as JSON, cut to a window that begins shortly before the first difference."""
    texts = [json.dumps(value, ensure_ascii=False, sort_keys=True) for value in (old, new)]
    pairs = enumerate(zip(*texts, strict=False))
    same = next((at for at, (before, after) in pairs if before != after), min(map(len, texts)))
    start = max(0, same - SHOWN_CHARS // 3) if max(map(len, texts)) > SHOWN_CHARS else 0

    def window(text: str) -> str:
        end = start + SHOWN_CHARS
        return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")

    return window(texts[0]), window(texts[1])


def _changed_files(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    before = {file["name"]: file for file in old}
    after = {file["name"]: file for file in new}
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            lines.append(f"input file {name}: removed")
        elif name not in before:
            lines.append(f"input file {name}: added")
        elif dict(before[name]) != dict(after[name]):
            keys = [key for key in ("size", "rows") if before[name].get(key) != after[name].get(key)]
            changes = [f"{key} {before[name].get(key)} -> {after[name].get(key)}" for key in keys]
            lines.append(f"input file {name}: changed ({', '.join(changes) or 'other content'})")
    return lines

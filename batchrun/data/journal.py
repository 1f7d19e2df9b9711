"""Results of unfinished chunks on disk, so that a kill costs the rows of the last seconds and not a chunk.

Generated columns only: the input is read again when the chunk is committed. A file holds one chunk's rows of one run:
a line that says what it belongs to, then a block of rows per line, each after its checksum. Only whole lines count,
so a file cut anywhere is good up to there.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import os
import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from batchrun.data.buffer import ChunkBuffer, Place
from batchrun.data.disk import explained, sync
from batchrun.data.outputs import RowResult
from batchrun.data.plan import STATE_FOLDER, Chunk
from batchrun.faults import fault

FIELDS = tuple(field.name for field in dataclasses.fields(RowResult))
SUFFIX = ".journal"
ARRAY = "float32:base64"  # the one key of an array of float32

logger = logging.getLogger(__name__)


class Journal:
    """The journal of one run. Buffers that are `watch`ed are written by `flush`, which any one thread may call.

    `fingerprint` tells whose rows may be taken up; `run` is unlike that of any other run, and part of the files'
    names, so that two runs never write to one file.
    """

    def __init__(self, folder: Path, fingerprint: str, run: str) -> None:
        self.folder = folder / STATE_FOLDER / "journal"
        self.fingerprint = fingerprint
        self.run = run
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files: defaultdict[str, list[Path]] = defaultdict(list)
            for entry in os.scandir(self.folder):
                self._files[entry.name.partition(".")[0]].append(self.folder / entry.name)
        self._open: dict[str, ChunkBuffer] = {}
        self._written: dict[str, int] = {}  # rows of a buffer, in their order of arrival, that are on disk
        self._closed: deque[Chunk] = deque()
        self._flushing = threading.Lock()

    def restore(self, chunk: Chunk, source_name: str) -> dict[Place, RowResult]:
        """Results that this and earlier runs left for the chunk, by row and sample."""
        found: dict[Place, RowResult] = {}
        for path in self._files.get(_stem(chunk), ()):
            found |= _read(path, _header(self.fingerprint, chunk, source_name))
        return found

    def watch(self, buffer: ChunkBuffer) -> None:
        """Write results that come into this buffer from here on, until it is closed."""
        self._written[_stem(buffer.chunk)] = buffer.num_results
        self._open[_stem(buffer.chunk)] = buffer

    def close(self, chunk: Chunk) -> None:
        """The chunk's part is in place: the next flush deletes its files, those of dead runs too."""
        self._open.pop(_stem(chunk), None)
        self._closed.append(chunk)

    def discard(self, stems: Iterable[str]) -> None:
        """Delete files of finished parts, left by a run that died between the commit and the deletion."""
        with explained(self.folder):
            for stem in stems:
                self._delete(stem)

    def stems(self) -> list[str]:
        """Parts, without suffix, for which there were files when the run began."""
        return list(self._files)

    @property
    def rows(self) -> int:
        """Rows in open chunks that have a result."""
        return sum(buffer.num_results for buffer in list(self._open.values()))

    def flush(self) -> None:
        """Bring everything that has come in to the disk. Raises BatchrunError if the disk refuses."""
        with self._flushing, explained(self.folder):
            # A chunk that is closed while its rows are written is in `_closed` by then, and deleted below or next time.
            for stem, buffer in list(self._open.items()):
                self._write(stem, buffer)
            while self._closed:
                self._delete(_stem(self._closed.popleft()))

    def _write(self, stem: str, buffer: ChunkBuffer) -> None:
        done = self._written.get(stem, 0)
        rows, results = buffer.arrived(done)
        if not rows:
            return
        path = self.folder / f"{stem}.{self.run}{SUFFIX}"
        block = _line({"rows": rows, **{name: [getattr(result, name) for result in results] for name in FIELDS}})
        fault("journal_before_write")
        with open(path, "ab") as file:
            if file.tell() == 0:
                self._files[stem].append(path)
                file.write(_line(_header(self.fingerprint, buffer.chunk, buffer.source_name)))
            file.write(block[: len(block) // 2])
            file.flush()
            fault("journal_torn")
            file.write(block[len(block) // 2 :])
            file.flush()
            fault("journal_after_write")
            os.fsync(file.fileno())
        if not done:
            sync(self.folder)
        self._written[stem] = done + len(rows)

    def _delete(self, stem: str) -> None:
        self._written.pop(stem, None)
        for path in self._files.pop(stem, ()):
            fault("journal_before_delete")
            path.unlink(missing_ok=True)


def _stem(chunk: Chunk) -> str:
    return chunk.part.partition(".")[0]


def _header(fingerprint: str, chunk: Chunk, source_name: str) -> dict[str, Any]:
    return {"fingerprint": fingerprint, "chunk": dataclasses.asdict(chunk), "source": source_name, "fields": FIELDS}


def _line(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, separators=(",", ":"), default=_array_text).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _array_text(value: Any) -> dict[str, str]:
    """An array of float32 as JSON: a third of the size of its numbers, and exact."""
    if not isinstance(value, np.ndarray) or value.dtype != np.float32:
        raise TypeError(f"a row has a value of type {type(value).__name__}, which the journal cannot hold")
    return {ARRAY: base64.b64encode(value.tobytes()).decode()}


def _array(value: dict[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(value[ARRAY]), dtype=np.float32) if value.keys() == {ARRAY} else value


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines from the beginning of the file to the first that is not."""
    try:
        with open(path, "rb") as file:
            for line in file:
                checksum, _, text = line.rstrip(b"\n").partition(b" ")
                if checksum != b"%08x" % zlib.crc32(text):
                    return
                yield json.loads(text, object_hook=_array)
    except FileNotFoundError:
        return


def _read(path: Path, expected: dict[str, Any]) -> dict[Place, RowResult]:
    lines = _lines(path)
    if next(lines, None) != json.loads(json.dumps(expected)):
        return {}
    found: dict[Place, RowResult] = {}
    for block in lines:
        columns = zip(*(block[name] for name in FIELDS), strict=True)
        for row, values in zip(block["rows"], columns, strict=True):
            result = RowResult(*values)
            found[row, result.sample] = result
    return found

"""Small helpers for tests that open an input and read rows of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchrun.config import InputConfig
from batchrun.data.formats.base import ROW_ERROR
from batchrun.data.sources import Source, open_source


def opened(path: Any, **settings: Any) -> Source:
    return open_source(InputConfig(path=path if isinstance(path, list) else str(path), **settings))


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """One line for each: text and bytes as they are, anything else as JSON; packed by the file's ending."""
    encoded = []
    for line in lines:
        if not isinstance(line, (str, bytes)):
            line = json.dumps(line)
        encoded.append(line.encode() if isinstance(line, str) else line)
    content = b"\n".join(encoded) + b"\n"
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = pa.Codec("zstd").compress(content, asbytes=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def rows_of(
    source: Source, ranges: Sequence[tuple[int, int]] | None = None, columns: Any = None
) -> list[dict[str, Any]]:
    """Rows of all files, or of ranges of the first, with "number" and, for a broken row, "why"."""
    rows = []
    for file in source.files if ranges is None else source.files[:1]:
        for first, batch in source.read(file, ranges or [(0, file.rows)], columns):
            for i, row in enumerate(batch.to_pylist()):
                why = row.pop(ROW_ERROR, None)
                rows.append({**row, "number": first + i, **({} if why is None else {"why": why})})
    return rows

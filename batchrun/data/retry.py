"""Making some rows of finished parts again: those that failed, or that were cut at their longest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrun.config import leaves
from batchrun.data.buffer import Place
from batchrun.data.disk import explained
from batchrun.data.outputs import OutputSchema, RowResult
from batchrun.data.plan import Chunk

# What a retry may change: how tokens are chosen and how many there may be. What is asked stays as it is.
MAY_DIFFER = (
    *(key for key in leaves() if key.startswith(("sampling.", "structure.")) and key != "sampling.n"),
    "reasoning.max_tokens",
    "model.max_model_len",
)
RETRIED = b"batchrun.retried"


class Retry:
    """Which rows of which parts are to be made again in run `run`. `kinds` are error, length or both.

    A part that this run has put in place already, before it was stopped, is not looked at again.
    """

    def __init__(self, folder: Path, schema: OutputSchema, kinds: Sequence[str], run: str) -> None:
        self.folder = folder
        self.schema = schema
        self.kinds = kinds
        self.run = run
        self.found: list[tuple[int, int]] = []  # file and index of chunks with such rows

    def look(self, chunk: Chunk) -> bool:
        """Note the chunk if its part has rows to make again. For a part that is known to be whole."""
        columns = [self.schema.names["status"], self.schema.names["finish_reason"]]
        path = self.folder / chunk.part
        with explained(path), pq.ParquetFile(path) as file:
            if self.run in _runs(file.schema_arrow):
                return False
            wanted = self._wanted(file.read(columns=columns))
        if pc.any(wanted).as_py():
            self.found.append((chunk.file, chunk.index))
        return False

    def keep(self, chunk: Chunk) -> dict[Place, RowResult]:
        """Results of the chunk's part that stay, by row and sample."""
        table = pq.read_table(self.folder / chunk.part)
        kept = pc.invert(self._wanted(table)).to_pylist()
        results = self.schema.results(table)
        return {
            (chunk.start + at // chunk.samples, result.sample): result for at, result in enumerate(results) if kept[at]
        }

    def mark(self, chunk: Chunk, table: pa.Table) -> pa.Table:
        """The new part, with this run in its footer beside those that were there."""
        runs = [*_runs(pq.read_schema(self.folder / chunk.part)), self.run]
        return table.replace_schema_metadata({**(table.schema.metadata or {}), RETRIED: json.dumps(runs).encode()})

    def _wanted(self, table: pa.Table) -> pa.ChunkedArray:
        status, reason = (table[self.schema.names[key]] for key in ("status", "finish_reason"))
        wanted = pa.chunked_array([pa.array([False] * len(table), pa.bool_())])
        if "error" in self.kinds:
            wanted = pc.or_(wanted, pc.equal(status, "error").combine_chunks())
        if "length" in self.kinds:
            wanted = pc.or_(wanted, pc.equal(reason, "length").combine_chunks())
        return pc.fill_null(wanted, False)


def _runs(schema: pa.Schema) -> list[str]:
    runs: list[str] = json.loads((schema.metadata or {}).get(RETRIED, b"[]"))
    return runs

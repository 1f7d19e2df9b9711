"""Decoding with Triton's kernels where nothing moves from step to step, so that a step can be recorded and replayed.

The kernels' grids are of a fixed size and read lengths, block tables and their list of work from device memory
(batchrun_kernels/decode_plan.py); here all of that lies in buffers for the most rows that there may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from batchrun.engine.attention.base import LayerGeometry
from batchrun.engine.attention.triton import LayerKind, TritonAttention, whole_columns
from batchrun.engine.batch import Batch
from batchrun.engine.fixed_inputs import Field, FixedInputs
from batchrun_kernels.decode_plan import PROGRAMS_PER_SM, DecodePlan, plan_decode
from batchrun_kernels.paged import KvPages, Rows


class _Plans(NamedTuple):
    """As TritonAttention has them; there is nothing but rows with one query."""

    short: DecodePlan
    long: None = None
    groups: None = None


class _Part(NamedTuple):
    device: Rows


@dataclass(slots=True)
class _Table:
    slot_mapping: torch.Tensor  # int64 [rows]
    short: _Part
    plans: dict[Any, _Plans]
    long: None = None
    groups: None = None


class _Work:
    """The list of work of layers that are alike, and the memory for what comes of its parts."""

    def __init__(
        self, heads: int, window: int | None, pages: KvPages, itemsize: int, most_rows: int, num_sms: int
    ) -> None:
        self._heads = heads
        self._itemsize = itemsize  # of queries
        self._window = window
        self._num_sms = num_sms
        # A plan is made on the host, from the shape of the pages.
        keys, values = (torch.empty((1, *x.shape[1:]), dtype=x.dtype) for x in (pages.keys, pages.values))
        self._shape = KvPages(keys, values)
        self._programs = num_sms * PROGRAMS_PER_SM
        _, self._parts, *size = self._make(np.ones(1, dtype=np.int64)).runs.shape
        units, device = self._units(most_rows), pages.keys.device
        fields = {"counts": (2,), "unit_sequences": (units,), "chunk_starts": (most_rows + 1,)}
        self._inputs = FixedInputs({name: Field(shape, torch.int32) for name, shape in fields.items()}, device)
        self._arrived = torch.zeros(most_rows * self._parts, dtype=torch.int32, device=device)
        self._runs = torch.empty(units, self._parts, *size, device=device)
        self._run_lse = self._runs.new_empty(self._runs.shape[:3])

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self._inputs.num_bytes + self._arrived.nbytes + self._runs.nbytes + self._run_lse.nbytes

    def fill(self, lens: np.ndarray) -> None:
        """Send the list for rows of these lengths (int64 [rows])."""
        plan, arrays = self._make(lens), self._inputs.open()
        for name, array in arrays.items():
            made: np.ndarray = getattr(plan, name).numpy()
            array[: len(made)] = made
        self._inputs.send()

    def plan(self, rows: int) -> DecodePlan:
        """Where kernels find it, for so many rows."""
        at, units = self._inputs.device, self._units(rows)
        return DecodePlan(
            counts=at["counts"],
            unit_sequences=at["unit_sequences"][:units],
            chunk_starts=at["chunk_starts"][: rows + 1],
            arrived=self._arrived[: rows * self._parts],
            runs=self._runs,
            run_lse=self._run_lse,
            programs=max(1, min(self._programs, units * self._parts)),
        )

    def _units(self, rows: int) -> int:
        """Most units of work: plan_decode cuts so that beyond one for each row there are two for each program."""
        return rows + -(-2 * self._programs // self._parts)

    def _make(self, lens: np.ndarray) -> DecodePlan:
        return plan_decode(
            lens,
            np.ones_like(lens),
            self._heads,
            self._shape,
            self._itemsize,
            num_sms=self._num_sms,
            window=self._window,
        )


class FixedDecode(TritonAttention):
    """The same pages as `attention`, for steps of at most `most_rows` rows with one query each, padded with rows that
    see nothing and write nothing. No pages are read once for several rows. `columns`: blocks of the longest row."""

    def __init__(self, attention: TritonAttention, most_rows: int, columns: int) -> None:
        vars(self).update(vars(attention))
        self.most_rows = most_rows
        tables, columns = self.layout.num_tables, whole_columns(columns)
        fields = {
            "slot_mapping": Field((tables, most_rows), torch.int64),
            "seq_lens": Field((most_rows,), torch.int32),
        }
        self._inputs = FixedInputs(fields, self.device)
        # Apart, and packed to the columns that a step has: of a long context they are most of what is sent.
        self._sent_blocks = FixedInputs({"blocks": Field((tables * most_rows * columns,), torch.int32)}, self.device)
        self._blocks = torch.zeros(tables, most_rows, columns, dtype=torch.int32, device=self.device)
        self._starts = torch.arange(most_rows, dtype=torch.int32, device=self.device)
        self._ones = torch.ones(most_rows, dtype=torch.int32, device=self.device)
        self._work: dict[Any, _Work] = {}
        self._kinds_of: list[set[Any]] = [set() for _ in range(tables)]
        self._lens = np.zeros(0, dtype=np.int64)

    @property
    def num_bytes(self) -> int:
        """On the device, with the list of work of each kind of layers that has attended."""
        held = sum(each.nbytes for each in (self._blocks, self._starts, self._ones))
        held += self._inputs.num_bytes + self._sent_blocks.num_bytes
        return held + sum(work.num_bytes for work in self._work.values())

    def prepare(self, layers: Sequence[LayerGeometry]) -> None:
        """Make the lists of work of layers whose number of query heads is known, before any of them attends."""
        for layer, pages in zip(layers, self.pages, strict=True):
            assert layer.num_heads is not None
            _, _, kv_heads, key_dim = pages.keys.shape
            kind = LayerKind(layer.window, layer.num_heads, kv_heads, key_dim, pages.values.shape[3])
            self._make_work(kind, pages)

    @torch.inference_mode()
    def fill(self, batch: Batch | None, rows: int) -> None:
        """Send what a step of the batch, padded to so many rows, has to know; None: of padding alone."""
        count = 0 if batch is None else len(batch.slots)
        arrays = self._inputs.open()
        arrays["slot_mapping"][:, count:rows], arrays["seq_lens"][count:rows] = -1, 0
        if batch is not None:
            arrays["slot_mapping"][:, :count], arrays["seq_lens"][:count] = batch.slot_mapping, batch.seq_lens
            blocks = batch.block_tables
            self._sent_blocks.open()["blocks"][: blocks.size] = blocks.ravel()
            self._sent_blocks.send()
            sent = self._sent_blocks.device["blocks"][: blocks.size].view(blocks.shape)
            self._blocks[:, :count, : blocks.shape[2]].copy_(sent)
        self._inputs.send()
        self._lens = np.zeros(rows, dtype=np.int64)
        if batch is not None:
            self._lens[:count] = batch.seq_lens
        for work in self._work.values():
            work.fill(self._lens)

    def aim(self, rows: int) -> None:
        """From now on layers attend for so many rows."""
        at = self._inputs.device
        tables: list[Any] = [
            _Table(
                at["slot_mapping"][number, :rows],
                _Part(Rows(self._blocks[number, :rows], at["seq_lens"][:rows], self._starts[:rows], self._ones[:rows])),
                {kind: _Plans(self._work[kind].plan(rows)) for kind in self._kinds_of[number]},
            )
            for number in range(self.layout.num_tables)
        ]
        self._tables = tables

    def _plan(self, table: Any, kind: Any, pages: KvPages, *_: Any) -> Any:
        """Layers of a kind attend for the first time: their list of work gets its memory."""
        if self._make_work(kind, pages):
            self._work[kind].fill(self._lens)
        number = next(i for i, each in enumerate(self._tables) if each is table)
        self._kinds_of[number].add(kind)
        return _Plans(self._work[kind].plan(len(table.slot_mapping)))

    def _make_work(self, kind: LayerKind, pages: KvPages) -> bool:
        """Whether there was no list yet for layers of this kind."""
        if kind in self._work:
            return False
        self._work[kind] = _Work(kind.heads, kind.window, pages, self.dtype.itemsize, self.most_rows, self.num_sms)
        return True

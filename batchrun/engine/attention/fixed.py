"""Decoding with Triton's kernels where nothing moves from step to step, so that a step can be recorded and replayed.

The kernels' grids are of a fixed size and read lengths, block tables and their list of work from device memory
(batchrun_kernels/decode_plan.py); here all of that lies in buffers for the most rows that there may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from batchrun.engine.attention.triton import TritonAttention, whole_columns
from batchrun.engine.batch import Batch
from batchrun.engine.fixed_inputs import Field, FixedInputs
from batchrun_kernels.decode_plan import PROGRAMS_PER_SM, DecodePlan, plan_decode
from batchrun_kernels.paged import KvPages, Rows, head_dim_of
from batchrun_kernels.paged_prefill import PrefillPlan, plan_prefill


class _Plans(NamedTuple):
    """As TritonAttention has them; there is nothing but rows with one query."""

    short: DecodePlan | None = None
    long: PrefillPlan | None = None
    groups: None = None


class _Part(NamedTuple):
    device: Rows


@dataclass(slots=True)
class _Table:
    slot_mapping: torch.Tensor  # int64 [rows]
    short: _Part | None
    long: _Part | None
    plans: dict[Any, _Plans]
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

    def fill(self, lens: np.ndarray) -> None:
        """Send the list for rows of these lengths (int64 [rows])."""
        plan, arrays = self._make(lens), self._inputs.open()
        for name, array in arrays.items():
            made: np.ndarray = getattr(plan, name).numpy()
            array[: len(made)] = made
        self._inputs.send()

    def plans(self, rows: int) -> _Plans:
        """Where kernels find it, for so many rows."""
        at, units = self._inputs.device, self._units(rows)
        plan = DecodePlan(
            counts=at["counts"],
            unit_sequences=at["unit_sequences"][:units],
            chunk_starts=at["chunk_starts"][: rows + 1],
            arrived=self._arrived[: rows * self._parts],
            runs=self._runs,
            run_lse=self._run_lse,
            programs=max(1, min(self._programs, units * self._parts)),
        )
        return _Plans(short=plan)

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


class _WholeRows:
    """The same for InvariantAttention, which does not divide the keys of a row: no length changes the list."""

    def __init__(self, heads: int, pages: KvPages, itemsize: int, most_rows: int) -> None:
        once, group = np.ones(most_rows, dtype=np.int64), heads // pages.keys.shape[2]
        self._plan = plan_prefill(once, once, group, head_dim_of(pages), itemsize, device=pages.keys.device)
        self._tiles = len(self._plan.tiles) // most_rows  # of each row

    def fill(self, lens: np.ndarray) -> None:
        """Nothing has to be sent."""

    def plans(self, rows: int) -> _Plans:
        return _Plans(long=self._plan._replace(tiles=self._plan.tiles[: rows * self._tiles]))


class FixedDecode(TritonAttention):
    """The same pages as `attention`, for steps of at most `most_rows` rows with one query each, padded with rows that
    see nothing and write nothing. No pages are read once for several rows. `columns`: blocks of the longest row."""

    def __init__(self, attention: TritonAttention, most_rows: int, columns: int) -> None:
        vars(self).update(vars(attention))
        self.invariant = attention.invariant
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
        self._work: dict[Any, _Work | _WholeRows] = {}
        self._kinds_of: list[set[Any]] = [set() for _ in range(tables)]
        self._lens = np.zeros(0, dtype=np.int64)

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
        at, each = self._inputs.device, slice(0, rows)
        tables: list[Any] = []
        for number in range(self.layout.num_tables):
            blocks = self._blocks[number, each]
            part = _Part(Rows(blocks, at["seq_lens"][each], self._starts[each], self._ones[each]))
            plans = {kind: self._work[kind].plans(rows) for kind in self._kinds_of[number]}
            short, long = (None, part) if self.invariant else (part, None)
            tables.append(_Table(at["slot_mapping"][number, each], short, long, plans))
        self._tables = tables

    def _plan(self, table: Any, kind: Any, pages: KvPages, *_: Any) -> Any:
        """Layers of a kind attend for the first time: their list of work gets its memory."""
        if kind not in self._work:
            self._work[kind] = self._new_work(kind, pages)
            self._work[kind].fill(self._lens)
        number = next(i for i, each in enumerate(self._tables) if each is table)
        self._kinds_of[number].add(kind)
        return self._work[kind].plans(len(table.slot_mapping))

    def _new_work(self, kind: Any, pages: KvPages) -> _Work | _WholeRows:
        if self.invariant:
            return _WholeRows(kind.heads, pages, self.dtype.itemsize, self.most_rows)
        return _Work(kind.heads, kind.window, pages, self.dtype.itemsize, self.most_rows, self.num_sms)

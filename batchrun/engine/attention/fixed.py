"""Tables and plans for decode steps where nothing moves from step to step, so that a step can be recorded and replayed.

The grids of Triton's kernels are of a fixed size, and what they attend to and their lists of work are read from device
memory, with how much of these counts; here all of that lies in buffers for the most rows that there may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from batchrun.engine.attention.base import LayerGeometry
from batchrun.engine.attention.prefix import Sharing
from batchrun.engine.attention.tables import Kind, Plans, Table
from batchrun.engine.attention.triton import TritonAttention, most_groups, whole_columns
from batchrun.engine.batch import Batch
from batchrun.engine.fixed_inputs import Field, FixedInputs
from batchrun_kernels.decode_plan import DecodePlan, DecodeWork, cut_decode, decode_sizes
from batchrun_kernels.paged import KvPages, Rows, head_dim_of
from batchrun_kernels.paged_prefill import plan_prefill
from batchrun_kernels.prefix_group import Groups
from batchrun_kernels.prefix_plan import PrefixPlan, PrefixWork, cut_prefixes, prefix_sizes


class _Filled(NamedTuple):
    """What a step was filled with, on the host."""

    seq_lens: np.ndarray  # int64 [rows], 0 for padding
    sharing: Sharing | None  # of steps with groups


class _Decode:
    """The list of work of layers that are alike, and the memory for what comes of its parts."""

    def __init__(self, kind: Kind, pages: KvPages, itemsize: int, most_rows: int, num_sms: int) -> None:
        self._window = kind.window
        self._sizes = decode_sizes(1, kind.heads, pages, itemsize, num_sms)
        units, device = self._sizes.most_units(most_rows), pages.keys.device
        fields = {"counts": (2,), "unit_sequences": (units,), "chunk_starts": (most_rows + 1,)}
        self._inputs = FixedInputs({name: Field(shape, torch.int32) for name, shape in fields.items()}, device)
        self._arrived = torch.zeros(most_rows * self._sizes.parts, dtype=torch.int32, device=device)
        self._runs = torch.empty(units, self._sizes.parts, self._sizes.rows, kind.value_dim, device=device)
        self._run_lse = self._runs.new_empty(self._runs.shape[:3])

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self._inputs.num_bytes + self._arrived.nbytes + self._runs.nbytes + self._run_lse.nbytes

    def fill(self, filled: _Filled) -> None:
        lens, sharing = filled
        first_keys = None
        if sharing is not None:
            first_keys = np.zeros_like(lens)
            first_keys[: len(sharing.first_keys)] = sharing.first_keys
        _send(self._inputs, cut_decode(lens, np.ones_like(lens), self._sizes, first_keys, self._window))

    def plans(self, rows: int) -> Plans:
        """Where kernels find it, for so many rows."""
        at, units, parts = self._inputs.device, self._sizes.most_units(rows), self._sizes.parts
        plan = DecodePlan(
            counts=at["counts"],
            unit_sequences=at["unit_sequences"][:units],
            chunk_starts=at["chunk_starts"][: rows + 1],
            arrived=self._arrived[: rows * parts],
            runs=self._runs,
            run_lse=self._run_lse,
            programs=max(1, min(self._sizes.programs, units * parts)),
        )
        return Plans(plan)


class _WholeRows:
    """The same for an invariant backend, which does not divide the keys of a row: no length changes the list."""

    def __init__(self, kind: Kind, pages: KvPages, itemsize: int, most_rows: int) -> None:
        once, group = np.ones(most_rows, dtype=np.int64), kind.heads // kind.kv_heads
        self._plan = plan_prefill(once, once, group, head_dim_of(pages), itemsize, device=pages.keys.device)
        self._tiles = len(self._plan.tiles) // most_rows  # of each row

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self._plan.tiles.nbytes

    def fill(self, filled: _Filled) -> None:
        """Nothing has to be sent."""

    def plans(self, rows: int) -> Plans:
        return Plans(None, self._plan._replace(tiles=self._plan.tiles[: rows * self._tiles]))


class _Prefix:
    """The same for what groups of rows read together."""

    def __init__(self, kind: Kind, pages: KvPages, itemsize: int, most_rows: int, num_sms: int) -> None:
        self._sizes = prefix_sizes(most_rows, kind.heads, pages, itemsize, num_sms)
        units, device = self._sizes.most_units(most_groups(most_rows), most_rows), pages.keys.device
        fields = {"counts": (2,), "units": (units, 3), "run_starts": (most_rows + 1,)}
        self._inputs = FixedInputs({name: Field(shape, torch.int32) for name, shape in fields.items()}, device)
        self._runs = torch.empty(self._sizes.most_runs(most_rows), kind.heads, kind.value_dim, device=device)
        self._run_lse = self._runs.new_empty(self._runs.shape[:2])

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self._inputs.num_bytes + self._runs.nbytes + self._run_lse.nbytes

    def fill(self, filled: _Filled) -> None:
        lens, sharing = filled
        assert sharing is not None
        work = cut_prefixes(sharing.shared_lens, sharing.token_counts, self._sizes)
        # Places beyond the last query have no runs.
        starts = np.pad(work.run_starts, (0, len(lens) + 1 - len(work.run_starts)), mode="edge")
        _send(self._inputs, work._replace(run_starts=starts))

    def plan(self, rows: int) -> PrefixPlan:
        """Where kernels find it, for so many rows."""
        at, units = self._inputs.device, self._sizes.most_units(most_groups(rows), rows)
        return PrefixPlan(
            counts=at["counts"],
            units=at["units"][:units],
            run_starts=at["run_starts"][: rows + 1],
            runs=self._runs,
            run_lse=self._run_lse,
            block_m=self._sizes.block_m,
        )


class FixedTables:
    """Tables of a backend for steps of at most `most_rows` rows with one query each, padded with rows that see nothing
    and write nothing. `columns`: blocks of the longest row."""

    def __init__(self, backend: TritonAttention, most_rows: int, columns: int) -> None:
        self._backend = backend
        self._most_rows = most_rows
        tables, device = backend.layout.num_tables, backend.device
        groups, columns = most_groups(most_rows), whole_columns(columns)
        shapes = {"seq_lens": most_rows, "first_keys": most_rows, "leaders": groups, "shared_lens": groups}
        shapes |= {"token_starts": groups + 1, "tokens": most_rows, "positions": most_rows}
        fields = {name: Field((size,), torch.int32) for name, size in shapes.items()}
        self._inputs = FixedInputs({"slot_mapping": Field((tables, most_rows), torch.int64), **fields}, device)
        # Apart, and packed to the columns that a step has: of a long context they are most of what is sent.
        self._sent_blocks = FixedInputs({"blocks": Field((tables * most_rows * columns,), torch.int32)}, device)
        self._blocks = torch.zeros(tables, most_rows, columns, dtype=torch.int32, device=device)
        self._starts = torch.arange(most_rows, dtype=torch.int32, device=device)
        self._ones = torch.ones(most_rows, dtype=torch.int32, device=device)
        self._kinds: list[dict[Kind, KvPages]] = [{} for _ in range(tables)]
        self._decode: dict[Kind, _Decode | _WholeRows] = {}
        self._prefix: dict[Kind, _Prefix] = {}
        self._filled = _Filled(np.zeros(0, dtype=np.int64), None)

    @property
    def num_bytes(self) -> int:
        """On the device, with the list of work of each kind of layers that has attended."""
        held = sum(each.nbytes for each in (self._blocks, self._starts, self._ones))
        held += self._inputs.num_bytes + self._sent_blocks.num_bytes
        return held + sum(work.num_bytes for work in (*self._decode.values(), *self._prefix.values()))

    def prepare(self, layers: Sequence[LayerGeometry]) -> None:
        """Make the lists of work of layers whose number of query heads is known, before any of them attends."""
        backend = self._backend
        grouped = backend.shares and most_groups(self._most_rows) > 0
        for layer, pages, number in zip(layers, backend.pages, backend.layout.tables, strict=True):
            assert layer.num_heads is not None
            _, _, kv_heads, key_dim = pages.keys.shape
            kind = Kind(layer.window, layer.num_heads, kv_heads, key_dim, pages.values.shape[3])
            self._make_work(kind, pages, grouped and backend.whole[number])

    @torch.inference_mode()
    def fill(self, batch: Batch | None, rows: int, sharing: Sharing | None) -> None:
        """Send what a step of the batch, padded to so many rows, has to know; None: of padding alone."""
        count = 0 if batch is None else len(batch.slots)
        seq_lens, arrays = np.zeros(rows, dtype=np.int64), self._inputs.open()
        arrays["slot_mapping"][:, count:rows] = -1
        if batch is not None:
            arrays["slot_mapping"][:, :count], seq_lens[:count] = batch.slot_mapping, batch.seq_lens
            blocks = batch.block_tables
            self._sent_blocks.open()["blocks"][: blocks.size] = blocks.ravel()
            self._sent_blocks.send()
            sent = self._sent_blocks.device["blocks"][: blocks.size].view(blocks.shape)
            self._blocks[:, :count, : blocks.shape[2]].copy_(sent)
        arrays["seq_lens"][:rows], arrays["first_keys"][:rows] = seq_lens, 0
        if sharing is not None:
            for name, array in sharing._asdict().items():
                arrays[name][: len(array)] = array
        self._inputs.send()
        self._filled = _Filled(seq_lens, sharing)
        for kind in {kind for kinds in self._kinds for kind in kinds}:
            self._fill_work(kind)

    def aim(self, rows: int, grouped: bool) -> None:
        """From now on layers attend for so many rows, some of which may be in groups."""
        at, tables = self._inputs.device, []
        for number, kinds in enumerate(self._kinds):
            each = Rows(self._blocks[number, :rows], at["seq_lens"][:rows], self._starts[:rows], self._ones[:rows])
            parts = (None, each) if self._backend.invariant else (each, None)
            table = Table(at["slot_mapping"][number, :rows], *parts)
            if grouped and self._backend.whole[number]:
                most = most_groups(rows)
                sizes = {"leaders": most, "shared_lens": most, "token_starts": most + 1}
                fields = {name: at[name][: sizes.get(name, rows)] for name in Groups._fields[1:]}
                table.groups = Groups(each.block_tables, **fields)
                table.short = each._replace(first_keys=at["first_keys"][:rows])
            table.plans = {kind: self._plans(table, kind, pages) for kind, pages in kinds.items()}
            tables.append(table)

        def plan(number: int, kind: Kind, pages: KvPages) -> Plans:
            self._kinds[number][kind] = pages
            return self._plans(tables[number], kind, pages)

        self._backend.aim(tables, plan)

    def _plans(self, table: Table, kind: Kind, pages: KvPages) -> Plans:
        """The plans for a table; their memory is made for the first."""
        rows, grouped = len(table.slot_mapping), table.groups is not None
        if self._make_work(kind, pages, grouped):
            self._fill_work(kind)
        plans = self._decode[kind].plans(rows)
        return plans._replace(groups=self._prefix[kind].plan(rows)) if grouped else plans

    def _make_work(self, kind: Kind, pages: KvPages, grouped: bool) -> bool:
        """Whether there was no list yet for layers of this kind, or none for what their groups read."""
        backend, made = self._backend, False
        sizes = backend.dtype.itemsize, self._most_rows
        if kind not in self._decode:
            invariant, sms = backend.invariant, backend.num_sms
            self._decode[kind] = _WholeRows(kind, pages, *sizes) if invariant else _Decode(kind, pages, *sizes, sms)
            made = True
        if grouped and kind not in self._prefix:
            self._prefix[kind] = _Prefix(kind, pages, *sizes, backend.num_sms)
            made = True
        return made

    def _fill_work(self, kind: Kind) -> None:
        """Layers of a kind are all in tables without a window, or all in others: see KvLayout."""
        whole = any(whole and kind in kinds for whole, kinds in zip(self._backend.whole, self._kinds, strict=True))
        filled = self._filled if whole else self._filled._replace(sharing=None)
        self._decode[kind].fill(filled)
        if filled.sharing is not None and kind in self._prefix:
            self._prefix[kind].fill(filled)


def _send(inputs: FixedInputs, work: DecodeWork | PrefixWork) -> None:
    arrays = inputs.open()
    for name, array in work._asdict().items():
        arrays[name][: len(array)] = array
    inputs.send()

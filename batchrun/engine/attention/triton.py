"""Attention for GPUs: Triton kernels that read pages where they lie, shared pages once for the rows that share them.

Rows with few query tokens, as in decoding, go through one kernel and prompts through another. Of the former, those of a
prefix group attend to their shared pages in one product, and to the rest each on its own. What kernels need to know of
a step is planned here, once for all layers that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from batchrun.engine.attention.base import AttentionBackend, LayerCall, LayerGeometry, distinct_tensors, pages_of_heads
from batchrun.engine.attention.prefix import Sharing, shared_prefixes
from batchrun.engine.attention.tables import Kind, Planner, Plans, Table
from batchrun.engine.batch import Batch
from batchrun.engine.kv_cache import HOLE
from batchrun.engine.kv_layout import KvLayout
from batchrun.engine.staging import Put, Staging
from batchrun.errors import ConfigError
from batchrun_kernels.decode_plan import MAX_QUERIES, plan_decode
from batchrun_kernels.merge_runs import merge_runs
from batchrun_kernels.paged import FP8, MAX_HEAD_DIM, KvPages, Rows, Scoring
from batchrun_kernels.paged_decode import paged_decode
from batchrun_kernels.paged_prefill import paged_prefill, plan_prefill
from batchrun_kernels.prefix_group import Groups, prefix_group
from batchrun_kernels.prefix_plan import plan_prefix
from batchrun_kernels.reshape_and_cache import reshape_and_cache
from batchrun_kernels.rope_and_cache import Pages

MIN_GROUP_ROWS = 4
# Estimated, not measured: two more launches a layer take as long as reading so many pages of 64 positions, 8 heads and
# 128 dimensions at 4.3 TB/s.
MIN_SAVED_BLOCKS = 128
TABLE_COLUMNS = 16  # Triton compiles a kernel again for a stride that this does not divide
INTERPRETED_SMS = 4  # multiprocessors that Triton's interpreter stands for


class Chosen(NamedTuple):
    """Rows of a batch for one kernel; all int64 [R]."""

    rows: np.ndarray  # which of the batch
    seq_lens: np.ndarray
    query_starts: np.ndarray
    query_lens: np.ndarray

    @classmethod
    def of(cls, batch: Batch, chosen: np.ndarray) -> Chosen | None:
        """Those of `chosen` bool [R]; None: there are none."""
        rows = np.flatnonzero(chosen)
        starts = batch.query_starts[rows]
        return cls(rows, batch.seq_lens[rows], starts, batch.query_starts[rows + 1] - starts) if len(rows) else None


class Step(NamedTuple):
    """What the plans of a batch are made from, on the host."""

    batch: Batch | None
    short: Chosen | None
    long: Chosen | None
    sharing: Sharing | None  # among the short rows, in tables without a window: those that share enough pages


class TritonAttention(AttentionBackend):
    """Pages are [blocks, block size, kv heads, dim] per layer. Raises ConfigError for heads that are too large."""

    name = "triton"
    page_size = 64  # the keys that its kernels look at together
    fp8 = False  # whether pages hold float8_e4m3fn, instead of the model's type
    invariant = False  # whether a token has the same bits in whatever step it is computed

    def __init__(
        self, layers: list[LayerGeometry], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if (largest := largest_head(layers)) > MAX_HEAD_DIM:
            raise ConfigError(
                f"engine.attention=triton takes heads of at most {MAX_HEAD_DIM} dimensions, and this model has "
                f"{largest}: set engine.attention=torch"
            )
        self.layers = layers
        self.layout = KvLayout.of(layers)
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.num_sms = INTERPRETED_SMS
        if device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        held = FP8 if self.fp8 else dtype
        self.pages = [KvPages(*kv) for kv in pages_of_heads(self.layout, num_blocks, block_size, held, device)]
        # Of each table: whether its rows keep all their blocks, and so may share them.
        self.whole = [group.window is None for group in self.layout.groups for _ in range(group.tables)]
        self.shares = not self.invariant and True in self.whole  # whether rows may read pages together
        self._tables: list[Table] = []
        self._planner: Planner = self._plan_late
        self._step = Step(None, None, None, None)
        # Of the layers of each table, as they have attended: from then on their plans are made with a step's begin.
        self._kinds: list[dict[Kind, KvPages]] = [{} for _ in range(self.layout.num_tables)]
        self._staging = Staging(device)

    def begin(self, batch: Batch, staging: Staging | None = None) -> None:
        put = (staging or self._staging).put
        step = self.step_of(batch)
        short, long = step.short, step.long
        lens = [None if part is None else [put(x, np.int32) for x in part[1:]] for part in (short, long)]
        shared = None if step.sharing is None else [put(x, np.int32) for x in step.sharing]
        tables = []
        for number, blocks in enumerate(batch.block_tables):
            parts = [
                None if part is None or ints is None else Rows(put(_widened(blocks[part.rows]), np.int32), *ints)
                for part, ints in zip((short, long), lens, strict=True)
            ]
            table = Table(put(batch.slot_mapping[number]), parts[0], parts[1])
            if shared is not None and table.short is not None and self.whole[number]:
                table.short = table.short._replace(first_keys=shared[0])
                table.groups = Groups(table.short.block_tables, *shared[1:])
            table.plans = {kind: self._plan(number, kind, pages, put) for kind, pages in self._kinds[number].items()}
            tables.append(table)
        self.aim(tables, self._plan_late)
        if staging is None:
            self._staging.send()

    def aim(self, tables: list[Table], planner: Planner) -> None:
        """Layers attend to these tables from now on, until the next step begins."""
        self._tables, self._planner = tables, planner

    def step_of(self, batch: Batch) -> Step:
        """The rows of the batch for each kernel, found once for all who ask before another batch."""
        if self._step.batch is not batch:
            counts = np.diff(batch.query_starts)
            most = 0 if self.invariant else MAX_QUERIES  # queries of a row that decodes
            short, long = (Chosen.of(batch, chosen) for chosen in (counts <= most, counts > most))
            self._step = Step(batch, short, long, None if short is None else self._find_sharing(batch, short))
        return self._step

    def _find_sharing(self, batch: Batch, rows: Chosen) -> Sharing | None:
        """All tables without a window share alike: their blocks are found together."""
        if not self.shares:
            return None
        blocks = batch.block_tables[self.whole.index(True), rows.rows]
        computed = rows.seq_lens - rows.query_lens
        groups = shared_prefixes(computed, blocks, self.block_size, MIN_GROUP_ROWS, MIN_SAVED_BLOCKS)
        return Sharing.of(groups, self.block_size, *rows[2:], batch.positions) if groups else None

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        to = self.destination(call.layer)
        if to is not None:
            keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
            reshape_and_cache(keys, values, to.keys, to.values, to.slot_mapping, k_scale=to.k_scale, v_scale=to.v_scale)
        return self.attend_written(call, q)

    def destination(self, layer: int) -> Pages | None:
        if self.layers[layer].source is not None:
            return None
        pages, table = self.pages[layer], self._tables[self.layout.tables[layer]]
        return Pages(pages.keys, pages.values, table.slot_mapping, pages.key_scale, pages.value_scale)

    def attend_written(self, call: LayerCall, q: torch.Tensor) -> torch.Tensor:
        table, pages = self._tables[self.layout.tables[call.layer]], self.pages[call.layer]
        queries = q.to(self.dtype)
        queries = queries if queries.stride(2) == 1 else queries.contiguous()
        sinks = None if call.sinks is None else call.sinks.contiguous()
        scoring = Scoring(call.scale, call.window, call.softcap, sinks)
        plans = self._plans(call, pages, q.shape[1])
        out = queries.new_empty(*q.shape[:2], pages.values.shape[3])
        if table.long is not None and plans.long is not None:
            paged_prefill(queries, pages, table.long, scoring, plans.long, out=out, invariant=self.invariant)
        if table.short is not None and plans.short is not None:
            grouped = plans.groups is not None
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=self.device) if grouped else None
            paged_decode(queries, pages, table.short, scoring, plans.short, out=out, lse=lse)
            if table.groups is not None and plans.groups is not None and lse is not None:
                prefix_group(queries, pages, table.groups, scoring._replace(sinks=None), plans.groups)
                merge_runs(out, lse, table.groups.tokens, *plans.groups[2:5])
        return out.to(q.dtype)

    def _plans(self, call: LayerCall, pages: KvPages, heads: int) -> Plans:
        number = self.layout.tables[call.layer]
        plans, (kv_heads, key_dim) = self._tables[number].plans, pages.keys.shape[2:]
        kind = Kind(call.window, heads, kv_heads, key_dim, pages.values.shape[3])
        if kind not in plans:
            plans[kind] = self._planner(number, kind, pages)
        return plans[kind]

    def _plan_late(self, number: int, kind: Kind, pages: KvPages) -> Plans:
        self._kinds[number][kind] = pages
        plans = self._plan(number, kind, pages, self._staging.put)
        self._staging.send()
        return plans

    def _plan(self, number: int, kind: Kind, pages: KvPages, put: Put) -> Plans:
        itemsize, sms = self.dtype.itemsize, self.num_sms
        _, short, long, sharing = self._step
        sharing = sharing if self.whole[number] else None
        decode = prefill = prefix = None

        def upload(array: np.ndarray) -> torch.Tensor:
            return put(array, np.int32)

        if short is not None:
            decode = plan_decode(
                short.seq_lens,
                short.query_lens,
                kind.heads,
                pages,
                itemsize,
                num_sms=sms,
                first_keys=None if sharing is None else sharing.first_keys,
                window=kind.window,
                upload=upload,
            )
        if long is not None:
            prefill = plan_prefill(
                long.seq_lens,
                long.query_lens,
                kind.heads // kind.kv_heads,
                max(kind.key_dim, kind.value_dim),
                itemsize,
                window=kind.window,
                upload=upload,
            )
        if sharing is not None:
            lens, counts = sharing.shared_lens, sharing.token_counts
            prefix = plan_prefix(lens, counts, kind.heads, pages, itemsize, num_sms=sms, upload=upload)
        return Plans(decode, prefill, prefix)

    def page_tensors(self) -> list[torch.Tensor]:
        return distinct_tensors(self.pages)


class Fp8Attention(TritonAttention):
    """The same over pages of half the size, or a quarter beside float32. Every layer's scale is 1 until `use_scales`:
    numbers beyond 448 times the scale are cut."""

    fp8 = True

    def use_scales(self, scales: Sequence[tuple[float, float]]) -> None:
        """What is in the pages times these is K and V of each layer, from before the first step on."""
        self.pages[:] = [
            pages._replace(key_scale=k, value_scale=v) for pages, (k, v) in zip(self.pages, scales, strict=True)
        ]


class InvariantAttention(TritonAttention):
    """The same pages, and one kernel for all rows, which walks over the keys of each in one order: no chunks of keys
    that are put together, no prefixes read together."""

    invariant = True


class InvariantFp8Attention(Fp8Attention, InvariantAttention):
    """Both."""


def most_groups(rows: int) -> int:
    """Prefix groups that so many rows can be in."""
    return rows // MIN_GROUP_ROWS


def _widened(blocks: np.ndarray) -> np.ndarray:
    """Block tables with a multiple of TABLE_COLUMNS columns."""
    rows, columns = blocks.shape
    widened = np.full((rows, whole_columns(columns)), HOLE, dtype=np.int32)
    widened[:, :columns] = blocks
    return widened


def whole_columns(columns: int) -> int:
    """Columns of a block table that has room for so many."""
    return -(-columns // TABLE_COLUMNS) * TABLE_COLUMNS


def largest_head(layers: Sequence[LayerGeometry]) -> int:
    """Dimensions of the largest key or value head."""
    return max(max(layer.key_dim, layer.value_dim) for layer in layers)

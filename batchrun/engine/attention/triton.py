"""Attention for GPUs: Triton kernels that read pages where they lie, shared pages once for the rows that share them.

Rows with few query tokens, as in decoding, go through one kernel and prompts through another. Of the former, those of a
prefix group attend to their shared pages in one product, and to the rest each on its own. What kernels need to know of
a step is planned here, once for all layers that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from batchrun.engine.attention.base import AttentionBackend, LayerCall, LayerGeometry, distinct_tensors, pages_of_heads
from batchrun.engine.attention.prefix import shared_prefixes
from batchrun.engine.batch import Batch
from batchrun.engine.kv_cache import HOLE
from batchrun.engine.kv_layout import KvLayout
from batchrun.engine.staging import Put, Staging
from batchrun.errors import ConfigError
from batchrun_kernels.decode_plan import MAX_QUERIES, DecodePlan, plan_decode
from batchrun_kernels.merge_runs import merge_runs
from batchrun_kernels.paged import FP8, MAX_HEAD_DIM, KvPages, Rows, Scoring
from batchrun_kernels.paged_decode import paged_decode
from batchrun_kernels.paged_prefill import PrefillPlan, paged_prefill, plan_prefill
from batchrun_kernels.prefix_group import Groups, PrefixPlan, plan_prefix, prefix_group
from batchrun_kernels.reshape_and_cache import reshape_and_cache
from batchrun_kernels.rope_and_cache import Pages

MIN_GROUP_ROWS = 4
# Estimated, not measured: two more launches a layer take as long as reading so many pages of 64 positions, 8 heads and
# 128 dimensions at 4.3 TB/s.
MIN_SAVED_BLOCKS = 128
TABLE_COLUMNS = 16  # Triton compiles a kernel again for a stride that this does not divide
INTERPRETED_SMS = 4  # multiprocessors that Triton's interpreter stands for


@dataclass(slots=True)
class _Rows:
    """Rows of a batch for one kernel: what all block tables share, on the host for planning and on the device."""

    rows: np.ndarray  # int64 [R]: which of the batch
    seq_lens: np.ndarray  # int64 [R]
    query_starts: np.ndarray
    query_lens: np.ndarray
    on_device: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the last three, int32


@dataclass(slots=True)
class _Part:
    """These rows and their pages."""

    rows: _Rows
    device: Rows
    first_keys: np.ndarray | None = None


@dataclass(slots=True)
class _Groups:
    device: Groups
    shared_lens: list[int]
    token_counts: list[int]


class LayerKind(NamedTuple):
    """Layers that are alike have the same plans."""

    window: int | None
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


class _Plans(NamedTuple):
    short: DecodePlan | None
    long: PrefillPlan | None
    groups: PrefixPlan | None


@dataclass(slots=True)
class _Table:
    """What the layers of one block table share in a step."""

    slot_mapping: torch.Tensor  # int64 [T]
    short: _Part | None
    long: _Part | None
    groups: _Groups | None = None
    plans: dict[LayerKind, _Plans] = field(default_factory=dict)


class TritonAttention(AttentionBackend):
    """Pages are [blocks, block size, kv heads, dim] per layer. Raises ConfigError for heads that are too large."""

    name = "triton"
    page_size = 64  # the keys that its kernels look at together
    fp8 = False  # whether pages hold float8_e4m3fn, instead of the model's type

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
        self._tables: list[_Table] = []
        # Of the layers of each table, as they have attended: from then on their plans are made with a step's begin.
        self._kinds: list[dict[LayerKind, KvPages]] = [{} for _ in range(self.layout.num_tables)]
        self._staging = Staging(device)

    def begin(self, batch: Batch, staging: Staging | None = None) -> None:
        put = (staging or self._staging).put
        counts = np.diff(batch.query_starts)
        short, long = (_rows(batch, chosen, put) for chosen in (counts <= MAX_QUERIES, counts > MAX_QUERIES))
        kinds = [group for group in self.layout.groups for _ in range(group.tables)]
        self._tables = []
        for number, kv_group in enumerate(kinds):
            blocks = batch.block_tables[number]
            table = _Table(put(batch.slot_mapping[number]), _part(short, blocks, put), _part(long, blocks, put))
            if table.short is not None and kv_group.window is None:
                self._group(table, table.short, batch, blocks, put)
            table.plans = {kind: self._plan(table, kind, pages, put) for kind, pages in self._kinds[number].items()}
            self._tables.append(table)
        if staging is None:
            self._staging.send()

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
            paged_prefill(queries, pages, table.long.device, scoring, plans.long, out=out)
        if table.short is not None and plans.short is not None:
            grouped = table.groups is not None
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=self.device) if grouped else None
            paged_decode(queries, pages, table.short.device, scoring, plans.short, out=out, lse=lse)
            if table.groups is not None and plans.groups is not None and lse is not None:
                groups = table.groups.device
                runs, run_lse = prefix_group(queries, pages, groups, scoring._replace(sinks=None), plans.groups)
                merge_runs(out, lse, groups.tokens, runs, run_lse)
        return out.to(q.dtype)

    def _group(self, table: _Table, part: _Part, batch: Batch, blocks: np.ndarray, put: Put) -> None:
        """Let the rows that share enough pages read them together."""
        rows, blocks = part.rows, blocks[part.rows.rows]
        computed = rows.seq_lens - rows.query_lens
        found = shared_prefixes(computed, blocks, self.block_size, MIN_GROUP_ROWS, MIN_SAVED_BLOCKS)
        if not found:
            return
        stops = rows.query_starts + rows.query_lens
        part.first_keys = np.zeros_like(computed)
        members = []
        for group in found:
            part.first_keys[group.rows] = group.depth * self.block_size
            members.append(np.concatenate([np.arange(rows.query_starts[row], stops[row]) for row in group.rows]))
        part.device = part.device._replace(first_keys=put(part.first_keys, np.int32))
        shared, counts = [group.depth * self.block_size for group in found], [len(tokens) for tokens in members]
        tokens = np.concatenate(members)
        firsts = _widened(blocks[[group.rows[0] for group in found]])
        arrays = (firsts, shared, np.cumsum([0, *counts]), tokens, batch.positions[tokens])
        table.groups = _Groups(Groups(*(put(np.asarray(x), np.int32) for x in arrays)), shared, counts)

    def _plans(self, call: LayerCall, pages: KvPages, heads: int) -> _Plans:
        number = self.layout.tables[call.layer]
        table, (kv_heads, key_dim) = self._tables[number], pages.keys.shape[2:]
        kind = LayerKind(call.window, heads, kv_heads, key_dim, pages.values.shape[3])
        if kind not in table.plans:
            self._kinds[number][kind] = pages
            table.plans[kind] = self._plan(table, kind, pages, self._staging.put)
            self._staging.send()
        return table.plans[kind]

    def _plan(self, table: _Table, kind: LayerKind, pages: KvPages, put: Put) -> _Plans:
        itemsize, sms, groups = self.dtype.itemsize, self.num_sms, table.groups
        decode = prefill = prefix = None

        def upload(array: np.ndarray) -> torch.Tensor:
            return put(array, np.int32)

        if table.short is not None:
            rows = table.short.rows
            decode = plan_decode(
                rows.seq_lens,
                rows.query_lens,
                kind.heads,
                pages,
                itemsize,
                num_sms=sms,
                first_keys=table.short.first_keys,
                window=kind.window,
                upload=upload,
            )
        if table.long is not None:
            rows = table.long.rows
            prefill = plan_prefill(
                rows.seq_lens,
                rows.query_lens,
                kind.heads // kind.kv_heads,
                max(kind.key_dim, kind.value_dim),
                itemsize,
                window=kind.window,
                upload=upload,
            )
        if groups is not None:
            prefix = plan_prefix(
                groups.shared_lens, groups.token_counts, kind.heads, pages, itemsize, num_sms=sms, upload=upload
            )
        return _Plans(decode, prefill, prefix)

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


def _rows(batch: Batch, chosen: np.ndarray, put: Put) -> _Rows | None:
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return None
    starts, seq_lens = batch.query_starts[rows], batch.seq_lens[rows]
    query_lens = batch.query_starts[rows + 1] - starts
    lens, first, counts = (put(x, np.int32) for x in (seq_lens, starts, query_lens))
    return _Rows(rows, seq_lens, starts, query_lens, (lens, first, counts))


def _part(rows: _Rows | None, blocks: np.ndarray, put: Put) -> _Part | None:
    if rows is None:
        return None
    return _Part(rows, Rows(put(_widened(blocks[rows.rows]), np.int32), *rows.on_device))


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

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

from batchrun.engine.attention.base import AttentionBackend, LayerCall, LayerGeometry, zero_pages
from batchrun.engine.attention.prefix import shared_prefixes
from batchrun.engine.batch import Batch
from batchrun.engine.kv_cache import KvGroup
from batchrun.engine.kv_layout import KvLayout
from batchrun.errors import ConfigError
from batchrun_kernels.decode_plan import MAX_QUERIES, DecodePlan, plan_decode
from batchrun_kernels.merge_runs import merge_runs
from batchrun_kernels.paged import MAX_HEAD_DIM, KvPages, Rows, Scoring
from batchrun_kernels.paged_decode import paged_decode
from batchrun_kernels.paged_prefill import PrefillPlan, paged_prefill, plan_prefill
from batchrun_kernels.prefix_group import Groups, PrefixPlan, plan_prefix, prefix_group
from batchrun_kernels.reshape_and_cache import reshape_and_cache

MIN_GROUP_ROWS = 4
# Estimated, not measured: two more launches a layer take as long as reading so many pages of 64 positions, 8 heads and
# 128 dimensions at 4.3 TB/s.
MIN_SAVED_BLOCKS = 128
INTERPRETED_SMS = 4  # multiprocessors that Triton's interpreter stands for


@dataclass(slots=True)
class _Rows:
    """Rows of a batch for one kernel: on the device, and on the host for planning."""

    device: Rows
    seq_lens: np.ndarray  # int64 [R]
    query_starts: np.ndarray
    query_lens: np.ndarray
    first_keys: np.ndarray | None = None


@dataclass(slots=True)
class _Groups:
    device: Groups
    shared_lens: list[int]
    token_counts: list[int]


class _Kind(NamedTuple):
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
    short: _Rows | None
    long: _Rows | None
    groups: _Groups | None
    plans: dict[_Kind, _Plans] = field(default_factory=dict)


class TritonAttention(AttentionBackend):
    """Pages are [blocks, block size, kv heads, dim] per layer. Raises ConfigError for heads that are too large."""

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
        pages = [
            KvPages(
                zero_pages((num_blocks, block_size, page.num_kv_heads, page.key_dim), dtype, device),
                zero_pages((num_blocks, block_size, page.num_kv_heads, page.value_dim), dtype, device),
            )
            for page in self.layout.pages
        ]
        self.pages = [pages[place] for place in self.layout.places]
        self._tables: list[_Table] = []

    def begin(self, batch: Batch) -> None:
        kinds = [group for group in self.layout.groups for _ in range(group.tables)]
        self._tables = [self._table(batch, table, kind) for table, kind in enumerate(kinds)]

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        table, pages = self._tables[self.layout.tables[call.layer]], self.pages[call.layer]
        if self.layers[call.layer].source is None:
            keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
            reshape_and_cache(keys, values, pages.keys, pages.values, table.slot_mapping)
        queries = q.to(self.dtype)
        queries = queries if queries.stride(2) == 1 else queries.contiguous()
        sinks = None if call.sinks is None else call.sinks.contiguous()
        scoring = Scoring(call.scale, call.window, call.softcap, sinks)
        plans = self._plans(table, scoring, pages, q.shape[1])
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

    def _table(self, batch: Batch, number: int, kind: KvGroup) -> _Table:
        tables, counts = batch.block_tables[number], np.diff(batch.query_starts)
        short, long = np.flatnonzero(counts <= MAX_QUERIES), np.flatnonzero(counts > MAX_QUERIES)
        table = _Table(
            slot_mapping=self._tensor(batch.slot_mapping[number]),
            short=self._rows(batch, tables, short),
            long=self._rows(batch, tables, long),
            groups=None,
        )
        if table.short is not None and kind.window is None:
            self._group(table, table.short, batch, tables[short])
        return table

    def _rows(self, batch: Batch, tables: np.ndarray, rows: np.ndarray) -> _Rows | None:
        if not len(rows):
            return None
        starts, seq_lens = batch.query_starts[rows], batch.seq_lens[rows]
        query_lens = batch.query_starts[rows + 1] - starts
        device = Rows(*(self._ints(x) for x in (tables[rows], seq_lens, starts, query_lens)))
        return _Rows(device, seq_lens, starts, query_lens)

    def _group(self, table: _Table, rows: _Rows, batch: Batch, tables: np.ndarray) -> None:
        """Let the rows that share enough pages read them together."""
        computed = rows.seq_lens - rows.query_lens
        found = shared_prefixes(computed, tables, self.block_size, MIN_GROUP_ROWS, MIN_SAVED_BLOCKS)
        if not found:
            return
        stops = rows.query_starts + rows.query_lens
        rows.first_keys = np.zeros_like(computed)
        members = []
        for group in found:
            rows.first_keys[group.rows] = group.depth * self.block_size
            members.append(np.concatenate([np.arange(rows.query_starts[row], stops[row]) for row in group.rows]))
        rows.device = rows.device._replace(first_keys=self._ints(rows.first_keys))
        shared, counts = [group.depth * self.block_size for group in found], [len(tokens) for tokens in members]
        tokens = np.concatenate(members)
        firsts = tables[[group.rows[0] for group in found]]
        arrays = (firsts, shared, np.cumsum([0, *counts]), tokens, batch.positions[tokens])
        table.groups = _Groups(Groups(*(self._ints(np.asarray(x)) for x in arrays)), shared, counts)

    def _plans(self, table: _Table, scoring: Scoring, pages: KvPages, heads: int) -> _Plans:
        kv_heads, key_dim = pages.keys.shape[2:]
        kind = _Kind(scoring.window, heads, kv_heads, key_dim, pages.values.shape[3])
        if kind not in table.plans:
            table.plans[kind] = self._plan(table, kind, pages)
        return table.plans[kind]

    def _plan(self, table: _Table, kind: _Kind, pages: KvPages) -> _Plans:
        itemsize, sms, short, long, groups = self.dtype.itemsize, self.num_sms, table.short, table.long, table.groups
        decode = prefill = prefix = None
        if short is not None:
            decode = plan_decode(
                short.seq_lens,
                short.query_lens,
                kind.heads,
                pages,
                itemsize,
                num_sms=sms,
                first_keys=short.first_keys,
                window=kind.window,
            )
        if long is not None:
            prefill = plan_prefill(
                long.seq_lens,
                long.query_lens,
                kind.heads // kind.kv_heads,
                max(kind.key_dim, kind.value_dim),
                itemsize,
                window=kind.window,
                device=self.device,
            )
        if groups is not None:
            prefix = plan_prefix(groups.shared_lens, groups.token_counts, kind.heads, pages, itemsize, num_sms=sms)
        return _Plans(decode, prefill, prefix)

    def page_tensors(self) -> list[torch.Tensor]:
        held = (part for pages in self.pages for part in pages if isinstance(part, torch.Tensor))
        return list({part.data_ptr(): part for part in held}.values())

    def _ints(self, array: np.ndarray) -> torch.Tensor:
        return self._tensor(array.astype(np.int32))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def largest_head(layers: Sequence[LayerGeometry]) -> int:
    """Dimensions of the largest key or value head."""
    return max(max(layer.key_dim, layer.value_dim) for layer in layers)

"""Attention for the CPU: pages are read where they lie, shared pages once for all rows that share them.

A step is cut into parts whose results are merged by log-sum-exp: the shared pages of each prefix group as one
dense product for all its queries; the rest of a prompt chunk as dense causal products; the rest of a decoding
row by a kernel that walks its pages. Dense parts run in the model's precision, as eager attention does.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from batchrun.engine.attention.base import AttentionBackend, LayerCall, LayerGeometry, zero_pages
from batchrun.engine.attention.prefix import prefix_groups
from batchrun.engine.batch import Batch
from batchrun.engine.kv_cache import KvGroup
from batchrun.engine.kv_layout import KvLayout
from batchrun_kernels.cpu.attention import finish, merge_part, paged_decode, softmax_rows, write_pages
from batchrun_kernels.cpu.scalar import NEGATIVE, elements

MIN_GROUP_ROWS = 4  # fewer rows read shared pages faster one by one than they gather them
MIN_SAVED_BLOCKS = 16
QUERY_TILE = 256  # query tokens of a dense product: its scores then stay in the cache of a core
NO_SINKS = np.empty(0, dtype=np.float32)


@dataclass(slots=True)
class _Plan:
    """What the layers of one block table share in a step."""

    slot_mapping: np.ndarray  # int64 [T]
    tables: np.ndarray  # int32 [R, B]
    private: np.ndarray  # int64 [R]: first position outside of a row's prefix group
    dense: list[_Dense]


@dataclass(slots=True)
class _Dense:
    """Query tokens that attend to the same keys: positions [first, first + blocks * block size) of a row or group."""

    tokens: np.ndarray  # int64 [M], places in the batch
    index: torch.Tensor  # the same
    blocks: torch.Tensor  # int64 [B]
    first: int  # position of the first key
    low: np.ndarray  # int64 [M]: first key seen without a window, as an offset from `first`
    high: np.ndarray  # int64 [M]: one past the last key seen


class CpuAttention(AttentionBackend):
    """Pages: K [blocks, kv heads, block size, Dk], V [blocks, kv heads, block size, Dv] per layer."""

    def __init__(
        self, layers: list[LayerGeometry], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        self.layout = KvLayout.of(layers)
        self.block_size = block_size
        pages = [
            (
                zero_pages((num_blocks, page.num_kv_heads, block_size, page.key_dim), dtype, device),
                zero_pages((num_blocks, page.num_kv_heads, block_size, page.value_dim), dtype, device),
            )
            for page in self.layout.pages
        ]
        self.pages = [pages[place] for place in self.layout.places]
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads) if self._threads > 1 else None

    def begin(self, batch: Batch) -> None:
        self._positions = batch.positions
        self._num_decodes = batch.num_decodes
        self._seq_lens = batch.seq_lens
        self._plans = [
            self._plan(batch, table, group)
            for table, group in enumerate(group for group in self.layout.groups for _ in range(group.tables))
        ]

    def _plan(self, batch: Batch, table: int, kv_group: KvGroup) -> _Plan:
        size, tables = self.block_size, batch.block_tables[table]
        private = np.zeros(len(batch.slots), dtype=np.int64)
        plan = _Plan(batch.slot_mapping[table], tables, private, [])
        for group in prefix_groups(batch, tables, size, MIN_GROUP_ROWS, MIN_SAVED_BLOCKS):
            private[group.rows] = group.depth * size
            tokens = np.concatenate(
                [np.arange(batch.query_starts[row], batch.query_starts[row + 1]) for row in group.rows]
            )
            _add_dense(plan, tokens, group.blocks, 0, np.full(len(tokens), group.depth * size))
        for row in range(batch.num_decodes, len(batch.slots)):
            start, stop = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
            for tile in range(start, stop, QUERY_TILE):
                tokens = np.arange(tile, min(tile + QUERY_TILE, stop))
                seen = int(kv_group.first_seen(batch.positions[tile]))
                first = max(int(private[row]), seen // size * size)
                high = batch.positions[tokens] + 1 - first
                last = -(-(int(high[-1]) + first) // size)
                _add_dense(plan, tokens, tables[row, first // size : last].astype(np.int64), first, high)
        return plan

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        plan, pages = self._plans[self.layout.tables[call.layer]], self.pages[call.layer]
        if self.layers[call.layer].source is None:
            write_pages(*map(elements, (k.to(pages[0].dtype), v.to(pages[1].dtype), *pages)), plan.slot_mapping)
        out = np.zeros((q.shape[0], q.shape[1], pages[1].shape[-1]), dtype=np.float32)
        lse = np.full(out.shape[:2], NEGATIVE, dtype=np.float32)
        self._decode(call, plan, q, pages, out, lse)
        for dense in plan.dense:
            self._attend_dense(call, dense, q, pages, out, lse)
        result = torch.empty(out.shape, dtype=q.dtype)
        sinks = NO_SINKS if call.sinks is None else call.sinks.float().numpy()
        finish(out, lse, sinks, elements(result))
        return result

    def _decode(
        self,
        call: LayerCall,
        plan: _Plan,
        q: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        out: np.ndarray,
        lse: np.ndarray,
    ) -> None:
        rows = self._num_decodes
        if not rows:
            return
        last = self._seq_lens[:rows]
        first = plan.private[:rows]
        if call.window is not None:
            first = np.maximum(first, last - call.window)
        queries = elements(q[:rows].contiguous())
        k_pages, v_pages = map(elements, pages)
        softcap = call.softcap or 0.0
        kernel = paged_decode(q.shape[1] // k_pages.shape[1], k_pages.shape[3], v_pages.shape[3])

        def span(start: int, stop: int) -> None:
            kernel(
                queries, k_pages, v_pages, plan.tables, first, last, call.scale, softcap, out, lse, start, stop
            )  # fmt: skip

        if self._pool is None or rows == 1:
            span(0, rows)
        else:
            bounds = _even_spans(last - first, self._threads)
            list(self._pool.map(span, bounds[:-1], bounds[1:]))

    def _attend_dense(
        self,
        call: LayerCall,
        dense: _Dense,
        q: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        out: np.ndarray,
        lse: np.ndarray,
    ) -> None:
        low = dense.low
        if call.window is not None:
            low = np.maximum(low, self._positions[dense.tokens] - call.window + 1 - dense.first)
            if (low >= dense.high).all():
                return
        k_pages, v_pages = pages
        kv_heads, value_dim = v_pages.shape[1], v_pages.shape[3]
        group = q.shape[1] // kv_heads
        keys = k_pages[dense.blocks].transpose(0, 1).reshape(kv_heads, -1, k_pages.shape[3]).to(q.dtype)
        values = v_pages[dense.blocks].transpose(0, 1).reshape(kv_heads, -1, value_dim).to(q.dtype)
        for start in range(0, len(dense.tokens), QUERY_TILE):
            tile = slice(start, start + QUERY_TILE)
            tokens = dense.tokens[tile]
            queries = q[dense.index[tile]].view(len(tokens), kv_heads, group, -1).transpose(0, 1)
            weights = torch.bmm(queries.reshape(kv_heads, len(tokens) * group, -1), keys.transpose(1, 2))
            part_lse = np.empty(weights.shape[:2], dtype=np.float32)
            softmax_rows(
                elements(weights), low[tile], dense.high[tile], call.scale, call.softcap or 0.0, group, part_lse
            )
            merge_part(elements(torch.bmm(weights, values)), part_lse, tokens, out, lse)


def _add_dense(plan: _Plan, tokens: np.ndarray, blocks: np.ndarray, first: int, high: np.ndarray) -> None:
    low = np.zeros(len(tokens), dtype=np.int64)
    plan.dense.append(
        _Dense(tokens, torch.from_numpy(tokens), torch.from_numpy(blocks), first, low, high.astype(np.int64))
    )


def _even_spans(work: np.ndarray, count: int) -> list[int]:
    """Bounds of `count` runs of rows with about the same sum of `work`."""
    total = np.cumsum(work)
    cuts = np.searchsorted(total, total[-1] * np.arange(1, count) / count) + 1
    return [0, *np.minimum(cuts, len(work)).tolist(), len(work)]

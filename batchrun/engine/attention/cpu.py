"""Attention for the CPU: pages are read where they lie, shared pages once for all rows that share them.

A step is cut into spans: tokens that attend to the same run of blocks. The rows of a prefix group attend to their
shared blocks in one span; every row attends to the rest of its own blocks in another, which goes on from the state that
the shared part left. One kernel takes both, for prompts and for decoding alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from batchrun.engine.attention.base import AttentionBackend, LayerCall, LayerGeometry, zero_pages
from batchrun.engine.attention.prefix import prefix_groups
from batchrun.engine.batch import Batch
from batchrun.engine.kv_layout import KvLayout
from batchrun.engine.staging import Staging
from batchrun_kernels.cpu.amx import has_matrix_unit
from batchrun_kernels.cpu.attention import BLOCK, END, FIRST, LAST, PageShape, attend, write_int8_pages, write_pages
from batchrun_kernels.cpu.scalar import elements
from batchrun_kernels.cpu.team import Team

MIN_GROUP_ROWS = 4  # fewer rows gain less from reading shared pages together than a second span costs
MIN_SAVED_BLOCKS = 16
SPAN_TOKENS = 64  # of a span at most, so that threads can share a long prompt
TEAM_PARTS, TEAM_PAIRS = 4, 2**10  # parts of each thread of a team, whose hand-over costs little, and from when on
PARALLEL_PAIRS = 2**15  # pairs of query token and key in a step from which threads are worth waking
NO_SINKS = np.empty(0, dtype=np.float32)


class Parts(NamedTuple):
    """Spans int64 [S, 6] in parts of about equal work: part i is spans[cuts[i]:cuts[i + 1]]. No spans: no parts."""

    spans: np.ndarray
    cuts: np.ndarray  # int64

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.spans[a:b] for a, b in pairwise(self.cuts.tolist()))


@dataclass(slots=True)
class Plan:
    """What the layers of one block table share in a step."""

    slot_mapping: np.ndarray  # int64 [T]
    tables: np.ndarray  # int32 [R, B]
    order: np.ndarray  # int64 [N]: the batch's tokens, then those of the groups
    joined: np.ndarray  # uint8 [T]: 1 for tokens of a group
    shared: Parts  # which must be done before ...
    own: Parts  # ... these
    words: np.ndarray | None = None  # all this as compiled layers take it


class Pages(NamedTuple):
    """KV of a layer, and what `attend` is compiled for."""

    keys: np.ndarray
    values: np.ndarray
    scales: np.ndarray
    shape: PageShape
    sizes: np.ndarray


class CpuAttention(AttentionBackend):
    """The pages of a layer are packed as batchrun_kernels/cpu/attention.py says."""

    name = "cpu"
    int8 = False  # whether pages hold 8 bits and scales, instead of the model's type

    def __init__(
        self, layers: list[LayerGeometry], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        self.layout = KvLayout.of(layers)
        self.block_size = block_size
        self.dtype = dtype
        inner = 1 if dtype == torch.float32 else 2
        shapes = [
            PageShape(block_size, page.num_kv_heads, page.key_dim, page.value_dim, inner) for page in self.layout.pages
        ]
        held = torch.int8 if self.int8 else dtype
        pages = [
            Pages(
                elements(zero_pages((num_blocks, *shape.keys), held, device)),
                elements(zero_pages((num_blocks, *shape.values), held, device)),
                np.zeros((num_blocks if self.int8 else 0, *shape.scales), dtype=np.float32),
                shape,
                shape.sizes(dtype, not self.int8 and has_matrix_unit()),
            )
            for shape in shapes
        ]
        self._pages = [pages[place] for place in self.layout.places]
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads) if self._threads > 1 else None
        self.team: Team | None = None  # of compiled layers
        self.state: tuple[np.ndarray, np.ndarray, np.ndarray] = _new_state((0, 0, 0))

    def pages(self, layer: int) -> Pages:
        """Those of a layer."""
        return self._pages[layer]

    def plan(self, layer: int) -> Plan:
        """What a layer shares with others in this step."""
        return self._plans[self.layout.tables[layer]]

    def begin(self, batch: Batch, staging: Staging | None = None) -> None:
        self.positions = batch.positions
        self._plans = [self._plan(batch, table) for table in range(self.layout.num_tables)]

    def _plan(self, batch: Batch, table: int) -> Plan:
        size, tables, starts = self.block_size, batch.block_tables[table], batch.query_starts
        order, joined = [np.arange(batch.num_tokens)], np.zeros(batch.num_tokens, dtype=np.uint8)
        first_block = np.zeros(len(batch.slots), dtype=np.int64)
        shared, total = [np.empty((0, 6), dtype=np.int64)], batch.num_tokens
        for group in prefix_groups(batch, tables, size, MIN_GROUP_ROWS, MIN_SAVED_BLOCKS):
            tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in group.rows])
            order.append(tokens)
            joined[tokens] = 1
            first_block[group.rows] = group.depth
            shared.append(_spans(total, total + len(tokens), int(group.rows[0]), 0, group.depth, 0))
            total += len(tokens)
        last_block = -(-batch.seq_lens // size)
        own = [_single_spans(batch.num_decodes, first_block, last_block)]
        own += [
            _spans(int(starts[row]), int(starts[row + 1]), row, int(first_block[row]), int(last_block[row]), 1)
            for row in range(batch.num_decodes, len(batch.slots))
        ]
        return Plan(
            np.ascontiguousarray(batch.slot_mapping[table]),
            np.ascontiguousarray(tables),
            np.concatenate(order),
            joined,
            self._split(np.concatenate(shared)),
            self._split(np.concatenate(own)),
        )

    def _split(self, spans: np.ndarray) -> Parts:
        """The spans in as many parts of about equal work as threads are worth it."""
        if not len(spans):
            return Parts(spans, np.zeros(1, dtype=np.int64))
        pairs = np.cumsum((spans[:, LAST] - spans[:, FIRST]) * (spans[:, END] - spans[:, BLOCK])) * self.block_size
        count, worth = self._threads, PARALLEL_PAIRS
        if self.team is not None:
            count, worth = TEAM_PARTS * self.team.threads, TEAM_PAIRS
        if count == 1 or pairs[-1] < worth:
            return Parts(spans, np.array([0, len(spans)]))
        cuts = np.searchsorted(pairs, pairs[-1] * np.arange(1, count) / count) + 1
        return Parts(spans, np.unique(np.concatenate([[0], cuts, [len(spans)]]).clip(0, len(spans))))

    def make_state(self, shape: tuple[int, int, int]) -> None:
        """Have room for what shared spans leave, [T, Hq, width]."""
        if self.state[2].shape != shape:
            self.state = _new_state(shape)

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        plan = self.plan(call.layer)
        k_pages, v_pages, scales, shape, sizes = self._pages[call.layer]
        if self.layers[call.layer].source is None:
            keys, values = (elements(x.to(self.dtype)) for x in (k, v))
            if self.int8:
                write_int8_pages(keys, values, k_pages, v_pages, scales, plan.slot_mapping, self.block_size)
            else:
                write_pages(keys, values, k_pages, v_pages, plan.slot_mapping, self.block_size)
        queries = elements(q.to(self.dtype))
        result = torch.empty((*q.shape[:2], shape.value_dim), dtype=self.dtype)
        if len(plan.shared.spans):
            self.make_state((*q.shape[:2], shape.values[2]))
        sinks = NO_SINKS if call.sinks is None else call.sinks.float().numpy()
        target, window, softcap = elements(result), call.window or 0, call.softcap or 0.0

        def run(spans: np.ndarray) -> None:
            attend(
                sizes, self.block_size, queries, k_pages, v_pages, scales, plan.tables, plan.order, self.positions,
                window, call.scale, softcap, sinks, spans, plan.joined, *self.state, target,
            )  # fmt: skip

        for parts in (plan.shared, plan.own):
            if self._pool is not None and len(parts.cuts) > 2:
                list(self._pool.map(run, iter(parts)))
            elif len(parts.spans):
                run(parts.spans)
        return result.to(q.dtype)


class Int8Attention(CpuAttention):
    """The same over pages of half the size."""

    int8 = True


def _spans(first: int, last: int, row: int, block: int, end: int, final: int) -> np.ndarray:
    """int64 [S, 6]: places [first, last) of `order` and blocks [block, end) of a row."""
    starts = np.arange(first, last, SPAN_TOKENS)
    spans = np.empty((len(starts), 6), dtype=np.int64)
    spans[:, FIRST], spans[:, LAST] = starts, np.minimum(starts + SPAN_TOKENS, last)
    spans[:, LAST + 1 :] = row, block, end, final
    return spans


def _single_spans(rows: int, first_block: np.ndarray, last_block: np.ndarray) -> np.ndarray:
    """The own spans of the first `rows` rows, which have one query token each."""
    row = np.arange(rows)
    return np.stack([row, row + 1, row, first_block[:rows], last_block[:rows], np.ones_like(row)], axis=1)


def _new_state(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What shared spans leave for the own ones of a token: tops, totals [T, Hq] and sums [T, Hq, width], float32."""
    return (
        np.empty(shape[:2], dtype=np.float32),
        np.empty(shape[:2], dtype=np.float32),
        np.empty(shape, dtype=np.float32),
    )

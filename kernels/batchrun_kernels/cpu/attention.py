"""Attention over paged KV on the CPU: pages are read where they lie, by as many query rows at once as share them.

Pages are packed for the products of tile.py. With P elements side by side (2 in half precision, 1 in float32):
K [blocks, kv heads, panels, pairs, lanes, P], the token slots of a block lying in panels of up to 64 lanes;
V [blocks, kv heads, slots / P, width, P], `slots` and `width` rounded up to whole vectors. Half-precision arrays come
as their bits (see scalar.py). Query head h reads kv head h // G, G = query heads / kv heads.

Pages of int8 have scales beside them, float32 [blocks, kv heads, 2, slots]: of K and V of each token and head. A score
is multiplied with its key's scale and a weight with its value's, so that no element is scaled by itself. Other pages
have no blocks of scales.

Online softmax: Milakov and Gimelshein 2018 (arXiv 1805.02867), section 3. A shared prefix is attended to once for all
rows that have it: Juravsky et al. 2024 (Hydragen, arXiv 2402.05099), section 3.1; instead of merging both parts at the
end, the second goes on from the state of the first.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from batchrun_kernels.cpu import amx
from batchrun_kernels.cpu.emit import LANES, pairs_at_full_rate
from batchrun_kernels.cpu.scalar import LOG2E, NEGATIVE, as_type, exp2, larger, narrow, widen
from batchrun_kernels.cpu.softmax import RUN, largest, weigh
from batchrun_kernels.cpu.tile import (
    PANEL_LANES,
    ROWS,
    add_values,
    drop_tiles,
    operands,
    rows_at_once,
    score_rows,
    sizes,
    use_tiles,
)

Array = np.ndarray
ROUND_SLOTS = RUN  # keys whose scores are looked at together: fewer, and their maxima and sums cost more than the rest

# Columns of a span: tokens order[FIRST:LAST] attend to blocks [BLOCK, END) of a row of the block tables.
# FINAL 1: these are the last keys they see, and the result is written; 0: their state is kept.
FIRST, LAST, TABLE, BLOCK, END, FINAL = range(6)


class PageShape(NamedTuple):
    """How the KV of a layer is packed."""

    block_size: int
    kv_heads: int
    key_dim: int
    value_dim: int
    inner: int  # elements side by side: 2 in half precision, 1 in float32

    @property
    def lanes(self) -> int:
        """Token slots of a panel."""
        return min(PANEL_LANES * LANES, -(-self.block_size // LANES) * LANES)

    @property
    def panels(self) -> int:
        return -(-self.block_size // self.lanes)

    @property
    def keys(self) -> tuple[int, ...]:
        """Shape of one block of K."""
        return self.kv_heads, self.panels, -(-self.key_dim // self.inner), self.lanes, self.inner

    @property
    def values(self) -> tuple[int, ...]:
        """Shape of one block of V."""
        width = -(-self.value_dim // LANES) * LANES
        return self.kv_heads, self.panels * self.lanes // self.inner, width, self.inner

    @property
    def scales(self) -> tuple[int, ...]:
        """Shape of the scales of one block of int8 K and V."""
        return self.kv_heads, 2, self.panels * self.lanes

    def sizes(self, dtype: torch.dtype, matrix_unit: bool = False, pairs_unit: bool | None = None) -> Array:
        """What `attend` is compiled for, for elements of a type.

        Of bfloat16, `matrix_unit` is with AMX, if the shape fits it, and `pairs_unit` with AVX512-BF16, which is left
        to the processor unless it is given.
        """
        _, panels, pairs, lanes, inner = self.keys
        slots, width = panels * lanes, self.values[2]
        fits = pairs % amx.TILE == 0 and all(size % amx.COLUMNS == 0 for size in (lanes, slots, width))
        tiles = matrix_unit and fits and dtype == torch.bfloat16
        if pairs_unit is None:
            pairs_unit = pairs_at_full_rate()
        halves = tiles or (pairs_unit and dtype == torch.bfloat16)
        rows, operand = amx.ROWS if tiles else ROWS, 2 if halves else 4  # bytes of what a panel is multiplied with
        return sizes(rows=rows, pairs=pairs, lanes=lanes, slots=slots, width=width, inner=inner, operand=operand)


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def write_pages(k: Array, v: Array, k_pages: Array, v_pages: Array, slot_mapping: Array, block_size: int) -> None:
    """Put k [T, Hkv, Dk] and v [T, Hkv, Dv] (element type of the pages) at slots [T] = block * block size + offset."""
    lanes, inner = k_pages.shape[4], k_pages.shape[5]
    for t in range(k.shape[0]):
        block, offset = slot_mapping[t] // block_size, slot_mapping[t] % block_size
        panel, lane = offset // lanes, offset % lanes
        for h in range(k.shape[1]):
            source = k[t, h]
            for i in range(inner):
                target = k_pages[block, h, panel, :, lane, i]
                for d in range(source[i::inner].shape[0]):
                    target[d] = source[d * inner + i]
            source, target = v[t, h], v_pages[block, h, offset // inner, :, offset % inner]
            for d in range(source.shape[0]):
                target[d] = source[d]


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def write_int8_pages(
    k: Array, v: Array, k_pages: Array, v_pages: Array, scales: Array, slot_mapping: Array, block_size: int
) -> None:
    """The same for int8 pages: each head of a token is rounded to a scale that brings its largest element to 127."""
    lanes, inner = k_pages.shape[4], k_pages.shape[5]
    for t in range(k.shape[0]):
        block, offset = slot_mapping[t] // block_size, slot_mapping[t] % block_size
        panel, lane = offset // lanes, offset % lanes
        for h in range(k.shape[1]):
            source = k[t, h]
            inverse = _largest(source)
            scales[block, h, 0, offset] = np.float32(1.0) / inverse
            for i in range(inner):
                target = k_pages[block, h, panel, :, lane, i]
                for d in range(source[i::inner].shape[0]):
                    target[d] = _whole(source[d * inner + i], inverse)
            source, target = v[t, h], v_pages[block, h, offset // inner, :, offset % inner]
            inverse = _largest(source)
            scales[block, h, 1, offset] = np.float32(1.0) / inverse
            for d in range(source.shape[0]):
                target[d] = _whole(source[d], inverse)


@njit(inline="always", fastmath=True, error_model="numpy")
def _largest(x):
    """127 / the largest |element|."""
    largest = np.float32(1e-30)
    for d in range(x.shape[0]):
        largest = larger(largest, abs(widen(x[d])))
    return np.float32(127.0) / largest


@njit(inline="always", fastmath=True, error_model="numpy")
def _whole(x, inverse):
    return np.int8(np.int32(np.floor(widen(x) * inverse + np.float32(0.5))))


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def attend(
    sizes, block_size, q, k_pages, v_pages, page_scales, tables, order, positions, window, scale, softcap, sinks,
    spans, joined, tops, totals, sums, result,
):  # fmt: skip
    """Attention of the query tokens of `spans` int64 [S, 6].

    q [T, Hq, Dk], result [T, Hq, Dv] in its type; tables int32 [R, B]; order int64 [N]: tokens that spans name;
    positions int64 [T]; window 0 and softcap 0 are none; sinks float32 [Hq], or [0] for none. Tokens with joined[t]
    have a span that is not final before their final one, and their state in between is kept: tops [T, Hq] in units of
    log2, totals [T, Hq], sums [T, Hq, width], all float32.
    Bytes: each visible K and V element once for every 12 query rows, 6 with AVX2, or 32 with AMX. FLOPs: 2 (Dk + Dv)
    per query head and visible key.
    """
    kv_heads, panels, pairs, lanes, inner = (
        k_pages.shape[1], k_pages.shape[2], k_pages.shape[3], k_pages.shape[4], k_pages.shape[5]
    )  # fmt: skip
    slots, width = v_pages.shape[2] * inner, v_pages.shape[3]
    group = q.shape[1] // kv_heads
    # Blocks whose slots fill their lanes lie end to end in a line of scores.
    together = max(1, ROUND_SLOTS // slots) if slots == block_size else 1
    stride = together * slots
    k_block, v_block = panels * pairs * lanes * inner, slots * width
    most = rows_at_once(sizes)
    kind = operands(sizes, q)
    queries = np.zeros((most, pairs * inner), dtype=kind.dtype)
    scores = np.zeros((most, stride), dtype=np.float32)
    weights = np.zeros((most, stride), dtype=kind.dtype)
    out = np.zeros((most, width), dtype=np.float32)
    top, total = np.empty(most, dtype=np.float32), np.empty(most, dtype=np.float32)
    scaled = page_scales.shape[0] > 0
    k_scales = np.empty(stride if scaled else 0, dtype=np.float32)
    v_scales = np.empty(stride if scaled else 0, dtype=np.float32)
    lows, highs = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    factor = LOG2E if softcap > 0 else np.float32(scale) * LOG2E
    use_tiles(sizes)
    for s in range(spans.shape[0]):
        span = spans[s]
        table, final = tables[span[TABLE]], span[FINAL]
        least, end = span[BLOCK] * block_size, span[END] * block_size
        count = (span[LAST] - span[FIRST]) * group
        for h in range(kv_heads):
            for start in range(0, count, most):
                rows = min(most, count - start)
                low, high = end, least
                for r in range(rows):
                    t, head = order[span[FIRST] + (start + r) // group], h * group + (start + r) % group
                    source, target = q[t, head], queries[r]
                    for d in range(source.shape[0]):
                        target[d] = as_type(source[d], target[d])
                    highs[r] = min(positions[t] + 1, end)
                    lows[r] = min(max(least, positions[t] + 1 - window), highs[r]) if window else least
                    low, high = min(low, lows[r]), max(high, highs[r])
                    row = out[r]
                    if final and joined[t]:
                        top[r], total[r], kept = tops[t, head], totals[t, head], sums[t, head]
                        for d in range(row.shape[0]):
                            row[d] = kept[d]
                    else:
                        top[r], total[r] = NEGATIVE, np.float32(0.0)
                        for d in range(row.shape[0]):
                            row[d] = np.float32(0.0)
                first, last = low // block_size, (high + block_size - 1) // block_size
                for block in range(first, last, together):
                    blocks = min(together, last - block)
                    for j in range(blocks):
                        at = (np.int64(table[block + j]) * kv_heads + h) * k_block
                        coming = _coming(tables, spans, s, first, last, block + j + together, h, kv_heads) * k_block
                        for panel in range(panels):
                            skip = panel * pairs * lanes * inner
                            score_rows(sizes, queries, k_pages, at + skip, scores, j * slots + panel * lanes, stride,
                                       rows, coming + skip)  # fmt: skip
                        if scaled:
                            kept = page_scales[table[block + j], h]
                            k_scales[j * slots : (j + 1) * slots] = kept[0]
                            v_scales[j * slots : (j + 1) * slots] = kept[1]
                    base = block * block_size
                    for r in range(rows):
                        a, b = max(lows[r] - base, 0), min(highs[r] - base, blocks * block_size)
                        before = top[r]
                        if scaled or softcap > 0:
                            _prepare(scores[r], k_scales, scale, softcap)
                        top[r], added = _weigh(
                            scores, weights, v_scales, v_pages, r * stride, a, b, stride, factor, before
                        )
                        if top[r] > before:
                            shrink, row = exp2(before - top[r]), out[r]
                            total[r] *= shrink
                            for d in range(row.shape[0]):
                                row[d] *= shrink
                        total[r] += added
                    for j in range(blocks):
                        at = (np.int64(table[block + j]) * kv_heads + h) * v_block
                        coming = _coming(tables, spans, s, first, last, block + j + together, h, kv_heads) * v_block
                        add_values(sizes, weights, j * slots, stride, v_pages, at, out, rows, coming)
                for r in range(rows):
                    t, head = order[span[FIRST] + (start + r) // group], h * group + (start + r) % group
                    row = out[r]
                    if final:
                        target = result[t, head]
                        by = _share(top[r], total[r], sinks, head)
                        for d in range(target.shape[0]):
                            target[d] = narrow(row[d] * by, target[d])
                    else:
                        tops[t, head], totals[t, head], kept = top[r], total[r], sums[t, head]
                        for d in range(row.shape[0]):
                            kept[d] = row[d]
    drop_tiles(sizes)


@njit(inline="always")
def _coming(tables, spans, s, first, last, block, head, kv_heads):
    """Place of the page that is read about `together` pages after this one, so that it can be fetched meanwhile."""
    table = tables[spans[s, TABLE]]
    if block < last:
        page = np.int64(table[block])
    elif head + 1 < kv_heads:
        page, head = np.int64(table[min(first + block - last, last - 1)]), head + 1
    elif s + 1 < spans.shape[0]:
        coming = spans[s + 1]
        page, head = np.int64(tables[coming[TABLE], min(coming[BLOCK] + block - last, coming[END] - 1)]), 0
    else:
        page = np.int64(table[last - 1])
    return max(page, 0) * kv_heads + head


@njit(inline="always", fastmath=True, error_model="numpy")
def _prepare(scores, k_scales, scale, softcap):
    """Scores times the scales of int8 keys, and what a soft cap makes of them."""
    if k_scales.shape[0]:
        for j in range(scores.shape[0]):
            scores[j] *= k_scales[j]
    if softcap > 0:
        for j in range(scores.shape[0]):
            scores[j] = np.float32(softcap) * np.float32(math.tanh(scores[j] * np.float32(scale) / np.float32(softcap)))


@njit(inline="always", error_model="numpy")
def _weigh(scores, weights, v_scales, v_pages, at, a, b, stride, factor, floor):
    """Weights of slots [a, b) of `stride` from element `at` on, 0 for the others: (largest score >= floor, their sum).

    Scores count in units of log2, times `factor`.
    """
    b = max(a, b)
    if stride == RUN:
        if a <= 0 and b >= RUN:
            top = largest(scores, at, a, b, factor, floor, RUN, 1)
            return top, weigh(scores, at, a, b, factor, top, weights, v_scales, v_pages, RUN, 1)
        top = largest(scores, at, a, b, factor, floor, RUN, 0)
        return top, weigh(scores, at, a, b, factor, top, weights, v_scales, v_pages, RUN, 0)
    top, total = floor, np.float32(0.0)
    for j in range(0, stride, LANES):
        top = largest(scores, at + j, a - j, b - j, factor, top, LANES, 0)
    for j in range(0, stride, LANES):
        total += weigh(scores, at + j, a - j, b - j, factor, top, weights, v_scales[j:], v_pages, LANES, 0)
    return top, total


@njit(inline="always", fastmath=True, error_model="numpy")
def _share(top: Any, total: Any, sinks: Array, head: int) -> Any:
    """What the weighted sum is multiplied with: 1 / (sum of the weights, and of the head's sink)."""
    kept, whole = np.float32(1.0), total
    if sinks.shape[0]:
        sink = sinks[head] * LOG2E
        highest = larger(top, sink)
        kept = exp2(top - highest)
        whole = total * kept + exp2(sink - highest)
    return kept / whole if whole > 0 else np.float32(0.0)

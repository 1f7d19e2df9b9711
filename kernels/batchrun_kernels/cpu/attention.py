"""Attention over paged KV on the CPU, in parts that are merged by log-sum-exp.

Pages: K [blocks, kv heads, block size, Dk] and V [blocks, kv heads, block size, Dv]. Half-precision arrays come as
their bits (see scalar.py). Query head h reads kv head h // G, G = query heads / kv heads. `lse` is the natural log
of the sum of exp(scaled scores), NEGATIVE where nothing is visible. Online softmax: Milakov and Gimelshein 2018
(arXiv 1805.02867), section 3; merging of parts: Juravsky et al. 2024 (Hydragen, arXiv 2402.05099), section 3.1.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from batchrun_kernels.cpu.scalar import LN2, LOG2E, NEGATIVE, exp2, larger, narrow, widen
from batchrun_kernels.cpu.vector import add_weighted_rows, dot_rows

Array = np.ndarray


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def write_pages(k: Array, v: Array, k_pages: Array, v_pages: Array, slot_mapping: Array) -> None:
    """Put k [T, Hkv, Dk] and v [T, Hkv, Dv] (element type of the pages) at slots [T] = block * block size + offset."""
    size = v_pages.shape[2]
    for t in range(k.shape[0]):
        block, offset = slot_mapping[t] // size, slot_mapping[t] % size
        for h in range(k.shape[1]):
            # Element by element: numba's slice assignment checks for overlap each time, at ten times the cost.
            source, target = k[t, h], k_pages[block, h, offset]
            for d in range(target.shape[0]):
                target[d] = source[d]
            source, target = v[t, h], v_pages[block, h, offset]
            for d in range(target.shape[0]):
                target[d] = source[d]


@lru_cache
def paged_decode(group: int, key_dim: int, value_dim: int) -> Any:
    """The decode kernel for G = `group` query heads per kv head: compiled for its sizes, which unrolls its loops.

    f(q, k_pages, v_pages, block_tables, first, last, scale, softcap, out, lse, start, stop) attends with rows
    [start, stop) of single queries q [R, Hq, Dk] to key positions [first[r], last[r]) of their pages.
    block_tables int32 [R, B]; softcap 0 is none; writes out float32 [R, Hq, Dv] and lse float32 [R, Hq].
    Bytes: every visible K and V element once. FLOPs: 2 Hq (Dk + Dv) per position.
    """
    dot = dot_rows(group, key_dim)
    add_weighted = add_weighted_rows(group, value_dim)

    @njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
    def kernel(q, k_pages, v_pages, block_tables, first, last, scale, softcap, out, lse, start, stop):
        kv_heads, size = k_pages.shape[1], k_pages.shape[2]
        queries = np.empty((kv_heads, group, key_dim), dtype=np.float32)
        scores = np.empty((group, size), dtype=np.float32)
        shrink = np.empty(group, dtype=np.float32)
        highest = np.empty((kv_heads, group), dtype=np.float32)
        total = np.empty((kv_heads, group), dtype=np.float32)
        for r in range(start, stop):
            highest[:] = NEGATIVE
            total[:] = np.float32(0.0)
            out[r] = np.float32(0.0)
            for h in range(kv_heads):
                for g in range(group):
                    for d in range(key_dim):
                        queries[h, g, d] = widen(q[r, h * group + g, d]) * np.float32(scale)
            for b in range(first[r] // size, (last[r] + size - 1) // size):
                low, high = max(0, first[r] - b * size), min(size, last[r] - b * size)
                count = high - low
                for h in range(kv_heads):
                    at = (np.int64(block_tables[r, b]) * kv_heads + h) * size + low
                    dot(queries, h * group * key_dim, k_pages, at * key_dim, count, scores, 0, size)
                    for g in range(group):
                        row = scores[g, :count]
                        if softcap > 0:
                            cap_scores(row, softcap)
                        top, added = exponentials(row, highest[h, g])
                        shrink[g] = exp2(highest[h, g] - top)
                        highest[h, g] = top
                        total[h, g] = total[h, g] * shrink[g] + added
                    place = (r * kv_heads + h) * group * value_dim
                    add_weighted(scores, 0, size, v_pages, at * value_dim, count, out, place, shrink, 0)
            for h in range(kv_heads):
                for g in range(group):
                    head = h * group + g
                    lse[r, head] = log_sum(highest[h, g], total[h, g])
                    inverse = np.float32(1.0) / total[h, g] if total[h, g] > 0 else np.float32(0.0)
                    for d in range(value_dim):
                        out[r, head, d] *= inverse

    return kernel


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def cap_scores(row: Array, softcap: float) -> None:
    """softcap * tanh(score / softcap), in place."""
    for j in range(row.shape[0]):
        row[j] = np.float32(softcap) * np.float32(math.tanh(row[j] / np.float32(softcap)))


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def exponentials(row: Array, floor: Any) -> Any:
    """Natural scores to exp(score - top) in place, top in units of log2: (top, sum). `top` is at least `floor`."""
    top = floor
    for j in range(row.shape[0]):
        row[j] *= LOG2E
    for j in range(row.shape[0]):
        top = larger(top, row[j])
    total = np.float32(0.0)
    for j in range(row.shape[0]):
        p = exp2(row[j] - top)
        row[j] = p
        total += p
    return top, total


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def log_sum(top: Any, total: Any) -> Any:
    """Natural log of total * 2**top; NEGATIVE for an empty sum."""
    return (top + np.float32(np.log2(total))) * LN2 if total > 0 else NEGATIVE


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def softmax_rows(scores: Array, low: Array, high: Array, scale: float, softcap: float, group: int, lse: Array) -> None:
    """Scores [H, M * group, L] to weights in place: row m * group + g sees keys [low[m], high[m]), others get 0.

    Writes lse float32 [H, M * group].
    """
    length = scores.shape[2]
    buffer = np.empty(length, dtype=np.float32)
    zero = narrow(np.float32(0.0), scores[0, 0, 0])
    for h in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            b = min(high[i // group], length)
            a = min(max(low[i // group], 0), b)
            # Loops run over slices from 0: LLVM vectorises no index that it must check for being negative.
            line = scores[h, i, a:b]
            row = buffer[: line.shape[0]]
            for j in range(line.shape[0]):
                row[j] = widen(line[j]) * np.float32(scale)
            if softcap > 0:
                cap_scores(row, softcap)
            top, total = exponentials(row, NEGATIVE)
            inverse = np.float32(1.0) / total if total > 0 else np.float32(0.0)
            scores[h, i, :a] = zero
            scores[h, i, b:] = zero
            for j in range(line.shape[0]):
                line[j] = narrow(row[j] * inverse, zero)
            lse[h, i] = log_sum(top, total)


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def merge_part(part: Array, part_lse: Array, tokens: Array, out: Array, lse: Array) -> None:
    """Merge part [Hkv, M * G, Dv], part_lse [Hkv, M * G] into out float32 [T, Hq, Dv], lse [T, Hq] at tokens [M]."""
    group = part.shape[1] // tokens.shape[0]
    for h in range(part.shape[0]):
        for i in range(part.shape[1]):
            t, head = tokens[i // group], h * group + i % group
            old, new = lse[t, head], part_lse[h, i]
            top = max(old, new)
            a, b = exp2((old - top) * LOG2E), exp2((new - top) * LOG2E)
            share = b / (a + b)
            for d in range(part.shape[2]):
                out[t, head, d] += share * (widen(part[h, i, d]) - out[t, head, d])
            lse[t, head] = top + np.float32(np.log2(a + b)) * LN2


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def finish(out: Array, lse: Array, sinks: Array, result: Array) -> None:
    """Round out float32 [T, Hq, Dv] into result (elements); sinks float32 [Hq] join the softmax, [0] is none."""
    for t in range(out.shape[0]):
        for h in range(out.shape[1]):
            share = np.float32(1.0)
            if sinks.shape[0]:
                top = max(lse[t, h], sinks[h])
                kept = exp2((lse[t, h] - top) * LOG2E)
                share = kept / (kept + exp2((sinks[h] - top) * LOG2E))
            for d in range(out.shape[2]):
                result[t, h, d] = narrow(out[t, h, d] * share, result[t, h, d])

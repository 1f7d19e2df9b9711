"""Attention of 1 to 8 queries per sequence over keys and values in pages: decoding, with speculation or without.

Flash-Decoding (Dao et al., 2023): the keys of a sequence are cut into chunks that programs reduce independently. The
program that finishes a sequence's last chunk puts all of its chunks together by their log-sum-exp, in the order of the
chunks, so that there is no second launch and the result does not depend on who was last. The grid is of a fixed size
and its programs take work from a list in device memory, as they take lengths: a launch can stand in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost
from batchrun_kernels.decode_plan import DecodePlan
from batchrun_kernels.merge_runs import LOG2E
from batchrun_kernels.paged import (
    KvPages,
    Rows,
    Scoring,
    attend_keys,
    attention_shape,
    check,
    head_dim_of,
    normalised,
    output,
    page_shape,
    scales,
    tile_of,
)
from batchrun_kernels.precision import product_precision
from batchrun_kernels.tuned import tuned


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    query_starts_ptr,
    query_lens_ptr,
    first_keys_ptr,  # None: all keys that the window leaves
    counts_ptr,  # int32 [2]: units of work, tiles of a chunk
    unit_sequences_ptr,  # int32 [U]
    chunk_starts_ptr,  # int32 [B + 1]: each sequence's first unit
    arrived_ptr,  # int32 [B, PARTS]: chunks that are done; 0 before and after
    runs_ptr,  # fp32 [U, PARTS, ROWS, DV]: results of chunks
    run_lse_ptr,  # fp32 [U, PARTS, ROWS]
    sinks_ptr,  # None: no sinks
    out_ptr,
    lse_ptr,  # None: not wanted
    scale,
    value_scale,
    softcap,
    window,
    q_stride,
    q_head_stride,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    v_block_stride,
    v_token_stride,
    v_head_stride,
    table_stride,
    out_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PARTS: tl.constexpr,  # programs' shares of a chunk: kv heads times tiles of rows
    ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    every_row = tl.arange(0, ROWS)
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    num_items = tl.load(counts_ptr) * PARTS
    chunk_tiles = tl.load(counts_ptr + 1)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        unit = item // PARTS
        part = item % PARTS
        kv_head = part % KV_HEADS
        sequence = tl.load(unit_sequences_ptr + unit).to(tl.int64)
        first_unit = tl.load(chunk_starts_ptr + sequence)
        chunks = tl.load(chunk_starts_ptr + sequence + 1) - first_unit
        length = tl.load(seq_lens_ptr + sequence)
        count = tl.load(query_lens_ptr + sequence)

        row = part // KV_HEADS * ROWS + every_row
        is_row = row < count * GROUP
        token = tl.minimum(row // GROUP, count - 1)
        head = kv_head * GROUP + row % GROUP
        at = length - count + token
        place = (tl.load(query_starts_ptr + sequence) + token).to(tl.int64)
        q_place = q_ptr + (place * q_stride + head * q_head_stride)[:, None] + dk[None, :]
        q = tl.load(q_place, mask=is_row[:, None] & (dk[None, :] < DK), other=0.0)

        low = tl.maximum(length - count - window + 1, 0) if HAS_WINDOW else 0
        if first_keys_ptr is not None:
            low = tl.maximum(low, tl.load(first_keys_ptr + sequence))
        begin = (low // TILE + (unit - first_unit) * chunk_tiles) * TILE
        end = begin + chunk_tiles * TILE
        end = tl.where(unit - first_unit == chunks - 1, length, tl.minimum(end, length))

        peak = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
            peak = tl.where(unit == first_unit, sink, peak)
            total = tl.where(unit == first_unit, 1.0, total)
        acc = tl.full([ROWS, DV_PAD], 0.0, tl.float32)
        peak, total, acc = attend_keys(
            q, at, peak, total, acc, begin, end, low, length, window, scale, softcap,
            block_tables_ptr + sequence * table_stride,
            k_ptr + kv_head * k_head_stride, v_ptr + kv_head * v_head_stride,
            k_block_stride, k_token_stride, v_block_stride, v_token_stride,
            True, HAS_WINDOW, HAS_SOFTCAP, BLOCK_SIZE, TILE, DK, DV, DK_PAD, DV_PAD, PRECISION,
        )  # fmt: skip
        is_last = chunks == 1
        if chunks > 1:
            values, lse = normalised(peak, total, acc)
            run_row = (unit * PARTS + part) * ROWS + every_row.to(tl.int64)
            run_mask = is_row[:, None] & (dv[None, :] < DV)
            tl.store(runs_ptr + run_row[:, None] * DV + dv[None, :], values, mask=run_mask)
            tl.store(run_lse_ptr + run_row, lse, mask=is_row)
            tl.debug_barrier()  # every thread's part is written before one thread says so
            arrived = tl.atomic_add(arrived_ptr + sequence * PARTS + part, 1, sem="acq_rel", scope="gpu")
            is_last = arrived == chunks - 1
            if is_last:
                tl.debug_barrier()
                tl.store(arrived_ptr + sequence * PARTS + part, 0)
                peak = tl.full([ROWS], -float("inf"), tl.float32)
                total = tl.full([ROWS], 0.0, tl.float32)
                acc = tl.full([ROWS, DV_PAD], 0.0, tl.float32)
                for other in range(first_unit, first_unit + chunks):
                    other_row = (other * PARTS + part) * ROWS + every_row.to(tl.int64)
                    run_lse = tl.load(run_lse_ptr + other_row, mask=is_row, other=-float("inf"), cache_modifier=".cg")
                    run_place = runs_ptr + other_row[:, None] * DV + dv[None, :]
                    run = tl.load(run_place, mask=run_mask, other=0.0, cache_modifier=".cg")
                    new_peak = tl.maximum(peak, run_lse * LOG2E)
                    shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                    weight = tl.exp2(run_lse * LOG2E - shift)
                    decay = tl.exp2(peak - shift)
                    total = total * decay + weight
                    acc = acc * decay[:, None] + run * weight[:, None]
                    peak = new_peak
        if is_last:
            values, lse = normalised(peak, total, acc)
            out_place = out_ptr + (place * out_stride + head * out_head_stride)[:, None] + dv[None, :]
            values = (values * value_scale).to(out_ptr.dtype.element_ty)
            tl.store(out_place, values, mask=is_row[:, None] & (dv[None, :] < DV))
            if lse_ptr is not None:
                tl.store(lse_ptr + place * (KV_HEADS * GROUP) + head, lse, mask=is_row)


def paged_decode(
    q: Tensor,
    pages: KvPages,
    rows: Rows,
    scoring: Scoring,
    plan: DecodePlan,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attends with the queries of `rows` in `q` [T, Hq, Dk]; returns `out` [T, Hq, Dv], other tokens of it untouched.

    `plan` is plan_decode's for the same lengths, or for lengths that these have grown from. `lse` [T, Hq] fp32, if
    given, receives the natural log-sum-exp of the scores, sinks included. A query that sees no key gives zeros. q is
    fp32, bf16 or fp16; products are in its dtype, accumulation is fp32. Raises ValueError on shapes, layouts or limits
    that the kernel cannot take.
    """
    heads = q.shape[1]
    lens = {"seq_lens": rows.seq_lens, "query_starts": rows.query_starts, "query_lens": rows.query_lens}
    check(q, pages, rows.block_tables, {**lens, "first_keys": rows.first_keys}, scoring)
    kv_heads, dv = pages.values.shape[2:]
    out = output(q, dv, out)
    if lse is not None and (lse.shape != q.shape[:2] or not lse.is_contiguous() or lse.dtype != torch.float32):
        raise ValueError(f"lse {lse.dtype} {tuple(lse.shape)} must be a contiguous float32 {list(q.shape[:2])}")
    if len(rows.seq_lens) == 0:
        return out
    scale, value_scale = scales(pages, scoring)
    tile = tile_of(head_dim_of(pages), q.element_size())
    _decode_kernel[(plan.programs,)](
        q,
        *pages[:2],
        *rows,
        *plan[:6],
        scoring.sinks,
        out,
        lse,
        scale,
        value_scale,
        1.0 if scoring.softcap is None else scoring.softcap,
        scoring.window or 0,
        *q.stride()[:2],
        *pages.keys.stride()[:3],
        *pages.values.stride()[:3],
        rows.block_tables.stride(0),
        *out.stride()[:2],
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        PARTS=plan.runs.shape[1],
        ROWS=plan.runs.shape[2],
        HAS_WINDOW=scoring.window is not None,
        HAS_SOFTCAP=scoring.softcap is not None,
        TILE=tile,
        **page_shape(pages),
        PRECISION=product_precision(q.dtype),
        **tuned("paged_decode", attention_shape(pages, q.element_size()), q.device, num_warps=4, num_stages=3),
        enable_fp_fusion=True,
    )
    return out


def paged_decode_cost(
    seq_lens: Sequence[int],
    heads: int,
    kv_heads: int,
    dk: int,
    dv: int,
    itemsize: int,
    *,
    queries: int = 1,
    window: int | None = None,
    kv_itemsize: int | None = None,
) -> Cost:
    """Each visible key and value once, q and the output once; partial results of chunks are not counted."""
    keys = sum(min(n, (window or n) + queries - 1) for n in seq_lens)
    pairs = sum(min(n - i, window or n) for n in seq_lens for i in range(queries))
    tokens = len(seq_lens) * queries
    moved = keys * kv_heads * (dk + dv) * (kv_itemsize or itemsize) + tokens * heads * (dk + dv) * itemsize
    return Cost(moved, 2 * pairs * heads * (dk + dv))

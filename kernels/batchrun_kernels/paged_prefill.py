"""Attention of many queries per sequence over keys and values in pages: prompts, whole or in pieces.

FlashAttention-2 (Dao, 2023) over pages: the keys of the new tokens are in their pages already, so old and new ones are
read alike. A program takes `BLOCK_M` rows, of query heads within query tokens, and walks over the keys they see by
tiles of one page; only tiles at the edges of what is seen are masked. A plan, made on the host from the lengths, names
each program's rows, those with the most keys first so that the last programs to end are short ones.

Tiles begin at multiples of their size whatever a program's rows see. So where every tile goes through the masked loop,
a query has the same bits with any number of others beside it: a tile that it sees nothing of leaves its sums as they
are, and there is no second form of the loop, whose arithmetic a compiler may contract in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost
from batchrun_kernels.merge_runs import LOG2E
from batchrun_kernels.paged import (
    KvPages,
    Rows,
    Scoring,
    Upload,
    attend_keys,
    attention_shape,
    check,
    head_dim_of,
    normalised,
    output,
    padded,
    page_shape,
    scales,
    tile_of,
    upload_to,
)
from batchrun_kernels.precision import product_precision
from batchrun_kernels.tuned import tuned


@triton.jit
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    query_starts_ptr,
    query_lens_ptr,
    tiles_ptr,  # int32 [N, 2]: sequence, place among its tiles of BLOCK_M rows
    sinks_ptr,  # None: no sinks
    out_ptr,
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
    BLOCK_M: tl.constexpr,
    INVARIANT: tl.constexpr,  # all tiles are masked
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
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    first_row = tl.load(tiles_ptr + 2 * tile + 1) * BLOCK_M
    length = tl.load(seq_lens_ptr + sequence)
    count = tl.load(query_lens_ptr + sequence)

    row = first_row + tl.arange(0, BLOCK_M)
    is_row = row < count * GROUP
    token = tl.minimum(row // GROUP, count - 1)
    head = kv_head * GROUP + row % GROUP
    at = length - count + token
    place = (tl.load(query_starts_ptr + sequence) + token).to(tl.int64)
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    q_place = q_ptr + (place * q_stride + head * q_head_stride)[:, None] + dk[None, :]
    q = tl.load(q_place, mask=is_row[:, None] & (dk[None, :] < DK), other=0.0)

    # Tiles that some row sees are [begin, end); those from `inner` to `edge` are seen whole by all rows.
    first_at = length - count + first_row // GROUP
    last_at = length - count + tl.minimum((first_row + BLOCK_M - 1) // GROUP, count - 1)
    low = tl.maximum(first_at - window + 1, 0) if HAS_WINDOW else 0
    begin = low // TILE * TILE
    end = last_at + 1
    inner = begin
    if HAS_WINDOW:
        inner = tl.minimum(tl.maximum((last_at - window + TILE) // TILE * TILE, begin), (end + TILE - 1) // TILE * TILE)
    edge = tl.maximum((first_at + 1) // TILE * TILE, inner)

    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    if sinks_ptr is not None:
        peak = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.full([BLOCK_M, DV_PAD], 0.0, tl.float32)
    table = block_tables_ptr + sequence * table_stride
    k_head_ptr = k_ptr + kv_head * k_head_stride
    v_head_ptr = v_ptr + kv_head * v_head_stride
    if INVARIANT:
        edge = begin
    else:
        if HAS_WINDOW:
            peak, total, acc = attend_keys(
                q, at, peak, total, acc, begin, inner, low, end, window, scale, softcap, table, k_head_ptr, v_head_ptr,
                k_block_stride, k_token_stride, v_block_stride, v_token_stride,
                True, HAS_WINDOW, HAS_SOFTCAP, BLOCK_SIZE, TILE, DK, DV, DK_PAD, DV_PAD, PRECISION,
            )  # fmt: skip
        peak, total, acc = attend_keys(
            q, at, peak, total, acc, inner, edge, low, end, window, scale, softcap, table, k_head_ptr, v_head_ptr,
            k_block_stride, k_token_stride, v_block_stride, v_token_stride,
            False, HAS_WINDOW, HAS_SOFTCAP, BLOCK_SIZE, TILE, DK, DV, DK_PAD, DV_PAD, PRECISION,
        )  # fmt: skip
    peak, total, acc = attend_keys(
        q, at, peak, total, acc, edge, end, low, end, window, scale, softcap, table, k_head_ptr, v_head_ptr,
        k_block_stride, k_token_stride, v_block_stride, v_token_stride,
        True, HAS_WINDOW, HAS_SOFTCAP, BLOCK_SIZE, TILE, DK, DV, DK_PAD, DV_PAD, PRECISION,
    )  # fmt: skip
    values, _ = normalised(peak, total, acc)
    out_place = out_ptr + (place * out_stride + head * out_head_stride)[:, None] + dv[None, :]
    values = (values * value_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_place, values, mask=is_row[:, None] & (dv[None, :] < DV))


class PrefillPlan(NamedTuple):
    """Which rows each program takes: `tiles` int32 [N, 2] are a sequence and a place among its tiles of `block_m`."""

    tiles: Tensor
    block_m: int


def block_m_of(head_dim: int, itemsize: int) -> int:
    """Rows per program: what the registers hold beside an fp32 sum of this head size."""
    return 32 if itemsize == 4 else 128 if padded(head_dim) <= 128 else 64


def plan_prefill(
    seq_lens: Sequence[int] | np.ndarray,
    query_lens: Sequence[int] | np.ndarray,
    group: int,
    head_dim: int,
    itemsize: int,
    *,
    window: int | None = None,
    device: torch.device | str = "cpu",
    upload: Upload | None = None,
) -> PrefillPlan:
    """The plan for these lengths; `group` query heads share a key-value head, `head_dim` is the larger of Dk and Dv.

    It is on `device`, or where `upload` brings it.
    """
    block_m = block_m_of(head_dim, itemsize)
    lengths, counts = np.asarray(seq_lens, dtype=np.int64), np.asarray(query_lens, dtype=np.int64)
    tiles = -(-counts * group // block_m)
    sequence = np.repeat(np.arange(len(counts)), tiles)
    place = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    last = np.minimum(((place + 1) * block_m - 1) // group, counts[sequence] - 1)
    keys = (lengths - counts)[sequence] + last + 1
    if window is not None:
        keys = np.minimum(keys, window + block_m // group)
    order = np.argsort(-keys, kind="stable")
    pairs = np.stack([sequence, place], axis=1)[order]
    return PrefillPlan((upload or upload_to(device))(pairs), block_m)


def paged_prefill(
    q: Tensor,
    pages: KvPages,
    rows: Rows,
    scoring: Scoring,
    plan: PrefillPlan,
    *,
    out: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """Attends with the queries of `rows` in `q` [T, Hq, Dk]; returns `out` [T, Hq, Dv], other tokens of it untouched.

    `plan` is plan_prefill's for the same lengths. q is fp32, bf16 or fp16; products are in its dtype, accumulation is
    fp32. `rows.first_keys` must be None. With `invariant` a query has the same bits however many of its sequence, and
    whatever others, are given with it. Raises ValueError on shapes, layouts or limits that the kernel cannot take.
    """
    tables, seq_lens, query_starts, query_lens, first_keys = rows
    lens = {"seq_lens": seq_lens, "query_starts": query_starts, "query_lens": query_lens}
    check(q, pages, tables, lens, scoring)
    if first_keys is not None:
        raise ValueError("first_keys must be None: paged_prefill reads every key that is seen; use paged_decode")
    kv_heads, dv = pages.values.shape[2:]
    out = output(q, dv, out)
    if len(plan.tiles) == 0:
        return out
    scale, value_scale = scales(pages, scoring)
    _prefill_kernel[(len(plan.tiles), kv_heads)](
        q,
        *pages[:2],
        *rows[:4],
        plan.tiles,
        scoring.sinks,
        out,
        scale,
        value_scale,
        1.0 if scoring.softcap is None else scoring.softcap,
        scoring.window or 0,
        *q.stride()[:2],
        *pages.keys.stride()[:3],
        *pages.values.stride()[:3],
        tables.stride(0),
        *out.stride()[:2],
        GROUP=q.shape[1] // kv_heads,
        BLOCK_M=plan.block_m,
        INVARIANT=invariant,
        HAS_WINDOW=scoring.window is not None,
        HAS_SOFTCAP=scoring.softcap is not None,
        TILE=tile_of(head_dim_of(pages), q.element_size()),
        **page_shape(pages),
        PRECISION=product_precision(q.dtype),
        **tuned("paged_prefill", attention_shape(pages, q.element_size()), q.device, num_warps=8, num_stages=2),
        enable_fp_fusion=True,
    )
    return out


def paged_prefill_cost(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    heads: int,
    kv_heads: int,
    dk: int,
    dv: int,
    itemsize: int,
    *,
    window: int | None = None,
    kv_itemsize: int | None = None,
) -> Cost:
    """Each visible key and value once per sequence, q and the output once; operations of the pairs that are seen."""
    keys = pairs = 0
    for length, count in zip(seq_lens, query_lens, strict=True):
        first, reach = length - count, window or length
        pairs += int(np.minimum(np.arange(first, length) + 1, reach).sum())
        keys += length - max(0, first - reach + 1)
    queries = sum(query_lens) * heads * (dk + dv) * itemsize
    return Cost(queries + keys * kv_heads * (dk + dv) * (kv_itemsize or itemsize), 2 * pairs * heads * (dk + dv))

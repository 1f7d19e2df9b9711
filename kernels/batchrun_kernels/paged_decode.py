"""Attention of one new token per sequence over its keys and values in pages.

Flash-Decoding (Dao et al., 2023): the keys of a sequence are cut into `num_splits` runs that programs reduce by online
softmax (Milakov and Gimelshein, 2018) independently; merge_runs puts the runs together by their log-sum-exp. The query
heads that share a key-value head are the rows of one matrix product, padded to the 16 that tensor cores need, so each
key and value is read once. Lengths are read on the device and the grid does not depend on them, so that a launch can
stand in a CUDA graph.

Pages are [num_blocks, block_size, Hkv, D] in any layout whose last dimension is contiguous. Block table entries that
hold no visible key are never read, nor are the slots of a page outside the visible range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost
from batchrun_kernels.merge_runs import LN2, LOG2E, merge_runs, merge_runs_cost

MAX_HEAD_DIM = 256
MAX_ROWS = 32  # query heads per program; larger groups take several programs
NO_WINDOW = 2**31 - 1


@triton.jit
def _scores(q, k, visible, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """[ROWS, TILE] logits in units of log2, minus infinity where a key is not visible."""
    s = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)  # softcap · tanh(s / softcap)
    return tl.where(visible[None, :], s * LOG2E, -float("inf"))


@triton.jit
def _token_offsets(table, t0, position, visible, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block (int64) and the place in it of each position of a tile: one block for all where a tile fits in one."""
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + t0 // BLOCK_SIZE).to(tl.int64)
        offset = t0 % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        block = tl.load(table + position // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
    return block, offset


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    sinks_ptr,  # None: no sinks
    out_ptr,  # one run: the output; several: fp32 [B, Hq, SPLITS, Dv]
    lse_ptr,  # one run: [B, Hq] or None; several: [B, Hq, SPLITS]
    scale,
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
    SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    kv_head = tl.program_id(0) % KV_HEADS
    member = tl.program_id(0) // KV_HEADS * ROWS + tl.arange(0, ROWS)  # of the group of query heads
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    head = kv_head * GROUP + member
    is_head = member < GROUP
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)

    length = tl.load(seq_lens_ptr + sequence)
    first = tl.maximum(length - window, 0)
    first_tile = first // TILE
    tiles = (length + TILE - 1) // TILE - first_tile
    run = (tiles + SPLITS - 1) // SPLITS
    begin = first_tile + split * run
    end = tl.minimum(begin + run, first_tile + tiles)

    q_mask = is_head[:, None] & (dk[None, :] < DK)
    q = tl.load(q_ptr + sequence * q_stride + head[:, None] * q_head_stride + dk[None, :], mask=q_mask, other=0.0)
    table = block_tables_ptr + sequence * table_stride
    k_head_ptr = k_ptr + kv_head * k_head_stride
    v_head_ptr = v_ptr + kv_head * v_head_stride

    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=is_head, other=0.0).to(tl.float32) * LOG2E
        peak = tl.where(split == 0, sink, peak)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.full([ROWS, DV_PAD], 0.0, tl.float32)
    for t0 in range(begin * TILE, end * TILE, TILE):
        position = t0 + tl.arange(0, TILE)
        visible = (position >= first) & (position < length)
        block, offset = _token_offsets(table, t0, position, visible, BLOCK_SIZE, TILE)
        k_offset = block * k_block_stride + offset * k_token_stride
        k_mask = visible[None, :] & (dk[:, None] < DK)
        k = tl.load(k_head_ptr + k_offset[None, :] + dk[:, None], mask=k_mask, other=0.0)
        s = _scores(q, k.to(q.dtype), visible, scale, softcap, HAS_SOFTCAP)
        new_peak = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(p, 1)
        v_offset = block * v_block_stride + offset * v_token_stride
        v_mask = visible[:, None] & (dv[None, :] < DV)
        v = tl.load(v_head_ptr + v_offset[:, None] + dv[None, :], mask=v_mask, other=0.0).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak

    is_filled = total != 0.0  # true of NaN, which must reach the output
    total = tl.where(is_filled, total, 1.0)
    acc = acc / total[:, None]
    out_row = sequence * out_stride + head * out_head_stride + split * DV
    out_mask = (is_head & (is_filled | (SPLITS == 1)))[:, None] & (dv[None, :] < DV)
    tl.store(out_ptr + out_row[:, None] + dv[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    if lse_ptr is not None:
        lse = tl.where(is_filled, (peak + tl.log2(total)) * LN2, -float("inf"))
        lse_row = (sequence * (KV_HEADS * GROUP) + head) * SPLITS + split
        tl.store(lse_ptr + lse_row, lse, mask=is_head)


class _Config(NamedTuple):
    tile: int  # keys per step of the loop
    num_warps: int
    num_stages: int


def _config(head_dim: int, itemsize: int) -> _Config:
    """Keeps a stage of keys and values within 32 KiB of shared memory."""
    row = triton.next_power_of_2(head_dim) * itemsize
    return _Config(tile=64 if row <= 256 else 32 if row <= 512 else 16, num_warps=4, num_stages=3)


def paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    num_splits: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attends with `q` [B, Hq, Dk] to the first `seq_lens` [B] int32 tokens of each sequence; returns [B, Hq, Dv].

    `block_tables` [B, max_blocks] int32 names the pages of each sequence in `k_pages` [N, block_size, Hkv, Dk] and
    `v_pages` [N, block_size, Hkv, Dv]. Query head h reads key-value head h // (Hq / Hkv); the query stands at
    position seq_lens − 1 and sees the last `window` positions. Scores are q·k · `scale`, then
    `softcap` · tanh(score / `softcap`). `sinks` [Hq] are scores without a value that only join the softmax.
    `lse` [B, Hq] fp32, if given, receives the natural log-sum-exp of the scores, sinks included. A sequence of
    length 0 gives zeros. q is fp32, bf16 or fp16; products are in its dtype, accumulation is fp32.
    Raises ValueError on shapes, layouts or limits that the kernel cannot take.
    """
    batch, heads, _ = q.shape
    dv = v_pages.shape[3]
    _check(q, k_pages, v_pages, block_tables, seq_lens, sinks, lse)
    if num_splits < 1 or (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        raise ValueError(f"{num_splits=}, {window=} and {softcap=} must be positive (None: no window, no softcap)")
    out = q.new_empty(batch, heads, dv) if out is None else out
    if out.shape != (batch, heads, dv) or out.stride(2) != 1:
        raise ValueError(f"out of shape {tuple(out.shape)} must be {(batch, heads, dv)} with heads contiguous")
    if batch == 0:
        return out
    inputs = (q, k_pages, v_pages, block_tables, seq_lens, sinks)
    if num_splits == 1:
        _attend(inputs, out, lse, 1, scale, window, softcap)
        return out
    runs = q.new_empty(batch, heads, num_splits, dv, dtype=torch.float32)
    run_lse = q.new_empty(batch, heads, num_splits, dtype=torch.float32)
    _attend(inputs, runs, run_lse, num_splits, scale, window, softcap)
    return merge_runs(runs, run_lse, out=out, lse=lse)


def _attend(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None],
    out: Tensor,
    lse: Tensor | None,
    num_splits: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    q, k_pages, v_pages, block_tables, _, _ = inputs
    batch, heads, dk = q.shape
    block_size, kv_heads, dv = v_pages.shape[1:]
    group = heads // kv_heads
    rows = max(16, min(MAX_ROWS, triton.next_power_of_2(group)))
    tile, num_warps, num_stages = _config(max(dk, dv), q.element_size())
    _decode_kernel[(kv_heads * triton.cdiv(group, rows), num_splits, batch)](
        *inputs,
        out,
        lse,
        scale,
        1.0 if softcap is None else softcap,
        NO_WINDOW if window is None else window,
        *q.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        block_tables.stride(0),
        *out.stride()[:2],
        GROUP=group,
        KV_HEADS=kv_heads,
        SPLITS=num_splits,
        BLOCK_SIZE=block_size,
        TILE=tile,
        ROWS=rows,
        DK=dk,
        DV=dv,
        DK_PAD=triton.next_power_of_2(dk),
        DV_PAD=triton.next_power_of_2(dv),
        HAS_SOFTCAP=softcap is not None,
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=True,
    )


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    lse: Tensor | None,
) -> None:
    batch, heads, dk = q.shape
    kv_heads, dv = v_pages.shape[2:]
    if k_pages.shape[:3] != v_pages.shape[:3] or k_pages.shape[3] != dk or heads % kv_heads:
        shapes = f"q {tuple(q.shape)}, k_pages {tuple(k_pages.shape)}, v_pages {tuple(v_pages.shape)}"
        raise ValueError(f"{shapes} must be [B, Hq, Dk], [N, S, Hkv, Dk], [N, S, Hkv, Dv] with Hq a multiple of Hkv")
    if not 16 <= min(dk, dv) <= max(dk, dv) <= MAX_HEAD_DIM:
        raise ValueError(f"head sizes {dk} and {dv} must be between 16 and {MAX_HEAD_DIM}; use paged_decode_torch")
    if q.stride(2) != 1 or k_pages.stride(3) != 1 or v_pages.stride(3) != 1:
        raise ValueError("q, k_pages and v_pages must be contiguous along the head size")
    if block_tables.shape[0] != batch or block_tables.stride(1) != 1 or seq_lens.shape != (batch,):
        shapes = f"block_tables {tuple(block_tables.shape)} and seq_lens {tuple(seq_lens.shape)}"
        raise ValueError(f"{shapes} must be [{batch}, M] with rows contiguous and [{batch}]")
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)} must be a contiguous [{heads}]")
    if lse is not None and (lse.shape != (batch, heads) or not lse.is_contiguous() or lse.dtype != torch.float32):
        raise ValueError(f"lse {lse.dtype} {tuple(lse.shape)} must be a contiguous float32 [{batch}, {heads}]")


def paged_decode_torch(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The reference of `paged_decode`: (out [B, Hq, Dv], lse [B, Hq]), fp32 inside, fp64 for fp64 input."""
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, _ = q.shape
    block_size, kv_heads, dv = v_pages.shape[1:]
    out = torch.zeros(batch, heads, dv, dtype=wide, device=q.device)
    lse = torch.empty(batch, heads, dtype=wide, device=q.device)
    for b, length in enumerate(seq_lens.tolist()):
        position = torch.arange(max(0, length - (window or length)), length, device=q.device)
        block, offset = block_tables[b, position // block_size].long(), position % block_size
        k = k_pages[block, offset].to(wide).repeat_interleave(heads // kv_heads, 1)
        v = v_pages[block, offset].to(wide).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("hd,thd->ht", q[b].to(wide), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(wide)[:, None]], 1)
        lse[b] = scores.logsumexp(1)
        out[b] = torch.einsum("ht,thd->hd", scores.softmax(1)[:, : len(position)], v)
    return out.to(q.dtype), lse


def paged_decode_cost(
    seq_lens: Sequence[int],
    heads: int,
    kv_heads: int,
    dk: int,
    dv: int,
    itemsize: int,
    *,
    num_splits: int = 1,
    window: int | None = None,
) -> Cost:
    """Each visible key and value once, q and the output once; several runs add their fp32 results and the merge."""
    batch, keys = len(seq_lens), sum(min(n, window or n) for n in seq_lens)
    elements = keys * kv_heads * (dk + dv) + batch * heads * (dk + dv)
    single = Cost(elements * itemsize, 2 * keys * heads * (dk + dv))
    if num_splits == 1:
        return single
    merge = merge_runs_cost(batch, heads, num_splits, dv, itemsize)
    runs = batch * heads * (4 * num_splits * (dv + 1) - itemsize * dv)  # written where the output would have been
    return Cost(single.bytes + runs + merge.bytes, single.flops + merge.flops)

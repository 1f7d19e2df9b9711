"""Keys and values in pages, and the loop over them that the attention kernels share.

Scores are q·k · scale, then softcap · tanh(score / softcap); a query at position p sees the keys of its own sequence at
positions up to p, and after p − window. The softmax is taken online (Milakov and Gimelshein, 2018), in powers of two.
The query heads that share a key-value head are rows of one matrix product, so that each key and value is read once for
all of them. Block table entries that hold no visible key (-1 where a page was given back) are never read, nor are the
positions of a page that no query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.merge_runs import LN2, LOG2E

MAX_HEAD_DIM = 256
MIN_DOT = 16  # shortest side of a matrix product on tensor cores
FP8 = torch.float8_e4m3fn
FP8_BITS_SCALE = 256.0  # of what `_widened` makes of the bits of fp8

Upload = Callable[[np.ndarray], Tensor]  # of a plan's integers, to int32 on the device


class KvPages(NamedTuple):
    """Keys [N, block_size, Hkv, Dk] and values [N, block_size, Hkv, Dv] of one layer, contiguous along D.

    They are in the dtype of the queries, or in fp8 (e4m3): as float8_e4m3fn where the GPU has it (compute capability
    8.9), else as its bits in uint8. Stored numbers times `key_scale` and `value_scale` are keys and values.
    """

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


class Rows(NamedTuple):
    """B sequences with `query_lens` [B] queries each, the last of its `seq_lens` [B] positions; all int32.

    `query_starts` [B] is the place of a sequence's first query in q, and `block_tables` [B, M] names its pages.
    Positions before `first_keys` [B] are left out, whatever the window (None: none are).
    """

    block_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    query_lens: Tensor
    first_keys: Tensor | None = None


class Scoring(NamedTuple):
    """How scores are made. `sinks` [Hq] are scores without a value that only join the softmax."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@triton.jit
def _widened(x, dtype: tl.constexpr):
    """x in `dtype`; of uint8, which are bits of fp8 (e4m3), 2^-8 times the number: exact in every dtype here."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # the same exponent, whose bias is 8 more in fp16
        x = half.to(tl.float16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _token_offsets(table, t0, position, readable, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block (int64) and the place in it of each position of a tile: one block for all where a tile fits in one."""
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + t0 // BLOCK_SIZE).to(tl.int64)
        offset = t0 % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        block = tl.load(table + position // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
    return block, offset


@triton.jit
def attend_keys(
    q,  # [ROWS, DK_PAD]
    at,  # int32 [ROWS]: position of each row's query
    peak,  # fp32 [ROWS]: largest score so far, in units of log2
    total,  # fp32 [ROWS]: sum of 2^(score - peak)
    acc,  # fp32 [ROWS, DV_PAD]: sum of 2^(score - peak) · value
    begin,  # a multiple of TILE
    end,
    low,  # positions below are not read
    high,  # nor from here on
    window,
    scale,
    softcap,
    table,
    k_ptr,  # of the head
    v_ptr,
    k_block_stride,
    k_token_stride,
    v_block_stride,
    v_token_stride,
    MASKED: tl.constexpr,  # False: every row sees every position of every tile
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(peak, total, acc) after the tiles from `begin` to `end`."""
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    for t0 in range(begin, end, TILE):
        position = t0 + tl.arange(0, TILE)
        readable = (position >= low) & (position < high)
        block, offset = _token_offsets(table, t0, position, readable, BLOCK_SIZE, TILE)
        k_place = k_ptr + (block * k_block_stride + offset * k_token_stride)[None, :] + dk[:, None]
        v_place = v_ptr + (block * v_block_stride + offset * v_token_stride)[:, None] + dv[None, :]
        if MASKED:
            k = tl.load(k_place, mask=readable[None, :] & (dk[:, None] < DK), other=0.0)
            v = tl.load(v_place, mask=readable[:, None] & (dv[None, :] < DV), other=0.0)
        else:
            k = tl.load(k_place, mask=dk[:, None] < DK, other=0.0) if DK < DK_PAD else tl.load(k_place)
            v = tl.load(v_place, mask=dv[None, :] < DV, other=0.0) if DV < DV_PAD else tl.load(v_place)
        s = tl.dot(q, _widened(k, q.dtype), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)  # softcap · tanh(s / softcap)
        s *= LOG2E
        if MASKED:
            visible = readable[None, :] & (position[None, :] <= at[:, None])
            if HAS_WINDOW:
                visible = visible & (position[None, :] > at[:, None] - window)
            s = tl.where(visible, s, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(s, 1))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak) if MASKED else new_peak  # a row may have seen none
        p = tl.exp2(s - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), _widened(v, q.dtype), acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
    return peak, total, acc


@triton.jit
def normalised(peak, total, acc):
    """The softmax-weighted values [ROWS, DV_PAD] and the natural log-sum-exp [ROWS]; 0 and -inf if no key was seen."""
    is_filled = total != 0.0  # true of NaN, which must reach the output
    total = tl.where(is_filled, total, 1.0)
    lse = tl.where(is_filled, (peak + tl.log2(total)) * LN2, -float("inf"))
    return acc / total[:, None], lse


def tile_of(head_dim: int, itemsize: int) -> int:
    """Keys per step of the loop: a page of 64, or fewer where registers and shared memory would not hold them."""
    return 64 if padded(head_dim) * itemsize <= 256 else 32 if itemsize == 2 else 16


def attention_shape(pages: KvPages, itemsize: int) -> str:
    """What options of attention kernels are tuned for: head size, bytes of an element of queries and of pages."""
    return f"{head_dim_of(pages)}x{itemsize}x{pages.keys.element_size()}"


def padded(dim: int) -> int:
    """The power of two that a side of a matrix product is padded to."""
    return max(MIN_DOT, triton.next_power_of_2(dim))


def scales(pages: KvPages, scoring: Scoring) -> tuple[float, float]:
    """What products of queries and stored keys, and sums of stored values, are multiplied by."""
    bits = FP8_BITS_SCALE if pages.keys.dtype == torch.uint8 else 1.0
    return scoring.scale * pages.key_scale * bits, pages.value_scale * bits


def upload_to(device: torch.device | str) -> Upload:
    """A copy for each array."""
    return lambda array: torch.from_numpy(array.astype(np.int32)).to(device)


def head_dim_of(pages: KvPages) -> int:
    """The larger of Dk and Dv."""
    return max(pages.keys.shape[3], pages.values.shape[3])


def page_shape(pages: KvPages) -> dict[str, int]:
    """The sizes of pages that kernels are compiled for."""
    block_size, _, dk = pages.keys.shape[1:]
    dv = pages.values.shape[3]
    return {"BLOCK_SIZE": block_size, "DK": dk, "DV": dv, "DK_PAD": padded(dk), "DV_PAD": padded(dv)}


def check(
    q: Tensor, pages: KvPages, block_tables: Tensor, per_row: Mapping[str, Tensor | None], scoring: Scoring
) -> None:
    """Raises ValueError on shapes, layouts or limits that the kernels cannot take."""
    _, heads, dk = q.shape
    keys, values = pages.keys, pages.values
    kv_heads, dv = values.shape[2:]
    if keys.shape[:3] != values.shape[:3] or keys.shape[3] != dk or heads % kv_heads:
        shapes = f"q {tuple(q.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
        raise ValueError(f"{shapes} must be [T, Hq, Dk], [N, S, Hkv, Dk], [N, S, Hkv, Dv] with Hq a multiple of Hkv")
    if max(dk, dv) > MAX_HEAD_DIM:
        raise ValueError(f"head sizes {dk} and {dv} must be at most {MAX_HEAD_DIM}; use paged_attention_torch")
    if q.stride(2) != 1 or keys.stride(3) != 1 or values.stride(3) != 1:
        raise ValueError("q, keys and values must be contiguous along the head size")
    if keys.dtype != values.dtype or keys.dtype not in (q.dtype, FP8, torch.uint8):
        raise ValueError(f"keys {keys.dtype} and values {values.dtype} must both be {q.dtype}, {FP8} or its bits")
    batch = block_tables.shape[0]
    if block_tables.stride(1) != 1:
        raise ValueError(f"block_tables of strides {block_tables.stride()} must have contiguous rows")
    for name, tensor in per_row.items():
        if tensor is not None and (tensor.shape != (batch,) or not tensor.is_contiguous()):
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} must be a contiguous [{batch}]")
    window, softcap, sinks = scoring[1:]
    if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        raise ValueError(f"{window=} and {softcap=} must be positive, or None for none")
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)} must be a contiguous [{heads}]")


def output(q: Tensor, value_dim: int, out: Tensor | None) -> Tensor:
    """`out`, or a new one of the queries' dtype; raises ValueError unless it is [T, Hq, Dv] with contiguous heads."""
    shape = (*q.shape[:2], value_dim)
    out = q.new_empty(shape) if out is None else out
    if out.shape != shape or out.stride(2) != 1:
        raise ValueError(f"out of shape {tuple(out.shape)} must be {shape} with heads contiguous")
    return out


def attend_torch(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Attends with q [T, Hq, Dk] to keys [L, Hkv, Dk] and values [L, Hkv, Dv] under `visible` bool [T, L].

    Returns out [T, Hq, Dv] and the natural log-sum-exp [T, Hq]; a query that sees nothing gives 0 and -inf.
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("thd,lhd->thl", q, keys) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    lse = scores.logsumexp(2)
    if scoring.sinks is not None:
        lse = torch.logaddexp(lse, scoring.sinks.to(lse.dtype).expand_as(lse))
    weights = (scores - lse[..., None]).exp().masked_fill(~visible[:, None], 0.0)
    return torch.einsum("thl,lhd->thd", weights, values), lse


def read_pages(pages: KvPages, blocks: Tensor, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [stop - start, Hkv, D] of positions [start, stop) of a sequence, in torch."""
    position = torch.arange(start, stop, device=blocks.device)
    block, offset = blocks[position // pages.keys.shape[1]].long(), position % pages.keys.shape[1]
    stored = (x.view(FP8) if x.dtype == torch.uint8 else x for x in pages[:2])
    keys, values = (x.to(dtype)[block, offset] for x in stored)
    return keys * pages.key_scale, values * pages.value_scale


def paged_attention_torch(q: Tensor, pages: KvPages, rows: Rows, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """The reference of paged_decode and paged_prefill: out [T, Hq, Dv] in q's dtype and lse [T, Hq], fp32 inside, fp64
    for fp64 input."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:2], pages.values.shape[3], dtype=wide, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
    lens = torch.stack([rows.seq_lens, rows.query_starts, rows.query_lens]).T.tolist()
    firsts = [0] * len(lens) if rows.first_keys is None else rows.first_keys.tolist()
    for blocks, (length, start, count), first in zip(rows.block_tables, lens, firsts, strict=True):
        window = scoring.window or length
        at = torch.arange(length - count, length, device=q.device)[:, None]
        low = min(length, max(first, length - count - window + 1, 0))
        keys, values = read_pages(pages, blocks, low, length, wide)
        position = torch.arange(low, length, device=q.device)
        visible = (position <= at) & (position > at - window)
        tokens = slice(start, start + count)
        out[tokens], lse[tokens] = attend_torch(q[tokens].to(wide), keys, values, visible, scoring)
    return out.to(q.dtype), lse

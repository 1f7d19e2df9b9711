"""Merges attention over disjoint sets of keys into attention over their union, by log-sum-exp.

With out_i the softmax-weighted values over set i and lse_i the log-sum-exp of its scores, the union has
out = Σ exp(lse_i − lse) out_i and lse = log Σ exp(lse_i): the associative step of Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _merge_kernel(
    out_ptr,
    lse_ptr,
    tokens_ptr,
    run_starts_ptr,
    runs_ptr,
    run_lse_ptr,
    out_stride,
    out_head_stride,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
):
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    place = tl.program_id(1)
    first = tl.load(run_starts_ptr + place)
    stop = tl.load(run_starts_ptr + place + 1)
    if first == stop:
        return
    token = tl.load(tokens_ptr + place).to(tl.int64)
    dv = tl.arange(0, DV_PAD)
    one = tl.arange(0, 1)  # the interpreter does not join masks of a scalar and a vector
    out_place = out_ptr + token * out_stride + head * out_head_stride + dv
    peak = tl.load(lse_ptr + token * heads + head + one)
    total = tl.where(peak == -float("inf"), 0.0, 1.0)
    acc = tl.load(out_place, mask=(dv < DV) & (peak != -float("inf")), other=0.0).to(tl.float32)
    for run in range(first, stop):
        row = run * heads + head + one.to(tl.int64)
        lse = tl.load(run_lse_ptr + row)
        mask = (lse != -float("inf")) & (dv < DV)  # a run without keys wrote no output
        values = tl.load(runs_ptr + row * DV + dv, mask=mask, other=0.0)
        new_peak = tl.maximum(peak, lse)
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weight = tl.exp2((lse - shift) * LOG2E)
        decay = tl.exp2((peak - shift) * LOG2E)
        total = total * decay + weight
        acc = acc * decay + values * weight
        peak = new_peak
    is_filled = total != 0.0  # true of NaN, which must reach the output
    total = tl.where(is_filled, total, 1.0)
    tl.store(out_place, (acc / total).to(out_ptr.dtype.element_ty), mask=dv < DV)


def merge_runs(out: Tensor, lse: Tensor, tokens: Tensor, run_starts: Tensor, runs: Tensor, run_lse: Tensor) -> None:
    """Merges runs into the rows of `out` [T, Hq, D] that `tokens` [N] int32 names, each once.

    Those of place n are from run_starts[n] to run_starts[n + 1] (int32 [N + 1]) of `runs` [R, Hq, D]; a place without
    runs names no row. `run_lse` [R, Hq] and `lse` [T, Hq] are the natural log-sum-exp of the scores behind `runs` and
    `out`; all three are fp32 and contiguous, and `lse` is left as it is. Where one is minus infinity no keys were seen
    and its output is not read; if none were at all, `out` becomes zero. Raises ValueError on other layouts.
    """
    heads, dim = runs.shape[1:]
    for tensor, shape in ((runs, runs.shape), (run_lse, runs.shape[:2]), (lse, out.shape[:2])):
        if tensor.shape != shape or not tensor.is_contiguous() or tensor.dtype != torch.float32:
            raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)} must be a contiguous float32 {list(shape)}")
    if out.shape[1:] != (heads, dim) or out.stride(2) != 1:
        raise ValueError(f"out of shape {tuple(out.shape)} must be [T, {heads}, {dim}] with heads contiguous")
    if run_starts.shape != (len(tokens) + 1,) or not (tokens.is_contiguous() and run_starts.is_contiguous()):
        shapes = f"tokens {tuple(tokens.shape)} and run_starts {tuple(run_starts.shape)}"
        raise ValueError(f"{shapes} must be contiguous, [N] and [N + 1]")
    if len(tokens) == 0:
        return
    _merge_kernel[(heads, len(tokens))](
        out,
        lse,
        tokens,
        run_starts,
        runs,
        run_lse,
        *out.stride()[:2],
        DV=dim,
        DV_PAD=triton.next_power_of_2(dim),
        num_warps=1,
        enable_fp_fusion=True,
    )


def merge_runs_torch(
    out: Tensor, lse: Tensor, tokens: Tensor, run_starts: Tensor, runs: Tensor, run_lse: Tensor
) -> None:
    """The reference of `merge_runs`, in the dtype of the runs inside."""
    bounds = run_starts.tolist()
    for place, token in enumerate(tokens.tolist()):
        mine = slice(bounds[place], bounds[place + 1])
        if mine.start < mine.stop:
            every = torch.cat([out[token][None].to(runs.dtype), runs[mine]])
            every_lse = torch.cat([lse[token][None], run_lse[mine]])
            empty = every_lse == -torch.inf
            weight = (every_lse - every_lse.logsumexp(0)).exp().masked_fill(empty, 0.0)
            out[token] = (weight[..., None] * every.masked_fill(empty[..., None], 0.0)).sum(0).to(out.dtype)


def merge_runs_cost(tokens: int, heads: int, splits: int, dim: int, itemsize: int) -> Cost:
    """Reads each fp32 run once, and reads and writes one output of `itemsize` bytes per element."""
    rows = tokens * heads
    return Cost(rows * (4 * splits * (dim + 1) + 2 * dim * itemsize + 4), 2 * rows * (splits + 1) * dim)

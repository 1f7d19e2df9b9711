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
CHUNK = 8  # runs that the kernel loads at once


@triton.jit
def _merge_kernel(
    runs_ptr,
    run_lse_ptr,
    out_ptr,
    lse_ptr,  # None: not wanted
    out_stride,
    out_head_stride,
    RUNS: tl.constexpr,
    RUNS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    row = sequence * tl.num_programs(0) + head
    every = tl.arange(0, RUNS_PAD)
    lses = tl.load(run_lse_ptr + row * RUNS + every, mask=every < RUNS, other=-float("inf"))
    peak = tl.max(lses, 0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(tl.exp2((lses - peak) * LOG2E), 0)
    dv = tl.arange(0, DV_PAD)
    acc = tl.full([DV_PAD], 0.0, tl.float32)
    for start in range(0, RUNS, CHUNK):
        run = start + tl.arange(0, CHUNK)
        lse = tl.load(run_lse_ptr + row * RUNS + run, mask=run < RUNS, other=-float("inf"))
        mask = (lse != -float("inf"))[:, None] & (dv[None, :] < DV)  # a run without keys wrote no output
        partial = tl.load(runs_ptr + (row * RUNS + run)[:, None] * DV + dv[None, :], mask=mask, other=0.0)
        acc += tl.sum(tl.exp2((lse - peak) * LOG2E)[:, None] * partial, 0)
    is_filled = total != 0.0  # true of NaN, which must reach the output
    total = tl.where(is_filled, total, 1.0)
    out_row = sequence * out_stride + head * out_head_stride
    tl.store(out_ptr + out_row + dv, (acc / total).to(out_ptr.dtype.element_ty), mask=dv < DV)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, tl.where(is_filled, peak + tl.log2(total) * LN2, -float("inf")))


def merge_runs(runs: Tensor, run_lse: Tensor, *, out: Tensor, lse: Tensor | None = None) -> Tensor:
    """Merges `runs` [B, Hq, S, D] fp32 by `run_lse` [B, Hq, S] fp32, both contiguous, into `out` [B, Hq, D].

    A run whose lse is minus infinity saw no keys and its output is not read; if none saw any, `out` is zero.
    `lse` [B, Hq] fp32, if given, receives the merged log-sum-exp. Raises ValueError on other layouts.
    """
    batch, heads, count, dim = runs.shape
    for tensor, shape in ((runs, runs.shape), (run_lse, (batch, heads, count)), (lse, (batch, heads))):
        if tensor is None:
            continue
        if tensor.shape != shape or not tensor.is_contiguous() or tensor.dtype != torch.float32:
            raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)} must be a contiguous float32 {list(shape)}")
    if out.shape != (batch, heads, dim) or out.stride(2) != 1:
        raise ValueError(f"out of shape {tuple(out.shape)} must be {(batch, heads, dim)} with heads contiguous")
    _merge_kernel[(heads, batch)](
        runs,
        run_lse,
        out,
        lse,
        *out.stride()[:2],
        RUNS=count,
        RUNS_PAD=triton.next_power_of_2(count),
        CHUNK=CHUNK,
        DV=dim,
        DV_PAD=triton.next_power_of_2(dim),
        num_warps=2,
        enable_fp_fusion=True,
    )
    return out


def merge_runs_torch(runs: Tensor, run_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The reference of `merge_runs`: (out [B, Hq, D], lse [B, Hq]) in the dtype of the runs."""
    lse = run_lse.logsumexp(2)
    empty = run_lse == -torch.inf
    weight = (run_lse - lse[..., None]).exp().masked_fill(empty, 0.0)
    return (weight[..., None] * runs.masked_fill(empty[..., None], 0.0)).sum(2), lse


def merge_runs_cost(batch: int, heads: int, count: int, dim: int, itemsize: int) -> Cost:
    """Reads each fp32 run and its log-sum-exp once and writes one output of `itemsize` bytes per element."""
    rows = batch * heads
    return Cost(rows * (4 * count * (dim + 1) + dim * itemsize), 2 * rows * count * dim)

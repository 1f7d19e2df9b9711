"""A linear layer whose rows do not depend on one another to the bit: x W^T + b with tiles that never change.

A library chooses tiles, and whether the depth is split, by the number of rows, so a row's sum is made in another order
in another batch (He and Thinking Machines, "Defeating Nondeterminism in LLM Inference", 2025). Here they follow from
the type alone, the depth is walked in one order, and the number of rows is not compiled in: the same program text
computes one row and thousands. Programs of one column of weights run side by side, so each weight is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost
from batchrun_kernels.grouped_gemm import Tiles
from batchrun_kernels.precision import product_precision


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,  # None: no addition
    out_ptr,
    rows,
    width,
    depth,
    x_stride,
    w_stride,
    w_depth_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < rows
    is_col = col < width
    step = tl.arange(0, BLOCK_K)
    row = row.to(tl.int64)
    x_place = x_ptr + row[:, None] * x_stride + step[None, :]
    w_place = w_ptr + col.to(tl.int64)[None, :] * w_stride + step[:, None] * w_depth_stride
    acc = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = depth - start
        x = tl.load(x_place + start, mask=is_row[:, None] & (step[None, :] < left), other=0.0)
        w = tl.load(w_place + start * w_depth_stride, mask=is_col[None, :] & (step[:, None] < left), other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + col, mask=is_col, other=0.0).to(tl.float32)[None, :]
    out_place = out_ptr + row[:, None] * out_stride + col[None, :]
    tl.store(out_place, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])


def fixed_tiles(itemsize: int) -> Tiles:
    """The tiles of every product of elements of this size: a height that a few rows do not waste much of, and a width
    that leaves work for all multiprocessors."""
    return Tiles(64, 128, 64, 4, 3) if itemsize == 2 else Tiles(32, 64, 32, 4, 2)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x [M, K] times the transpose of `weight` [N, K], plus `bias` [N]: `out` [M, N], in the type of `x`.

    `x` has any row stride, `weight` any strides, all are fp32, bf16 or fp16 of one type; products are in it, or for
    fp32 in TF32 if torch's are, accumulation is fp32. A row has the same bits whatever M is. Raises ValueError on
    shapes, types and layouts that the kernel cannot take.
    """
    rows, depth = x.shape
    width = len(weight)
    if x.dtype != weight.dtype or weight.shape[1] != depth or x.stride(1) != 1:
        shapes = f"x {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)}"
        raise ValueError(f"{shapes} must be of one type and depth, the rows of x contiguous")
    if bias is not None and (bias.shape != (width,) or not bias.is_contiguous()):
        raise ValueError(f"bias of shape {tuple(bias.shape)} must be a contiguous [{width}]")
    out = x.new_empty(rows, width) if out is None else out
    if out.shape != (rows, width) or out.stride(1) != 1:
        raise ValueError(f"out of shape {tuple(out.shape)} must be {(rows, width)} with rows contiguous")
    if rows == 0:
        return out
    tiles = fixed_tiles(x.element_size())
    _matmul_kernel[(triton.cdiv(rows, tiles.block_m), triton.cdiv(width, tiles.block_n))](
        x,
        weight,
        bias,
        out,
        rows,
        width,
        depth,
        x.stride(0),
        *weight.stride(),
        out.stride(0),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        PRECISION=product_precision(x.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
    return out


def matmul_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The reference of `matmul`: fp32 inside, fp64 for fp64 input."""
    wide = torch.promote_types(x.dtype, torch.float32)
    product = x.to(wide) @ weight.to(wide).T
    return (product if bias is None else product + bias.to(wide)).to(x.dtype)


def matmul_cost(rows: int, width: int, depth: int, itemsize: int) -> Cost:
    """Each weight, each input and each output once; a multiply-add for each weight and row."""
    return Cost((width * depth + rows * (width + depth)) * itemsize, 2 * rows * width * depth)

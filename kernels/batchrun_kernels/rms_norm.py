"""Root-mean-square normalisation, alone or fused with the residual addition before it.

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019: y = x / sqrt(mean(x²) + eps) · w. Gemma stores w − 1,
which is the `unit_offset` switch. One program holds whole rows in registers, so every operand is read once; short rows
(the heads of a q/k norm) share a program. Arithmetic is fp32 with one rounding at each store. The number of rows is not
compiled in, so that a row has the same bits whatever it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost

MAX_HIDDEN = 16384  # longest row that a program holds without spilling registers
TILE = 2048  # elements per program when rows are short


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,  # None: no addition
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    rows,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    residual_out_stride,
    HIDDEN: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    mask = (row < rows) & (col < HIDDEN)
    row = row.to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
        total = (x + residual).to(residual_out_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + row * residual_out_stride + col, total, mask=mask)
        x = total.to(tl.float32)  # the norm sees what the next layer will read back
    weight = tl.load(weight_ptr + col, mask=col < HIDDEN, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    scale = tl.rsqrt(tl.sum(x * x, 1) / HIDDEN + eps)
    y = x * scale[:, None] * weight
    tl.store(out_ptr + row * out_stride + col, y.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False, out: Tensor | None = None) -> Tensor:
    """Normalises each row of `x` [T, H] (any row stride) by `weight` [H]; `out` [T, H] may be `x`.

    Operands are fp32, bf16 or fp16, in any mix. Raises ValueError on a layout or a width that the kernel cannot take.
    """
    out = torch.empty_like(x) if out is None else out
    _launch(x, None, weight, out, None, eps, unit_offset)
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds `residual` [T, H] to `x` [T, H] and normalises the sum; returns (normalised, sum).

    The sum is rounded to the dtype of `residual_out` (that of `residual` by default) before it is normalised.
    `out` and `residual_out` may be `x` and `residual` themselves. Raises ValueError as `rms_norm` does.
    """
    out = torch.empty_like(x) if out is None else out
    residual_out = torch.empty_like(residual) if residual_out is None else residual_out
    _launch(x, residual, weight, out, residual_out, eps, unit_offset)
    return out, residual_out


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    residual_out: Tensor | None,
    eps: float,
    unit_offset: bool,
) -> None:
    rows, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(f"a row of {hidden} elements is over the kernel's limit of {MAX_HIDDEN}; use rms_norm_torch")
    for tensor in (x, residual, out, residual_out):
        if tensor is not None and (tensor.shape != x.shape or tensor.stride(1) != 1):
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise ValueError(f"shape {shape} with strides {strides} must be {tuple(x.shape)} with rows contiguous")
    if weight.shape != (hidden,) or not weight.is_contiguous():
        raise ValueError(f"weight of shape {tuple(weight.shape)} must be a contiguous [{hidden}]")
    if rows == 0:
        return
    cols = triton.next_power_of_2(hidden)
    rows_per_program = max(1, TILE // cols)
    _rms_norm_kernel[(triton.cdiv(rows, rows_per_program),)](
        x,
        residual,
        weight,
        out,
        residual_out,
        rows,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        0 if residual_out is None else residual_out.stride(0),
        HIDDEN=hidden,
        UNIT_OFFSET=unit_offset,
        ROWS=rows_per_program,
        COLS=cols,
        num_warps=min(16, rows_per_program * cols // 512),
        enable_fp_fusion=True,
    )


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """The reference of `rms_norm`, for any shape [..., H]: fp32 inside, fp64 for fp64 input."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h, w = x.to(wide), weight.to(wide)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * (w + 1 if unit_offset else w)).to(x.dtype)


def add_rms_norm_torch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The reference of `add_rms_norm`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = (x.to(wide) + residual.to(wide)).to(residual.dtype)
    return rms_norm_torch(total, weight, eps, unit_offset=unit_offset).to(x.dtype), total


def rms_norm_cost(rows: int, hidden: int, itemsize: int, *, residual: bool = False) -> Cost:
    """Reads x and the weight and writes y; with a residual, also reads it and writes the sum."""
    elements = rows * hidden
    return Cost(((4 if residual else 2) * elements + hidden) * itemsize, (5 if residual else 4) * elements)

"""The gate of a gated MLP in one pass: act(gate) · up, from the merged gate-and-up projection.

SwiGLU and GEGLU: Shazeer, "GLU Variants Improve Transformer", 2020. GELU is its tanh approximation (Hendrycks and
Gimpel, 2016), written as x · sigmoid(2u) with u = √(2/π)(x + 0.044715 x³), since 1 + tanh(u) = 2 · sigmoid(2u).
Arithmetic is fp32 with one rounding at the store.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost

ACTIVATIONS = ("silu", "gelu_tanh")
TILE = 2048  # elements of the output per program


@triton.jit
def _act_and_mul_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    out_stride,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = col < WIDTH
    gate = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + WIDTH + col, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        exponent = gate
    else:
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 · √(2/π)
    y = gate * tl.sigmoid(exponent) * up
    tl.store(out_ptr + row * out_stride + col, y.to(out_ptr.dtype.element_ty), mask=mask)


def act_and_mul(x: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
    """act(x[:, :I]) · x[:, I:] for `x` [T, 2I] (any row stride), as `out` [T, I]; fp32, bf16 or fp16.

    `activation` is one of ACTIVATIONS. Raises ValueError on another name or a layout that the kernel cannot take.
    """
    rows, width = x.shape[0], x.shape[1] // 2
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(f"shape {tuple(x.shape)} with strides {x.stride()} must be [T, 2I] with rows contiguous")
    out = x.new_empty(rows, width) if out is None else out
    if out.shape != (rows, width) or out.stride(1) != 1:
        raise ValueError(f"out of shape {tuple(out.shape)} must be {(rows, width)} with rows contiguous")
    if rows == 0:
        return out
    tile = min(TILE, triton.next_power_of_2(width))
    _act_and_mul_kernel[(rows, triton.cdiv(width, tile))](
        x,
        out,
        x.stride(0),
        out.stride(0),
        WIDTH=width,
        ACTIVATION=activation,
        TILE=tile,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


def act_and_mul_torch(x: Tensor, activation: str) -> Tensor:
    """The reference of `act_and_mul`, for any shape [..., 2I]: fp32 inside, fp64 for fp64 input."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (act * up).to(x.dtype)


def act_and_mul_cost(rows: int, width: int, itemsize: int) -> Cost:
    """Reads the two halves and writes one, `width` elements each; about ten operations per output."""
    return Cost(3 * rows * width * itemsize, 10 * rows * width)

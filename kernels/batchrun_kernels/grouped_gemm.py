"""The products of a mixture of experts: tokens sorted by expert, one launch for gate, up and activation, one for down.

A grouped matrix product as in MegaBlocks (Gale et al., 2022), with tiles that end at an expert's last token instead of
padding. The host knows how many tokens there are, not which experts they chose, and must not wait for it: it launches
as many programs as any choice needs, and each finds its expert and rows from the offsets in device memory. So a launch
depends on the number of tokens alone, and can be part of a CUDA graph. Programs of one column of weights run side by
side: each weight is read once, and the tokens, which are few beside the weights, are read again from the cache.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.act_and_mul import ACTIVATIONS
from batchrun_kernels.cost import Cost
from batchrun_kernels.precision import product_precision
from batchrun_kernels.tuned import tuned


@triton.jit(do_not_specialize=["pairs"])
def _grouped_gemm_kernel(
    x_ptr,
    w_ptr,
    order_ptr,  # int32 [S]: pairs of a token and a choice, sorted by expert
    offsets_ptr,  # int32 [E + 1]: where each expert's pairs begin
    scales_ptr,  # [S], a factor of each pair's row; None: gate and up are computed
    out_ptr,
    pairs,
    width,
    depth,
    x_stride,
    w_expert_stride,
    w_stride,
    out_stride,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Pairs past the last expert's are those of none: their rows are zeros.
    tile = tl.program_id(0)
    group = tl.arange(0, EXPERTS_PAD)
    starts = tl.load(offsets_ptr + group, mask=group <= EXPERTS, other=pairs)
    stops = tl.load(offsets_ptr + group + 1, mask=group < EXPERTS, other=pairs)
    tiles = (stops - starts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert <= EXPERTS:
        is_own = group == expert
        first = tl.sum(tl.where(is_own, starts + (tile - ends + tiles) * BLOCK_M, 0), 0)
        row = first + tl.arange(0, BLOCK_M)
        is_row = row < tl.sum(tl.where(is_own, stops, 0), 0)
        pair = tl.load(order_ptr + row, mask=is_row, other=0)
        col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_col = col < width
        if scales_ptr is None:
            x_row = (pair // TOP_K).to(tl.int64)
            out_row = row.to(tl.int64)
        else:
            x_row = row.to(tl.int64)
            out_row = pair.to(tl.int64)
        step = tl.arange(0, BLOCK_K)
        x_place = x_ptr + x_row[:, None] * x_stride + step[None, :]
        w_place = w_ptr + expert.to(tl.int64) * w_expert_stride + col[None, :] * w_stride + step[:, None]
        acc = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        up = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        for start in range(0, tl.where(expert < EXPERTS, depth, 0), BLOCK_K):
            left = depth - start
            x = tl.load(x_place + start, mask=is_row[:, None] & (step[None, :] < left), other=0.0)
            w_mask = is_col[None, :] & (step[:, None] < left)
            w = tl.load(w_place + start, mask=w_mask, other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
            if scales_ptr is None:
                w = tl.load(w_place + start + width * w_stride, mask=w_mask, other=0.0)
                up = tl.dot(x, w, up, input_precision=PRECISION)
        if scales_ptr is None:
            if ACTIVATION == "silu":
                exponent = acc
            else:
                exponent = 1.5957691216057308 * (acc + 0.044715 * acc * acc * acc)  # 2 · √(2/π)
            acc = acc * tl.sigmoid(exponent) * up
        else:
            acc = acc * tl.load(scales_ptr + pair, mask=is_row, other=0.0).to(tl.float32)[:, None]
        out_place = out_ptr + out_row[:, None] * out_stride + col[None, :]
        tl.store(out_place, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])


class Routing(NamedTuple):
    """Which pairs of a token and one of its k choices each expert has. Pair p is choice p % k of token p // k."""

    order: Tensor  # int32 [S]: pairs sorted by expert, those of no expert last
    offsets: Tensor  # int32 [E + 1]: the first place of each expert's pairs, and of those of none
    top_k: int


class Tiles(NamedTuple):
    """Rows, columns and depth of the product of one step of a program, and how it is compiled."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def route(top_k_index: Tensor, experts: int) -> Routing:
    """The routing of choices [T, k] among `experts`; a choice of `experts` or more is of none. Nothing waits for it."""
    chosen, order = top_k_index.flatten().sort(stable=True)
    numbers = torch.arange(experts + 1, device=chosen.device, dtype=chosen.dtype)
    return Routing(order.int(), torch.searchsorted(chosen, numbers, out_int32=True), top_k_index.shape[1])


def tiles_of(pairs: int, experts: int, itemsize: int, *, gated: bool) -> Tiles:
    """Tiles as high as an expert has tokens on average, from the 16 rows of a tensor core to what registers hold."""
    block_m = min(128 if itemsize == 2 else 32, max(16, triton.next_power_of_2(-(-pairs // experts))))
    if itemsize == 4:
        return Tiles(block_m, 32 if gated else 64, 32, 4, 2)
    stages = 4 if block_m <= 32 else 3
    return Tiles(block_m, 64 if gated else 128, 64, 8 if block_m == 128 else 4, stages)


def _tuned_tiles(x: Tensor, weight: Tensor, pairs: int, *, gated: bool) -> Tiles:
    experts, width, depth = weight.shape
    rule = tiles_of(pairs, experts, x.element_size(), gated=gated)
    name = "gate_up_experts" if gated else "down_experts"
    return Tiles(**tuned(name, f"{rule.block_m}x{width}x{depth}x{x.element_size()}", x.device, **rule._asdict()))


def gate_up_experts(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    activation: str,
    *,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """act(gate) · up of each pair's token by its expert, in the order of `routing`: `out` [S, I]; zeros for no expert.

    `x` [T, H] has any row stride; `weight` [E, 2I, H] holds gates, then ups, with rows contiguous; all are fp32, bf16
    or fp16 of one type, products are in it, accumulation is fp32. `activation` is one of act_and_mul's ACTIVATIONS.
    Raises ValueError on another name, or shapes and layouts that the kernel cannot take.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if weight.shape[1] % 2 or len(routing.order) != len(x) * routing.top_k:
        shapes = f"weight of shape {tuple(weight.shape)} and {len(x)} tokens with {len(routing.order)} pairs"
        raise ValueError(f"{shapes} must be [E, 2I, H] and {routing.top_k} pairs for each token")
    return _launch(x, weight, routing, None, activation, weight.shape[1] // 2, out, tiles)


def down_experts(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    scales: Tensor,
    *,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Each pair's row of `x` [S, I] by its expert's `weight` [E, H, I], times its factor: `out` [S, H] in the order of
    pairs, so that the k rows of a token lie together; zeros for no expert.

    `x` is what `gate_up_experts` gives; `scales` is contiguous [T, k] of any floating type. Raises ValueError on shapes
    and layouts that the kernel cannot take.
    """
    if len(x) != len(routing.order) or scales.numel() != len(x) or not scales.is_contiguous():
        shapes = f"x of shape {tuple(x.shape)} and scales of shape {tuple(scales.shape)}"
        raise ValueError(f"{shapes} must have a row, and a factor contiguous, for each of {len(routing.order)} pairs")
    return _launch(x, weight, routing, scales, "", weight.shape[1], out, tiles)


def _launch(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    scales: Tensor | None,
    activation: str,
    width: int,
    out: Tensor | None,
    tiles: Tiles | None,
) -> Tensor:
    experts, pairs, depth = len(weight), len(routing.order), weight.shape[2]
    if x.shape[1] != depth or x.stride(1) != 1 or weight.stride(2) != 1 or x.dtype != weight.dtype:
        shapes = f"x {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)}"
        raise ValueError(f"{shapes} must be of one type and depth with rows contiguous")
    if len(routing.offsets) != experts + 1:
        raise ValueError(f"{len(routing.offsets)} offsets are not one more than {experts} experts")
    out = x.new_empty(pairs, width) if out is None else out
    if out.shape != (pairs, width) or out.stride(1) != 1:
        raise ValueError(f"out of shape {tuple(out.shape)} must be {(pairs, width)} with rows contiguous")
    if pairs == 0:
        return out
    tiles = tiles or _tuned_tiles(x, weight, pairs, gated=scales is None)
    # Each group of pairs, those of no expert included, may end in a tile that holds one row.
    groups = min(experts + 1, pairs)
    programs = (pairs + groups * (tiles.block_m - 1)) // tiles.block_m
    _grouped_gemm_kernel[(programs, triton.cdiv(width, tiles.block_n))](
        x,
        weight,
        routing.order,
        routing.offsets,
        scales,
        out,
        pairs,
        width,
        depth,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        out.stride(0),
        TOP_K=routing.top_k,
        EXPERTS=experts,
        EXPERTS_PAD=triton.next_power_of_2(experts + 1),
        ACTIVATION=activation,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        PRECISION=product_precision(x.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
    return out


def gate_up_experts_torch(x: Tensor, weight: Tensor, routing: Routing, activation: str) -> Tensor:
    """The reference of `gate_up_experts`: fp32 inside, fp64 for fp64 input."""
    wide: Any = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(len(routing.order), weight.shape[1] // 2)
    for expert, (start, stop) in enumerate(_spans(routing)):
        tokens = x[routing.order[start:stop] // routing.top_k].to(wide)
        gate, up = (tokens @ weight[expert].to(wide).T).chunk(2, -1)
        act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        out[start:stop] = (act * up).to(x.dtype)
    return out


def down_experts_torch(x: Tensor, weight: Tensor, routing: Routing, scales: Tensor) -> Tensor:
    """The reference of `down_experts`: fp32 inside, fp64 for fp64 input."""
    wide: Any = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(len(routing.order), weight.shape[1])
    for expert, (start, stop) in enumerate(_spans(routing)):
        pairs = routing.order[start:stop].long()
        product = x[start:stop].to(wide) @ weight[expert].to(wide).T
        out[pairs] = (product * scales.flatten()[pairs, None].to(wide)).to(x.dtype)
    return out


def _spans(routing: Routing) -> list[tuple[int, int]]:
    return list(pairwise(routing.offsets.tolist()))


def grouped_gemm_cost(tokens: int, pairs: int, used: int, hidden: int, inner: int, itemsize: int) -> Cost:
    """Both launches: the weights of the `used` experts once, each token once, the gated rows written and read, and the
    rows of the pairs written; operations of three products of `inner` by `hidden` for each pair."""
    weights = 3 * used * hidden * inner
    return Cost((weights + tokens * hidden + 2 * pairs * inner + pairs * hidden) * itemsize, 6 * pairs * hidden * inner)

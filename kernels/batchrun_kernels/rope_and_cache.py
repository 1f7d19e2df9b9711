"""Between the QKV product and the attention, in one pass: norm of the heads, RoPE, and keys and values to their pages.

RoPE: Su et al., "RoFormer", 2021. The first R dimensions of a head turn in pairs: (i, i + R/2) in the half-split form
of GPT-NeoX and Llama, (2i, 2i + 1) in the interleaved form of GPT-J; the others stay. y = x · cos + turned(x) · sin,
with cos and sin [T, R] as the model gives them. The norm is that of rms_norm.py over each head. Pages are those of
reshape_and_cache.py; 8-bit ones hold x / scale, cut to what the type can hold. Arithmetic is fp32, rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost
from batchrun_kernels.reshape_and_cache import limit_of, quantised

TILE = 1024  # elements of one operand per program


class HeadNorm(NamedTuple):
    """RMS norm of each head: weights of q and k, [D] or [heads, D]; `unit_offset` is Gemma's 1 + w."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    unit_offset: bool = False


class Pages(NamedTuple):
    """Pages of a layer [N, block_size, Hkv, D] and where each token goes (int64 [T], negative: nowhere)."""

    keys: Tensor
    values: Tensor
    slot_mapping: Tensor
    k_scale: float = 1.0  # what a stored 1 stands for
    v_scale: float = 1.0


@triton.jit
def _load_pairs(pointer, rows, HALF: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        d = tl.arange(0, 2 * HALF_PAD)[None, :]
        x = tl.load(pointer + d, mask=rows & (d < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (x.shape[0], HALF_PAD, 2)))
    else:
        d = tl.arange(0, HALF_PAD)[None, :]
        first = tl.load(pointer + d, mask=rows & (d < HALF), other=0.0).to(tl.float32)
        second = tl.load(pointer + HALF + d, mask=rows & (d < HALF), other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(pointer, rows, first, second, HALF: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        d = tl.arange(0, 2 * HALF_PAD)[None, :]
        x = tl.reshape(tl.join(first, second), (first.shape[0], 2 * HALF_PAD))
        tl.store(pointer + d, x.to(pointer.dtype.element_ty), mask=rows & (d < 2 * HALF))
    else:
        d = tl.arange(0, HALF_PAD)[None, :]
        tl.store(pointer + d, first.to(pointer.dtype.element_ty), mask=rows & (d < HALF))
        tl.store(pointer + HALF + d, second.to(pointer.dtype.element_ty), mask=rows & (d < HALF))


@triton.jit
def _turn_heads(
    source,  # [HEADS, 1] pointers to the first element of each head
    target,
    weight_ptr,  # None: no norm
    weight_at,  # [HEADS, 1] offsets of the heads' weights
    cos,  # [1, 1] pointers
    sin,
    rows,  # [HEADS, 1]: which heads there are
    eps,
    scale,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
):
    first, second = _load_pairs(source, rows, HALF, HALF_PAD, INTERLEAVED)
    one = rows | True
    d = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    if 2 * HALF < D:
        rest = tl.load(source + d, mask=rows & (d < D), other=0.0).to(tl.float32)
    if weight_ptr is not None:
        weight = weight_ptr + weight_at
        total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if 2 * HALF < D:
            total += tl.sum(rest * rest, 1)
        norm = tl.rsqrt(total / D + eps)[:, None]
        first_weight, second_weight = _load_pairs(weight, rows, HALF, HALF_PAD, INTERLEAVED)
        first *= norm * (first_weight + UNIT_OFFSET)
        second *= norm * (second_weight + UNIT_OFFSET)
        if 2 * HALF < D:
            rest *= norm * (tl.load(weight + d, mask=rows & (d < D), other=0.0).to(tl.float32) + UNIT_OFFSET)
    first_cos, second_cos = _load_pairs(cos, one, HALF, HALF_PAD, INTERLEAVED)
    first_sin, second_sin = _load_pairs(sin, one, HALF, HALF_PAD, INTERLEAVED)
    turned = quantised(first * first_cos - second * first_sin, scale, LIMIT)
    other = quantised(second * second_cos + first * second_sin, scale, LIMIT)
    _store_pairs(target, rows, turned, other, HALF, HALF_PAD, INTERLEAVED)
    if 2 * HALF < D:
        rest = quantised(rest, scale, LIMIT)
        tl.store(target + d, rest.to(target.dtype.element_ty), mask=rows & (d < D))


@triton.jit
def _rope_and_cache_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,  # None: no norm
    k_weight_ptr,
    k_pages_ptr,  # None: keys turn in place, values stay
    v_pages_ptr,
    slots_ptr,
    q_heads,
    kv_heads,
    eps,
    k_scale,
    v_scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    cos_stride,
    sin_stride,
    q_weight_stride,
    k_weight_stride,
    k_block_stride,
    k_token_stride,
    k_page_head_stride,
    v_block_stride,
    v_token_stride,
    v_page_head_stride,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    q_programs = tl.cdiv(q_heads, HEADS)
    one = tl.zeros((1, 1), tl.int32)
    cos = cos_ptr + token * cos_stride + one
    sin = sin_ptr + token * sin_stride + one
    if tl.program_id(1) < q_programs:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        q = q_ptr + token * q_stride + head * q_head_stride
        _turn_heads(
            q, q, q_weight_ptr, head * q_weight_stride, cos, sin, head < q_heads, eps, 1.0,
            D, HALF, HALF_PAD, REST_PAD, INTERLEAVED, UNIT_OFFSET, 0.0,
        )  # fmt: skip
    else:
        head = (tl.program_id(1) - q_programs) * HEADS + tl.arange(0, HEADS)[:, None]
        k = k_ptr + token * k_stride + head * k_head_stride
        if k_pages_ptr is None:
            _turn_heads(
                k, k, k_weight_ptr, head * k_weight_stride, cos, sin, head < kv_heads, eps, 1.0,
                D, HALF, HALF_PAD, REST_PAD, INTERLEAVED, UNIT_OFFSET, 0.0,
            )  # fmt: skip
        else:
            slot = tl.load(slots_ptr + token)
            if slot >= 0:
                block = slot // BLOCK_SIZE
                offset = slot % BLOCK_SIZE
                page = k_pages_ptr + block * k_block_stride + offset * k_token_stride + head * k_page_head_stride
                _turn_heads(
                    k, page, k_weight_ptr, head * k_weight_stride, cos, sin, head < kv_heads, eps, k_scale,
                    D, HALF, HALF_PAD, REST_PAD, INTERLEAVED, UNIT_OFFSET, LIMIT,
                )  # fmt: skip
                d = tl.arange(0, DV_PAD)[None, :]
                mask = (head < kv_heads) & (d < DV)
                v = tl.load(v_ptr + token * v_stride + head * v_head_stride + d, mask=mask)
                if LIMIT > 0:
                    v = quantised(v.to(tl.float32), v_scale, LIMIT)
                page = v_pages_ptr + block * v_block_stride + offset * v_token_stride + head * v_page_head_stride
                tl.store(page + d, v.to(v_pages_ptr.dtype.element_ty), mask=mask)


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Pages,
    *,
    norm: HeadNorm | None = None,
    interleaved: bool = False,
) -> None:
    """Norms and turns `q` [T, Hq, D] in place and `k` [T, Hkv, D] on its way to the pages; `v` [T, Hkv, Dv] goes along.

    `cos` and `sin` are [T, R] with R even and at most D; all are fp32, bf16 or fp16 with the last dimension contiguous.
    Pages may be of an 8-bit type that the device can store (e4m3 from sm_89 on). Slots are as in `reshape_and_cache`;
    queries of tokens without one turn too. Raises ValueError on shapes that do not fit together.
    """
    _check_turn(q, k, cos, sin, norm)
    tokens, kv_heads = k.shape[:2]
    block_size = pages.keys.shape[1]
    for new, stored in ((k, pages.keys), (v, pages.values)):
        expected = (pages.keys.shape[0], block_size, kv_heads, new.shape[2])
        if new.shape[:2] != (tokens, kv_heads) or tuple(stored.shape) != expected:
            shapes = f"{tuple(new.shape)} and pages of shape {tuple(stored.shape)}"
            raise ValueError(f"{shapes} must be [{tokens}, {kv_heads}, D] and [N, {block_size}, {kv_heads}, D]")
        if new.stride(2) != 1 or stored.stride(3) != 1:
            raise ValueError(f"heads with strides {new.stride()} and {stored.stride()} must be contiguous")
    if pages.slot_mapping.shape != (tokens,) or not pages.slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping of shape {tuple(pages.slot_mapping.shape)} must be a contiguous [{tokens}]")
    _launch(q, k, v, cos, sin, pages, norm, interleaved)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, norm: HeadNorm | None = None, interleaved: bool = False
) -> None:
    """The same with `k` turned in place, for an attention that writes its pages itself."""
    _check_turn(q, k, cos, sin, norm)
    _launch(q, k, k, cos, sin, None, norm, interleaved)


def _check_turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norm: HeadNorm | None) -> None:
    tokens, dim = k.shape[0], k.shape[2]
    if q.shape[0] != tokens or q.shape[2] != dim or q.stride(2) != 1 or k.stride(2) != 1:
        shapes = f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)}"
        raise ValueError(f"{shapes} must be [T, H, D] with one T and D and heads contiguous")
    rotary = cos.shape[-1]
    if cos.shape != (tokens, rotary) or sin.shape != cos.shape or rotary % 2 or not 0 < rotary <= dim:
        shapes = f"cos of shape {tuple(cos.shape)} and sin of shape {tuple(sin.shape)}"
        raise ValueError(f"{shapes} must be [{tokens}, R] with R even and at most {dim}")
    if cos.stride(1) != 1 or sin.stride(1) != 1:
        raise ValueError(f"cos and sin with strides {cos.stride()} and {sin.stride()} must have rows contiguous")
    for weight, x in () if norm is None else ((norm.q_weight, q), (norm.k_weight, k)):
        if weight.shape not in ((dim,), tuple(x.shape[1:])) or weight.stride(-1) != 1:
            raise ValueError(f"norm weight of shape {tuple(weight.shape)} must be [{dim}] or {list(x.shape[1:])}")


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Pages | None,
    norm: HeadNorm | None,
    interleaved: bool,
) -> None:
    tokens, q_heads, dim = q.shape
    kv_heads, value_dim, half = k.shape[1], v.shape[2], cos.shape[1] // 2
    if tokens == 0:
        return
    padded = triton.next_power_of_2(dim)
    heads = min(triton.next_power_of_2(max(q_heads, kv_heads)), max(1, TILE // padded))
    weights = (None, None) if norm is None else (norm.q_weight, norm.k_weight)
    stored = (None, None, None) if pages is None else (pages.keys, pages.values, pages.slot_mapping)
    _rope_and_cache_kernel[(tokens, triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads))](
        q,
        k,
        v,
        cos,
        sin,
        *weights,
        *stored,
        q_heads,
        kv_heads,
        0.0 if norm is None else norm.eps,
        1.0 if pages is None else pages.k_scale,
        1.0 if pages is None else pages.v_scale,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        *(weight.stride(0) if weight is not None and weight.dim() == 2 else 0 for weight in weights),
        *((0, 0, 0) if pages is None else pages.keys.stride()[:3]),
        *((0, 0, 0) if pages is None else pages.values.stride()[:3]),
        BLOCK_SIZE=1 if pages is None else pages.keys.shape[1],
        D=dim,
        DV=value_dim,
        DV_PAD=triton.next_power_of_2(value_dim),
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        REST_PAD=triton.next_power_of_2(max(1, dim - 2 * half)),
        HEADS=heads,
        INTERLEAVED=interleaved,
        UNIT_OFFSET=float(norm is not None and norm.unit_offset),
        LIMIT=0.0 if pages is None else limit_of(pages.keys.dtype),
        num_warps=max(1, min(4, heads * padded // 512)),
        enable_fp_fusion=True,
    )


def rope_torch(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    weight: Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
    interleaved: bool = False,
) -> Tensor:
    """The reference of one operand: x [T, H, D] normed and turned, in fp32, or fp64 for fp64 input."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.to(x.dtype) + float(unit_offset))
    rotary = cos.shape[1]
    turning, rest = x[..., :rotary], x[..., rotary:]
    if interleaved:
        turned = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-turning[..., rotary // 2 :], turning[..., : rotary // 2]), dim=-1)
    return torch.cat((turning * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype), rest), dim=-1)


def rope_and_cache_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Pages,
    *,
    norm: HeadNorm | None = None,
    interleaved: bool = False,
) -> None:
    """The reference of `rope_and_cache`."""
    turned = []
    for x, weight in ((q, norm and norm.q_weight), (k, norm and norm.k_weight)):
        eps, offset = (norm.eps, norm.unit_offset) if norm is not None else (0.0, False)
        turned.append(rope_torch(x, cos, sin, weight=weight, eps=eps, unit_offset=offset, interleaved=interleaved))
    q.copy_(turned[0])
    kept = pages.slot_mapping >= 0
    at = pages.slot_mapping[kept]
    block, offset_in = at // pages.keys.shape[1], at % pages.keys.shape[1]
    for stored, new, scale in ((pages.keys, turned[1], pages.k_scale), (pages.values, v, pages.v_scale)):
        limit = limit_of(stored.dtype)
        scaled = (new.float() / scale).clamp(-limit, limit) if limit else new
        stored[block, offset_in] = scaled[kept].to(stored.dtype)


def rope_and_cache_cost(
    tokens: int, q_heads: int, kv_heads: int, dk: int, dv: int, rotary: int, itemsize: int, page_itemsize: int
) -> Cost:
    """Reads q, k, v, cos, sin and a slot for each token once, writes q and the pages; six operations per turned
    element, a norm not counted."""
    moved = (2 * q_heads * dk + kv_heads * (dk + dv) + 2 * rotary) * itemsize
    moved += kv_heads * (dk + dv) * page_itemsize + 8
    return Cost(tokens * moved, 6 * tokens * (q_heads + kv_heads) * rotary)

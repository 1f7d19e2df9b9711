"""Writes the keys and values of new tokens into their pages.

Pages are [num_blocks, block_size, Hkv, D] in any layout whose last dimension is contiguous; slot s is token
s mod block_size of block s div block_size, as in PagedAttention (Kwon et al., 2023). Keys and values may differ in
head size, and are cast to the dtype of their pages; 8-bit ones hold x / scale, cut to what the type can hold. Tokens
with a negative slot (padding) are left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost

TILE = 2048  # elements of K and of V per program


@triton.jit
def quantised(x, scale, LIMIT: tl.constexpr):
    """fp32 x / scale within what an 8-bit type holds; x itself for a type without LIMIT."""
    if LIMIT > 0:
        x = tl.minimum(tl.maximum(x / scale, -LIMIT), LIMIT)
    return x


@triton.jit
def _copy_heads(
    source,
    target,
    source_head_stride,
    target_head_stride,
    head,
    heads,
    scale,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    LIMIT: tl.constexpr,
):
    d = tl.arange(0, D_PAD)[None, :]
    mask = (head < heads) & (d < D)
    values = tl.load(source + head * source_head_stride + d, mask=mask)
    if LIMIT > 0:
        values = quantised(values.to(tl.float32), scale, LIMIT)
    tl.store(target + head * target_head_stride + d, values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _reshape_and_cache_kernel(
    k_ptr,
    v_ptr,
    k_pages_ptr,
    v_pages_ptr,
    slots_ptr,
    heads,
    k_scale,
    v_scale,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    k_block_stride,
    k_token_stride,
    k_page_head_stride,
    v_block_stride,
    v_token_stride,
    v_page_head_stride,
    BLOCK_SIZE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        k_page = k_pages_ptr + block * k_block_stride + offset * k_token_stride
        v_page = v_pages_ptr + block * v_block_stride + offset * v_token_stride
        _copy_heads(
            k_ptr + token * k_stride, k_page, k_head_stride, k_page_head_stride, head, heads, k_scale,
            DK, DK_PAD, LIMIT,
        )  # fmt: skip
        _copy_heads(
            v_ptr + token * v_stride, v_page, v_head_stride, v_page_head_stride, head, heads, v_scale,
            DV, DV_PAD, LIMIT,
        )  # fmt: skip


def limit_of(dtype: torch.dtype) -> float:
    """The largest number of an 8-bit type; 0 for a wider one, which is not scaled."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0


def reshape_and_cache(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Scatters `k` [T, Hkv, Dk] and `v` [T, Hkv, Dv] into the pages at `slot_mapping` [T] int64.

    Slots must be below num_blocks · block_size (not checked on the device) and distinct, or negative to skip a token.
    The scales are what a stored 1 of 8-bit pages stands for; wider pages are not scaled. Raises ValueError on shapes
    that do not fit together or a head that is not contiguous.
    """
    tokens, heads, dk = k.shape
    dv = v.shape[2]
    block_size = k_pages.shape[1]
    for new, pages in ((k, k_pages), (v, v_pages)):
        expected = (tokens, heads), (k_pages.shape[0], block_size, heads, new.shape[2])
        if (tuple(new.shape[:2]), tuple(pages.shape)) != expected or new.stride(2) != 1 or pages.stride(3) != 1:
            shapes = f"{tuple(new.shape)} and pages of shape {tuple(pages.shape)}"
            raise ValueError(f"{shapes} must be [{tokens}, {heads}, D] and [N, {block_size}, {heads}, D], D contiguous")
    if slot_mapping.shape != (tokens,) or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping of shape {tuple(slot_mapping.shape)} must be a contiguous [{tokens}]")
    if tokens == 0:
        return
    dk_pad, dv_pad = triton.next_power_of_2(dk), triton.next_power_of_2(dv)
    heads_per_program = min(triton.next_power_of_2(heads), max(1, TILE // max(dk_pad, dv_pad)))
    _reshape_and_cache_kernel[(tokens, triton.cdiv(heads, heads_per_program))](
        k,
        v,
        k_pages,
        v_pages,
        slot_mapping,
        heads,
        k_scale,
        v_scale,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        BLOCK_SIZE=block_size,
        DK=dk,
        DV=dv,
        DK_PAD=dk_pad,
        DV_PAD=dv_pad,
        HEADS=heads_per_program,
        LIMIT=limit_of(k_pages.dtype),
        num_warps=max(1, min(4, heads_per_program * min(dk_pad, dv_pad) // 512)),
        enable_fp_fusion=True,
    )


def reshape_and_cache_torch(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """The reference of `reshape_and_cache`."""
    kept = slot_mapping >= 0
    block, offset = slot_mapping[kept] // k_pages.shape[1], slot_mapping[kept] % k_pages.shape[1]
    for new, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        limit = limit_of(pages.dtype)
        scaled = (new.float() / scale).clamp(-limit, limit) if limit else new
        pages[block, offset] = scaled[kept].to(pages.dtype)


def reshape_and_cache_cost(tokens: int, kv_heads: int, dk: int, dv: int, itemsize: int) -> Cost:
    """Reads each key and value once and writes it once, plus 8 bytes of slot per token."""
    return Cost(tokens * (2 * kv_heads * (dk + dv) * itemsize + 8), 0)

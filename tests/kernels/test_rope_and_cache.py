from __future__ import annotations

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved_rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half_split_rope

from batchrun_kernels.rope_and_cache import (
    HeadNorm,
    Pages,
    rope,
    rope_and_cache,
    rope_and_cache_cost,
    rope_and_cache_torch,
    rope_torch,
)

TOLERANCE = {torch.float32: (5e-6, 2e-6), torch.bfloat16: (2**-8, 1e-6), torch.float16: (2**-10, 1e-6)}
TOKENS, BLOCKS, BLOCK_SIZE = 5, 4, 4
SLOTS = [9, -1, 0, 14, 7]

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, value_dim: int, rotary: int) -> Inputs:
    """q, k, v as slices of one product, and cos and sin of no special form."""
    width = (heads + kv_heads) * dim + kv_heads * value_dim
    q, k, v = torch.randn(TOKENS, width).to(dtype).split([heads * dim, kv_heads * dim, kv_heads * value_dim], dim=1)
    angles = torch.randn(TOKENS, rotary)
    views = q.unflatten(1, (heads, dim)), k.unflatten(1, (kv_heads, dim)), v.unflatten(1, (kv_heads, value_dim))
    return *views, angles.cos().to(dtype), angles.sin().to(dtype)


def poisoned_pages(dtype: torch.dtype, kv_heads: int, dim: int, value_dim: int, **scales: float) -> Pages:
    keys, values = (torch.full((BLOCKS, BLOCK_SIZE, kv_heads, d), torch.nan).to(dtype) for d in (dim, value_dim))
    return Pages(keys, values, torch.tensor(SLOTS), **scales)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("norm", "heads", "kv_heads", "dim", "value_dim", "rotary"),
    [
        ("none", 4, 2, 64, 64, 64),
        ("shared", 6, 1, 80, 48, 32),
        ("each head", 3, 3, 48, 96, 48),
        ("gemma", 2, 1, 256, 256, 256),
    ],
)
def test_equals_the_reference_in_double(
    dtype: torch.dtype, interleaved: bool, norm: str, heads: int, kv_heads: int, dim: int, value_dim: int, rotary: int
) -> None:
    q, k, v, cos, sin = inputs(dtype, heads, kv_heads, dim, value_dim, rotary)
    q_weight, k_weight = (torch.randn((n, dim) if norm == "each head" else (dim,)).to(dtype) for n in (heads, kv_heads))
    head_norm = None if norm == "none" else HeadNorm(q_weight, k_weight, 1e-5, unit_offset=norm == "gemma")
    pages = poisoned_pages(dtype, kv_heads, dim, value_dim)
    wide_q, *others = (x.double() for x in (q, k, v, cos, sin))
    wide_pages = Pages(pages.keys.double(), pages.values.double(), pages.slot_mapping)
    wide_norm = head_norm and head_norm._replace(q_weight=q_weight.double(), k_weight=k_weight.double())
    rope_and_cache_torch(
        wide_q, others[0], others[1], others[2], others[3], wide_pages, norm=wide_norm, interleaved=interleaved
    )
    before = k.clone()
    rope_and_cache(q, k, v, cos, sin, pages, norm=head_norm, interleaved=interleaved)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(q.double(), wide_q, rtol=rtol, atol=4 * atol)
    torch.testing.assert_close(pages.keys.double(), wide_pages.keys, rtol=rtol, atol=4 * atol, equal_nan=True)
    torch.testing.assert_close(pages.values.double(), wide_pages.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(k, before)


@pytest.mark.parametrize("interleaved", [False, True])
def test_turns_queries_and_keys_in_place_and_nothing_beside_them(interleaved: bool) -> None:
    q, k, v, cos, sin = inputs(torch.float32, 4, 2, 64, 64, 32)
    expected = [rope_torch(x, cos, sin, interleaved=interleaved) for x in (q, k)]
    untouched = v.clone()
    rope(q, k, cos, sin, interleaved=interleaved)
    torch.testing.assert_close([q, k], expected)
    assert torch.equal(v, untouched)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_pages_hold_scaled_values_cut_at_the_limit(dtype: torch.dtype) -> None:
    q, k, v, cos, sin = inputs(torch.float32, 2, 2, 64, 64, 64)
    k[0], v[3] = 1e6, -1e6
    pages, expected = (poisoned_pages(dtype, 2, 64, 64, k_scale=0.25, v_scale=0.5) for _ in range(2))
    rope_and_cache_torch(q.clone(), k, v, cos, sin, expected)
    rope_and_cache(q, k, v, cos, sin, pages)
    step = torch.finfo(dtype).eps  # the fp32 before the cast may lie on either side of a middle
    for ours, reference in ((pages.keys, expected.keys), (pages.values, expected.values)):
        torch.testing.assert_close(ours.float(), reference.float(), rtol=step, atol=0.01, equal_nan=True)
    limit = torch.finfo(dtype).max
    assert pages.values.flatten(0, 1)[SLOTS[3]].float().eq(-limit).all()
    assert pages.keys.flatten(0, 1)[SLOTS[0]].float().abs().max() == limit


def test_takes_pages_with_heads_first() -> None:
    q, k, v, cos, sin = inputs(torch.float32, 2, 2, 64, 64, 64)
    keys, values = (torch.full((BLOCKS, 2, BLOCK_SIZE, 64), torch.nan).transpose(1, 2) for _ in range(2))
    pages, expected = Pages(keys, values, torch.tensor(SLOTS)), poisoned_pages(torch.float32, 2, 64, 64)
    rope_and_cache_torch(q.clone(), k, v, cos, sin, expected)
    rope_and_cache(q, k, v, cos, sin, pages)
    torch.testing.assert_close(pages.keys, expected.keys, equal_nan=True)
    torch.testing.assert_close(pages.values, expected.values, equal_nan=True)


def test_takes_no_tokens() -> None:
    pages = poisoned_pages(torch.float32, 1, 64, 64)._replace(slot_mapping=torch.empty(0, dtype=torch.int64))
    empty, angles = torch.empty(0, 1, 64), torch.empty(0, 64)
    rope_and_cache(empty, empty, empty, angles, angles, pages)
    assert pages.keys.isnan().all()


def test_reference_is_the_rope_of_transformers() -> None:
    x, angles = torch.randn(1, 3, TOKENS, 64), torch.randn(1, TOKENS, 32)
    halves, pairs = angles.repeat(1, 1, 2), angles.repeat_interleave(2, dim=-1)
    expected = half_split_rope(x, x, halves.cos(), halves.sin())[0][0].transpose(0, 1)
    torch.testing.assert_close(rope_torch(x[0].transpose(0, 1), halves[0].cos(), halves[0].sin()), expected)
    expected = interleaved_rope(x, x, pairs.cos(), pairs.sin())[0][0].transpose(0, 1)
    ours = rope_torch(x[0].transpose(0, 1), pairs[0].cos(), pairs[0].sin(), interleaved=True)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(TOKENS, 2, 32)}, r"q of shape \(5, 2, 32\) and k of shape \(5, 2, 64\)"),
        ({"cos": torch.zeros(TOKENS, 33)}, r"must be \[5, R\] with R even and at most 64"),
        ({"cos": torch.zeros(TOKENS, 66), "sin": torch.zeros(TOKENS, 66)}, "at most 64"),
        ({"v": torch.zeros(TOKENS, 1, 64)}, r"must be \[5, 2, D\] and \[N, 4, 2, D\]"),
        ({"norm": HeadNorm(torch.zeros(64), torch.zeros(3, 64), 1e-6)}, r"\(3, 64\) must be \[64\] or \[2, 64\]"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, object], message: str) -> None:
    names = ("q", "k", "v", "cos", "sin")
    given: dict[str, object] = dict(zip(names, inputs(torch.float32, 2, 2, 64, 64, 64), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        rope_and_cache(**given, pages=poisoned_pages(torch.float32, 2, 64, 64))  # type: ignore[arg-type]


def test_cost_counts_every_operand_once() -> None:
    cost = rope_and_cache_cost(10, 8, 2, 64, 32, 64, 2, 1)
    assert cost.bytes == 10 * ((2 * 8 * 64 + 2 * 96 + 2 * 64) * 2 + 2 * 96 + 8)

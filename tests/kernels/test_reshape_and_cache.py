from __future__ import annotations

import pytest
import torch

from batchrun_kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_cost, reshape_and_cache_torch

BLOCKS = 7


def poisoned_pages(block_size: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((BLOCKS, block_size, heads, dim), torch.nan, dtype=dtype)


def expected_pages(pages: torch.Tensor, new: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    flat = pages.clone().flatten(0, 1)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            flat[slot] = new[token].to(pages.dtype)
    return flat.view(pages.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 12, 16])
@pytest.mark.parametrize(("heads", "dk", "dv"), [(1, 64, 64), (3, 80, 80), (2, 192, 128), (9, 256, 256)])
def test_fills_the_given_slots_and_no_other(dtype: torch.dtype, block_size: int, heads: int, dk: int, dv: int) -> None:
    tokens = min(9, BLOCKS * block_size)
    k, v = torch.randn(tokens, heads, dk).to(dtype), torch.randn(tokens, heads, dv).to(dtype)
    slots = torch.randperm(BLOCKS * block_size)[:tokens]
    slots[::3] = -1
    k_pages, v_pages = (poisoned_pages(block_size, heads, dim, dtype) for dim in (dk, dv))
    k_expected, v_expected = expected_pages(k_pages, k, slots), expected_pages(v_pages, v, slots)
    k_reference, v_reference = k_pages.clone(), v_pages.clone()
    reshape_and_cache(k, v, k_pages, v_pages, slots)
    reshape_and_cache_torch(k, v, k_reference, v_reference, slots)
    for pages in (k_pages, k_reference):
        torch.testing.assert_close(pages, k_expected, rtol=0, atol=0, equal_nan=True)
    for pages in (v_pages, v_reference):
        torch.testing.assert_close(pages, v_expected, rtol=0, atol=0, equal_nan=True)


def test_takes_slices_of_a_merged_projection_and_pages_with_heads_first() -> None:
    qkv = torch.randn(5, (4 + 2 + 2) * 64)
    k, v = qkv[:, 256:384].view(5, 2, 64), qkv[:, 384:].view(5, 2, 64)
    slots = torch.tensor([30, 2, 17, 5, 16])
    k_pages, v_pages = (torch.full((BLOCKS, 2, 16, 64), torch.nan).transpose(1, 2) for _ in range(2))
    k_expected, v_expected = expected_pages(k_pages, k, slots), expected_pages(v_pages, v, slots)
    reshape_and_cache(k, v, k_pages, v_pages, slots)
    torch.testing.assert_close(k_pages, k_expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_pages, v_expected, rtol=0, atol=0, equal_nan=True)


def test_casts_to_the_dtype_of_the_pages() -> None:
    k, v = torch.randn(2, 1, 64), torch.randn(2, 1, 64)
    k_pages, v_pages = (poisoned_pages(4, 1, 64, torch.bfloat16) for _ in range(2))
    reshape_and_cache(k, v, k_pages, v_pages, torch.tensor([6, 1]))
    assert torch.equal(k_pages.flatten(0, 1)[[6, 1]], k.bfloat16())
    assert torch.equal(v_pages.flatten(0, 1)[[6, 1]], v.bfloat16())


def test_eight_bit_pages_hold_scaled_values_cut_at_the_limit() -> None:
    k, v, slots = torch.randn(3, 1, 64), torch.randn(3, 1, 64), torch.tensor([6, -1, 1])
    k[0, 0, 0], v[2, 0, 1] = 1e6, -1e6
    pages, expected = ([poisoned_pages(4, 1, 64, torch.float8_e4m3fn) for _ in range(2)] for _ in range(2))
    reshape_and_cache(k, v, pages[0], pages[1], slots, k_scale=0.25, v_scale=2.0)
    reshape_and_cache_torch(k, v, expected[0], expected[1], slots, k_scale=0.25, v_scale=2.0)
    for ours, reference in zip(pages, expected, strict=True):
        torch.testing.assert_close(ours.float(), reference.float(), rtol=0, atol=0, equal_nan=True)
    assert pages[0][1, 2, 0, 0].float() == 448
    assert pages[1][0, 1, 0, 1].float() == -448
    torch.testing.assert_close(pages[0][0, 1, 0].float() * 0.25, k[2, 0], rtol=0.07, atol=0.001)


def test_takes_no_tokens() -> None:
    pages = poisoned_pages(4, 1, 64, torch.float32)
    reshape_and_cache(torch.empty(0, 1, 64), torch.empty(0, 1, 64), pages, pages, torch.empty(0, dtype=torch.int64))
    assert pages.isnan().all()


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "slots", "message"),
    [
        ((3, 2, 64), (3, 2, 32), 3, r"must be \[3, 2, D\]"),
        ((3, 1, 64), (3, 1, 64), 3, r"must be \[3, 1, D\]"),
        ((3, 2, 64), (4, 2, 64), 3, r"\(4, 2, 64\)"),
        ((3, 2, 64), (3, 2, 64), 4, r"slot_mapping of shape \(4,\)"),
    ],
)
def test_refuses_shapes_that_do_not_fit(
    k_shape: tuple[int, ...], v_shape: tuple[int, ...], slots: int, message: str
) -> None:
    pages = poisoned_pages(4, 2, 64, torch.float32)
    with pytest.raises(ValueError, match=message):
        reshape_and_cache(torch.zeros(k_shape), torch.zeros(v_shape), pages, pages, torch.arange(slots))


def test_cost_counts_a_read_and_a_write_of_each_head() -> None:
    assert reshape_and_cache_cost(10, 8, 128, 64, 2).bytes == 10 * (2 * 8 * 192 * 2 + 8)

from __future__ import annotations

import pytest
import torch

from batchrun_kernels.grouped_gemm import (
    Tiles,
    down_experts,
    down_experts_torch,
    gate_up_experts,
    gate_up_experts_torch,
    grouped_gemm_cost,
    route,
    tiles_of,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
SMALL = Tiles(16, 16, 16, 4, 2)


def poison(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


# Experts with none, a few, and more than a tile's tokens; 4 is no expert; no dimension is a multiple of a tile.
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("index", "activation"),
    [
        ([[0, 3], [3, 1], [0, 3], *[[3, 0]] * 16], "silu"),
        ([[2]] * 17, "gelu_tanh"),
        ([[4, 0], [1, 4], [4, 4]], "silu"),
    ],
)
def test_equals_the_reference_in_double(dtype: torch.dtype, index: list[list[int]], activation: str) -> None:
    tokens, experts, hidden, inner = len(index), 4, 40, 24
    routing = route(torch.tensor(index), experts)
    pairs = len(routing.order)
    x = torch.randn(tokens, 64).to(dtype)[:, :hidden]
    up, down = (torch.randn(experts, *shape).to(dtype) for shape in ((2 * inner, hidden), (hidden, inner)))
    scales = torch.rand(tokens, routing.top_k)
    gated = gate_up_experts(x, up, routing, activation, out=poison(pairs, inner, dtype=dtype), tiles=SMALL)
    expected = gate_up_experts_torch(x.double(), up.double(), routing, activation)
    torch.testing.assert_close(gated.double(), expected, rtol=TOLERANCE[dtype], atol=1e-5)
    out = down_experts(gated, down, routing, scales, out=poison(pairs, hidden, dtype=dtype), tiles=SMALL)
    expected = down_experts_torch(gated.double(), down.double(), routing, scales.double())
    # Long sums cancel: what was rounded is as large as their terms.
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=1e-4)
    same = down_experts_torch(gated, down, routing, scales)
    torch.testing.assert_close(out, same, rtol=2 * TOLERANCE[dtype], atol=1e-4)
    chosen = torch.tensor(index).flatten() < experts
    assert bool((out[~chosen] == 0).all())


def test_tiles_by_default_give_the_same_and_takes_no_tokens() -> None:
    routing = route(torch.randint(0, 3, (9, 2)), 3)
    x, up = torch.randn(9, 32), torch.randn(3, 32, 32)
    expected = gate_up_experts_torch(x, up, routing, "silu")
    torch.testing.assert_close(gate_up_experts(x, up, routing, "silu"), expected)
    empty = route(torch.empty(0, 2, dtype=torch.int64), 3)
    assert gate_up_experts(x[:0], up, empty, "silu").shape == (0, 16)


def test_tiles_follow_the_tokens_of_an_expert() -> None:
    assert [tiles_of(pairs, 8, 2, gated=True).block_m for pairs in (8, 200, 10_000)] == [16, 32, 128]
    assert tiles_of(10_000, 8, 4, gated=True).block_m == 32


def test_refuses_what_it_cannot_take() -> None:
    routing = route(torch.zeros(2, 2, dtype=torch.int64), 2)
    x, up, down = torch.zeros(2, 16), torch.zeros(2, 32, 16), torch.zeros(2, 16, 16)
    with pytest.raises(ValueError, match="'relu' is not one of silu, gelu_tanh"):
        gate_up_experts(x, up, routing, "relu")
    with pytest.raises(ValueError, match="2 pairs for each token"):
        gate_up_experts(x[:1], up, routing, "silu")
    with pytest.raises(ValueError, match="must be of one type and depth"):
        gate_up_experts(x, up.bfloat16(), routing, "silu")
    with pytest.raises(ValueError, match="3 offsets are not one more than 1 experts"):
        gate_up_experts(x, up[:1], routing, "silu")
    with pytest.raises(ValueError, match="must have a row, and a factor contiguous"):
        down_experts(torch.zeros(4, 16), down, routing, torch.zeros(3))
    with pytest.raises(ValueError, match="out of shape"):
        gate_up_experts(x, up, routing, "silu", out=torch.zeros(3, 16))


def test_cost_counts_the_weights_of_used_experts_once() -> None:
    cost = grouped_gemm_cost(4, 8, 2, 10, 6, 2)
    assert cost.bytes == 2 * (3 * 2 * 10 * 6 + 4 * 10 + 2 * 8 * 6 + 8 * 10)
    assert cost.flops == 8 * 3 * 2 * 10 * 6

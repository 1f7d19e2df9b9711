from __future__ import annotations

import pytest
import torch

from batchrun_kernels.matmul import fixed_tiles, matmul, matmul_cost, matmul_torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def inputs(rows: int, width: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x with rows that are apart, a weight that keeps the products near one, and a bias."""
    x = torch.randn(rows, depth + 24).to(dtype)[:, :depth]
    return x, (torch.randn(width, depth) * depth**-0.5).to(dtype), torch.randn(width).to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 40, 200), (70, 130, 64), (3, 1, 5)])
def test_equals_the_reference_in_double(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x, weight, bias = inputs(*shape, dtype)
    out = torch.full((shape[0], shape[1] + 2), torch.nan, dtype=dtype)
    for added in (bias, None):
        assert matmul(x, weight, added, out=out[:, 1:-1]).data_ptr() == out[:, 1:].data_ptr()
        expected = matmul_torch(x.double(), weight.double(), None if added is None else added.double())
        torch.testing.assert_close(out[:, 1:-1].double(), expected, rtol=TOLERANCE[dtype], atol=1e-5)
        same = matmul_torch(x, weight, added)
        torch.testing.assert_close(out[:, 1:-1], same, rtol=2 * TOLERANCE[dtype], atol=1e-5)
    assert out[:, [0, -1]].isnan().all()


@pytest.mark.usefixtures("sums_in_one_order")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight, bias = inputs(150, 70, 300, dtype)
    whole = matmul(x, weight, bias)
    for start, stop in ((0, 1), (149, 150), (3, 20), (63, 66), (17, 146)):
        assert torch.equal(matmul(x[start:stop], weight, bias), whole[start:stop]), (start, stop)
    order = torch.randperm(150)
    assert torch.equal(matmul(x[order], weight, bias), whole[order])
    x[1:] = torch.nan
    assert torch.equal(matmul(x, weight, bias)[0], whole[0])


def test_a_weight_may_lie_the_other_way() -> None:
    x, weight, _ = inputs(20, 70, 50, torch.float32)
    torch.testing.assert_close(matmul(x, weight.T.contiguous().T), matmul_torch(x, weight), rtol=1e-5, atol=1e-5)


def test_no_rows_at_all() -> None:
    assert matmul(torch.zeros(0, 8), torch.zeros(3, 8)).shape == (0, 3)


def test_tiles_follow_from_the_type_alone() -> None:
    assert fixed_tiles(2).block_m == 64
    assert fixed_tiles(4).block_m == 32


def test_refuses_what_it_cannot_take() -> None:
    x, weight = torch.zeros(2, 16), torch.zeros(8, 16)
    with pytest.raises(ValueError, match="must be of one type and depth"):
        matmul(x, weight.half())
    with pytest.raises(ValueError, match="must be of one type and depth"):
        matmul(x, weight[:, :8])
    with pytest.raises(ValueError, match="the rows of x contiguous"):
        matmul(torch.zeros(16, 2).T, weight)
    with pytest.raises(ValueError, match=r"bias of shape \(7,\) must be a contiguous \[8\]"):
        matmul(x, weight, torch.zeros(7))
    with pytest.raises(ValueError, match="out of shape"):
        matmul(x, weight, out=torch.zeros(2, 7))


def test_cost_counts_each_weight_once() -> None:
    cost = matmul_cost(4, 10, 6, 2)
    assert cost.bytes == 2 * (60 + 4 * 16)
    assert cost.flops == 2 * 4 * 60

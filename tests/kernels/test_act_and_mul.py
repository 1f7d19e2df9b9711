from __future__ import annotations

import pytest
import torch

from batchrun_kernels.act_and_mul import ACTIVATIONS, TILE, act_and_mul, act_and_mul_cost, act_and_mul_torch

TOLERANCE = {torch.float32: (5e-6, 1e-6), torch.bfloat16: (2**-8, 1e-6), torch.float16: (2**-10, 1e-6)}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 96), (5, 1000), (2, TILE + 40)])
def test_equals_the_reference_in_double(dtype: torch.dtype, activation: str, rows: int, width: int) -> None:
    x = (3 * torch.randn(rows, 2 * width)).to(dtype)
    out = act_and_mul(x, activation, out=torch.full((rows, width), torch.nan, dtype=dtype))
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), act_and_mul_torch(x.double(), activation), rtol=rtol, atol=atol)
    torch.testing.assert_close(out, act_and_mul_torch(x, activation), rtol=2 * rtol, atol=atol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_do_not_overflow(activation: str) -> None:
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert torch.equal(act_and_mul(x, activation), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]))


def test_reads_and_writes_strided_rows_and_nothing_else() -> None:
    x = torch.randn(4, 100)[:, 20:92]
    canvas = torch.full((4, 48), torch.nan)
    act_and_mul(x, "silu", out=canvas[:, 8:44])
    torch.testing.assert_close(canvas[:, 8:44], act_and_mul_torch(x, "silu"))
    assert canvas.isnan().sum() == 4 * 12


def test_takes_no_rows() -> None:
    assert act_and_mul(torch.empty(0, 64), "silu").shape == (0, 32)


@pytest.mark.parametrize(
    ("x", "activation", "message"),
    [
        (torch.zeros(2, 8), "relu", "'relu' is not one of silu, gelu_tanh"),
        (torch.zeros(2, 7), "silu", r"must be \[T, 2I\]"),
        (torch.zeros(8, 2).t(), "silu", "rows contiguous"),
    ],
)
def test_refuses_what_it_cannot_take(x: torch.Tensor, activation: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act_and_mul(x, activation)


def test_cost_counts_two_reads_and_a_write() -> None:
    assert act_and_mul_cost(10, 64, 2).bytes == 3 * 10 * 64 * 2

from __future__ import annotations

import pytest
import torch

from batchrun_kernels.rms_norm import (
    MAX_HIDDEN,
    add_rms_norm,
    add_rms_norm_torch,
    rms_norm,
    rms_norm_cost,
    rms_norm_torch,
)

TOLERANCE = {torch.float32: (2e-6, 1e-6), torch.bfloat16: (2**-8, 1e-6), torch.float16: (2**-10, 1e-6)}
DTYPES = list(TOLERANCE)
SHAPES = [(1, 64), (5, 96), (7, 576), (2, 3000), (33, 128)]  # powers of two and not, one and many rows per program


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_equals_the_reference_in_double(dtype: torch.dtype, shape: tuple[int, int], unit_offset: bool) -> None:
    x = (3 * torch.randn(shape)).to(dtype)
    weight = torch.randn(shape[1]).to(dtype)
    out = rms_norm(x, weight, 1e-5, unit_offset=unit_offset, out=poisoned(*shape, dtype=dtype))
    expected = rms_norm_torch(x.double(), weight.double(), 1e-5, unit_offset=unit_offset)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_addition_returns_the_norm_of_the_rounded_sum(
    dtype: torch.dtype, shape: tuple[int, int], unit_offset: bool
) -> None:
    x, residual = torch.randn(shape).to(dtype), (10 * torch.randn(shape)).to(dtype)
    weight = torch.randn(shape[1]).to(dtype)
    out, total = add_rms_norm(
        x,
        residual,
        weight,
        1e-6,
        unit_offset=unit_offset,
        out=poisoned(*shape, dtype=dtype),
        residual_out=poisoned(*shape, dtype=dtype),
    )
    assert torch.equal(total, x + residual)
    expected = rms_norm_torch(total.double(), weight.double(), 1e-6, unit_offset=unit_offset)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    reference, reference_total = add_rms_norm_torch(x, residual, weight, 1e-6, unit_offset=unit_offset)
    assert torch.equal(total, reference_total)
    torch.testing.assert_close(out, reference, rtol=2 * rtol, atol=atol)


def test_writes_in_place_over_strided_rows_and_nothing_else() -> None:
    x_all, residual_all = poisoned(5, 160, dtype=torch.bfloat16), poisoned(5, 200, dtype=torch.bfloat16)
    x, residual = x_all[:, 32:128], residual_all[:, 8:104]
    x.copy_(torch.randn(5, 96))
    residual.copy_(torch.randn(5, 96))
    weight = torch.randn(96)
    expected, expected_total = add_rms_norm_torch(x.clone(), residual.clone(), weight, 1e-6)
    out, total = add_rms_norm(x, residual, weight, 1e-6, out=x, residual_out=residual)
    assert out.data_ptr() == x.data_ptr()
    assert total.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(x, expected, rtol=2**-7, atol=1e-6)
    assert torch.equal(residual, expected_total)
    assert x_all.isnan().sum() == 5 * 64
    assert residual_all.isnan().sum() == 5 * 104


def test_keeps_a_residual_stream_wider_than_the_activations() -> None:
    x, residual = torch.randn(3, 64).bfloat16(), torch.randn(3, 64)
    out, total = add_rms_norm(x, residual, torch.ones(64), 1e-6)
    assert out.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    assert torch.equal(total, x.float() + residual)


def test_epsilon_keeps_a_zero_row_finite() -> None:
    out = rms_norm(torch.zeros(2, 64), torch.ones(64), 1e-6)
    assert torch.equal(out, torch.zeros(2, 64))


@pytest.mark.parametrize("hidden", [128, 4100])  # many rows in a program, one
def test_a_row_has_the_same_bits_alone(hidden: int) -> None:
    x, weight = torch.randn(20, hidden), torch.randn(hidden)
    together = rms_norm(x, weight, 1e-6)
    for start, stop in ((0, 1), (19, 20), (3, 18)):
        assert torch.equal(rms_norm(x[start:stop], weight, 1e-6), together[start:stop])


def test_takes_no_rows() -> None:
    assert rms_norm(torch.empty(0, 64), torch.ones(64), 1e-6).shape == (0, 64)


def test_reference_is_the_norm_of_torch() -> None:
    x, weight = torch.randn(4, 48, dtype=torch.float64), torch.randn(48, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x, (48,), weight, 1e-6)
    torch.testing.assert_close(rms_norm_torch(x, weight, 1e-6), expected)
    torch.testing.assert_close(rms_norm_torch(x, weight - 1, 1e-6, unit_offset=True), expected)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(1, MAX_HIDDEN + 1), torch.zeros(MAX_HIDDEN + 1), f"limit of {MAX_HIDDEN}"),
        (torch.zeros(64, 4).t(), torch.zeros(64), "rows contiguous"),
        (torch.zeros(4, 64), torch.zeros(32), r"weight of shape \(32,\)"),
    ],
)
def test_refuses_what_it_cannot_take(x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, 1e-6)


def test_cost_counts_every_operand_once() -> None:
    assert rms_norm_cost(10, 64, 2).bytes == 2 * (10 * 64 * 2 + 64)
    assert rms_norm_cost(10, 64, 2, residual=True).bytes == 2 * (10 * 64 * 4 + 64)

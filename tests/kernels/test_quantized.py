"""int8 products on the CPU against the same integers in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchrun_kernels.cpu.quantized import has_vnni, multiply, pack, quantize_rows, scale_rows
from batchrun_kernels.cpu.scalar import elements

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_vnni = pytest.mark.skipif(not has_vnni(), reason="this processor has no AVX512-VNNI")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_rounded_to_their_own_scale(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 33) * torch.tensor([[1e-3], [1.0], [100.0], [3.0], [0.0]])).to(dtype)
    out, scales = np.full((5, 36), 7, dtype=np.uint8), np.empty(5, dtype=np.float32)
    quantize_rows(elements(x), out, scales)
    wide = x.float().numpy()
    np.testing.assert_allclose(scales, np.abs(wide).max(axis=1) / 127, rtol=1e-6)
    assert (np.abs((out[:, :33].astype(np.float32) - 128) * scales[:, None] - wide) <= 0.501 * scales[:, None]).all()
    assert set(np.abs(out[:4, :33].astype(int) - 128).max(axis=1)) == {127}
    assert (out[4, :33] == 128).all()
    assert (out[:, 33:] == 7).all()


@needs_vnni
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 4), (10, 3), (130, 576), (192, 50)])
def test_products_are_exact_before_they_are_scaled(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(rows)
    x = random.integers(1, 256, size=(rows, inputs), dtype=np.uint8)
    weight = random.integers(-127, 128, size=(outputs, inputs), dtype=np.int8)
    x_scales, scales = (random.uniform(0.001, 0.01, n).astype(np.float32) for n in (rows, outputs))
    bias = random.normal(size=outputs).astype(np.float32)
    add = torch.from_numpy(random.normal(size=(rows, outputs))).to(dtype)
    tiles, offsets = pack(weight), 128 * weight.sum(axis=1, dtype=np.int32)
    padded = random.integers(0, 256, size=(rows, 4 * tiles.shape[1]), dtype=np.uint8)  # what lies beyond x is ignored
    padded[:, :inputs] = x
    exact = (x.astype(np.float64) - 128) @ weight.astype(np.float64).T * x_scales[:, None] * scales
    none, out = np.empty(0, dtype=np.float32), torch.full((rows, outputs), torch.nan, dtype=dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    for with_bias, with_add in [(False, False), (True, False), (False, True), (True, True)]:
        expected = exact + with_bias * bias + with_add * add.double().numpy()
        more = elements(add if with_add else add[:0])
        middle = len(tiles) // 2
        for begin, end in [(middle, len(tiles)), (0, middle)]:
            multiply(
                padded, x_scales, tiles, scales, offsets, bias if with_bias else none, more, elements(out), begin, end
            )  # fmt: skip
        np.testing.assert_allclose(out.double().numpy(), expected, rtol=tolerance, atol=tolerance)


@needs_vnni
def test_the_largest_numbers_do_not_saturate() -> None:
    weight = np.full((64, 4096), 127, dtype=np.int8)
    x, out = np.full((1, 4096), 255, dtype=np.uint8), np.empty((1, 64), dtype=np.float32)
    ones, none = np.ones(64, dtype=np.float32), np.empty(0, dtype=np.float32)
    multiply(x, ones[:1], pack(weight), ones, 128 * weight.sum(axis=1, dtype=np.int32), none, out[:0], out, 0, 1)
    assert (out == 127 * 127 * 4096).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_scaled_and_rounded_once(dtype: torch.dtype) -> None:
    y, scales, bias = torch.randn(3, 37), torch.rand(3), torch.randn(37)
    add, out = torch.randn(3, 37).to(dtype), torch.empty(3, 37, dtype=dtype)
    expected = y.double() * scales[:, None] + bias + add
    scale_rows(y.numpy(), scales.numpy(), bias.numpy(), elements(add), elements(out))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)

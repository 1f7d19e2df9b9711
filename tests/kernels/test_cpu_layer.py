"""The CPU kernels between matrix products against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit

from batchrun_kernels.cpu.layer import argmax_rows, gelu_tanh_and_mul, rms_norm, rotate, silu_and_mul
from batchrun_kernels.cpu.scalar import elements, exp2

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}  # half a step of the type, relative


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 100])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(5, width).to(dtype), torch.rand(width) + 0.5
    out = torch.full_like(x, float("nan"))
    rms_norm(elements(x), weight.numpy(), 1e-3, elements(out))
    close(out, F.rms_norm(x.double(), (width,), weight.double(), 1e-3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 64])
def test_gated_activations(dtype: torch.dtype, width: int) -> None:
    x = (torch.randn(6, 2 * width) * 5).to(dtype)
    x[0], x[1] = 90.0, -90.0
    gate, up = x.double().chunk(2, dim=1)
    out = torch.full((6, width), float("nan")).to(dtype)
    silu_and_mul(elements(x), elements(out))
    close(out, F.silu(gate) * up)
    gelu_tanh_and_mul(elements(x), elements(out))
    close(out, F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "turning"), [(8, 8), (64, 64), (20, 12)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotate(dtype: torch.dtype, dim: int, turning: int, normed: bool) -> None:
    tokens, heads = 5, 3
    whole = torch.randn(tokens, heads + 2, dim).to(dtype)  # the last two heads are not turned
    x, rest = whole[:, :heads], whole[:, heads:].clone()
    angle = torch.rand(tokens, turning // 2) * 6
    cos, sin = (torch.cat([part, part], dim=1) for part in (angle.cos(), angle.sin()))
    weights = torch.rand(heads, dim) + 0.5
    exact = x.double()
    if normed:
        exact = (exact * (exact.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weights.double()).to(dtype).double()
    part = exact[..., :turning]
    half = torch.cat([-part[..., turning // 2 :], part[..., : turning // 2]], dim=-1)
    turned = part * cos.double()[:, None] + half * sin.double()[:, None]
    norms = weights.numpy() if normed else np.empty((0, 0), dtype=np.float32)
    rotate(elements(x), cos.numpy(), sin.numpy(), norms, 1e-5)
    torch.testing.assert_close(
        x.double(), torch.cat([turned, exact[..., turning:]], dim=-1), rtol=0.01, atol=8 * TOLERANCE[dtype]
    )
    assert torch.equal(whole[:, heads:], rest)


@njit
def powers(x, out):
    for i in range(x.shape[0]):
        out[i] = exp2(x[i])


def test_exp2_is_float32_and_vanishes_below_the_normal_numbers() -> None:
    x = np.linspace(-140, 126, 100_001).astype(np.float32)
    out = np.empty_like(x)
    powers(x, out)
    exact = np.exp2(x.astype(np.float64))
    normal = x >= -126
    assert np.abs(out[normal] / exact[normal] - 1).max() < 5e-7
    assert (out[~normal] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 1000, 1024, 5000])
def test_argmax_rows(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(7, width).to(dtype)
    x[1] = float("-inf")
    x[2, width // 2 :] = float("-inf")
    x[3] = 0.5  # the first of equal ones
    x[4, -1] = 9.0
    out = np.full(7, -1)
    argmax_rows(elements(x), out)
    assert out.tolist() == x.float().argmax(dim=1).tolist()

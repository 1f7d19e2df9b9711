"""Weights of rows of scores against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from batchrun_kernels.cpu.scalar import elements
from batchrun_kernels.cpu.softmax import RUN, largest, weigh

FACTOR, FLOOR = np.float32(1.5), np.float32(-1e30)


@njit
def masked(scores, a, b, weights, scales, values):
    top = largest(scores, RUN, a, b, FACTOR, FLOOR, RUN, 0)
    return top, weigh(scores, RUN, a, b, FACTOR, top, weights, scales, values, RUN, 0)


@njit
def whole(scores, weights, scales, values):
    top = largest(scores, RUN, 0, RUN, FACTOR, FLOOR, RUN, 1)
    return top, weigh(scores, RUN, 0, RUN, FACTOR, top, weights, scales, values, RUN, 1)


@njit
def short(scores, a, b, weights, scales, values):
    top = largest(scores, 16, a, b, FACTOR, FLOOR, 16, 0)
    return top, weigh(scores, 16, a, b, FACTOR, top, weights, scales, values, 16, 0)


def scores_of(count: int) -> np.ndarray:
    return (np.random.default_rng(count).standard_normal(count) * 20).astype(np.float32)


def exact(scores: np.ndarray, a: int, b: int) -> tuple[float, np.ndarray]:
    """Largest score in units of log2, and weights; nothing is seen outside of [a, b)."""
    a, b = max(a, 0), min(b, len(scores))
    scaled = scores.astype(np.float64) * FACTOR
    top = scaled[a:b].max() if b > a else float(FLOOR)
    weights = np.zeros(len(scores))
    weights[a:b] = np.exp2(scaled[a:b] - top)
    return float(top), weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("a", "b"), [(0, RUN), (-40, 900), (3, 77), (16, 32), (127, 128), (0, 1), (60, 60)])
def test_a_part_of_a_row_is_seen(a: int, b: int, dtype: torch.dtype) -> None:
    scores, out = scores_of(2 * RUN), torch.full((2 * RUN,), 7.0, dtype=dtype)
    top, total = masked(scores, a, b, elements(out), np.empty(0, np.float32), np.empty(0, np.uint16))
    expected_top, expected = exact(scores[RUN:], a, b)
    assert top == pytest.approx(expected_top, rel=1e-6)
    assert total == pytest.approx(expected.sum(), rel=1e-5)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    np.testing.assert_allclose(out[RUN:].double().numpy(), expected, rtol=tolerance, atol=1e-7)
    assert (out[:RUN] == 7).all()


def test_a_whole_row_has_the_same_bits_with_and_without_masks() -> None:
    scores = scores_of(2 * RUN)
    some, every = np.zeros(2 * RUN, np.float32), np.zeros(2 * RUN, np.float32)
    nothing = np.empty(0, np.float32), np.empty(0, np.uint16)
    assert masked(scores, 0, RUN, some, *nothing) == whole(scores, every, *nothing)
    assert (some == every).all()
    assert every[RUN:].any()


@pytest.mark.parametrize(("a", "b"), [(0, 16), (-5, 7), (9, 40), (4, 4)])
def test_a_run_of_another_length(a: int, b: int) -> None:
    scores, out = scores_of(48), np.full(48, 7, np.float32)
    top, total = short(scores, a, b, out, np.empty(0, np.float32), np.empty(0, np.uint16))
    expected_top, expected = exact(scores[16:32], a, b)
    assert (top, total) == (pytest.approx(expected_top, rel=1e-6), pytest.approx(expected.sum(), rel=1e-5))
    np.testing.assert_allclose(out[16:32], expected, rtol=1e-5, atol=1e-7)
    assert (out[:16] == 7).all()
    assert (out[32:] == 7).all()


def test_scales_multiply_the_weights_of_int8_values_and_not_their_sum() -> None:
    scores, out, scales = scores_of(2 * RUN), np.zeros(2 * RUN, np.float32), np.linspace(0.1, 3, RUN).astype(np.float32)
    _, total = masked(scores, 5, 99, out, scales, np.empty(0, np.int8))
    _, expected = exact(scores[RUN:], 5, 99)
    assert total == pytest.approx(expected.sum(), rel=1e-5)
    np.testing.assert_allclose(out[RUN:], expected * scales, rtol=1e-5, atol=1e-7)


def test_scores_far_below_the_largest_weigh_nothing() -> None:
    scores, out = np.full(2 * RUN, -1e30, np.float32), np.zeros(2 * RUN, np.float32)
    scores[RUN + 3] = 5.0
    top, total = whole(scores, out, np.empty(0, np.float32), np.empty(0, np.uint16))
    assert (top, total) == (7.5, 1.0)
    assert out[RUN + 3] == 1
    assert np.delete(out[RUN:], 3).max() < 1e-37

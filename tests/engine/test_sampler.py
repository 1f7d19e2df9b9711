"""Draws follow the exact distribution, and a row's draw depends on nothing but its seed and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from batchrun.engine import sampler
from batchrun.engine.sampler import gumbel_noise, sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0, 0.7, -8.0])
DRAWS = 20_000


def draw(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seeds: np.ndarray | int = 7,
    positions: np.ndarray | int = 0,
) -> np.ndarray:
    """One parameter for all rows of `logits` [K, V]; seeds and positions may differ."""
    count = len(logits)
    return sample(
        logits,
        np.full(count, temperature, dtype=np.float32),
        np.full(count, top_k, dtype=np.int64),
        np.full(count, top_p, dtype=np.float32),
        np.broadcast_to(np.asarray(seeds, dtype=np.int64), count).copy(),
        np.broadcast_to(np.asarray(positions, dtype=np.int64), count).copy(),
    )


def exact(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """float64 [V], by the definitions: k most likely, then the smallest set that reaches top_p, renormalised."""
    weights = np.exp(LOGITS.numpy().astype(np.float64) / temperature)
    order = np.argsort(-weights)
    kept = order[: top_k or len(order)]
    share = weights[kept] / weights[kept].sum()
    kept = kept[: int(np.searchsorted(np.cumsum(share), top_p)) + 1]
    result = np.zeros(len(weights))
    result[kept] = weights[kept] / weights[kept].sum()
    return result


def chi_square(tokens: np.ndarray, probability: np.ndarray) -> tuple[float, float]:
    """The statistic, and a limit that a true match passes by five standard deviations of it."""
    counts = np.bincount(tokens, minlength=len(probability))
    assert counts[probability == 0].sum() == 0, "a token that the filters remove was drawn"
    possible = probability > 0
    expected = probability[possible] * len(tokens)
    freedom = max(1, int(possible.sum()) - 1)
    return float(((counts[possible] - expected) ** 2 / expected).sum()), freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.6, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8), (1.3, 5, 0.7), (0.5, 4, 0.95)],
)
def test_draws_follow_the_softmax(vary: str, temperature: float, top_k: int, top_p: float) -> None:
    numbers = np.arange(DRAWS)
    tokens = draw(LOGITS.expand(DRAWS, -1), temperature, top_k, top_p, **{vary: numbers})
    statistic, limit = chi_square(tokens, exact(temperature, top_k, top_p))
    assert statistic < limit


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of draws fill the joint distribution, which a short-sighted hash would not."""
    steps = np.arange(DRAWS)
    probability = exact(1.0, 0, 1.0)
    joint = np.outer(probability, probability).ravel()
    often = joint * DRAWS >= 5
    logits = LOGITS.expand(DRAWS, -1)
    for first, second in (
        (draw(logits, positions=steps), draw(logits, positions=steps + 1)),
        (draw(logits, seeds=steps), draw(logits, seeds=steps + 1)),
        (draw(logits, seeds=steps, positions=5), draw(logits, seeds=steps + 1, positions=4)),
    ):
        counts = np.bincount(first * len(probability) + second, minlength=len(joint))[often]
        expected = joint[often] * DRAWS
        freedom = int(often.sum())
        assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * math.sqrt(2 * freedom)


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(0)
    count = 40
    logits = torch.from_numpy(rng.normal(size=(count, 50)).astype(np.float32))
    temperature = rng.choice([0, 0.5, 1, 1.5], count).astype(np.float32)
    top_k = rng.choice([0, 1, 5, 50, 80], count)
    top_p = rng.choice([0.3, 0.9, 1], count).astype(np.float32)
    seeds, positions = rng.integers(0, 2**62, count), rng.integers(0, 5000, count)
    together = sample(logits, temperature, top_k, top_p, seeds, positions)
    for i in range(count):
        one = slice(i, i + 1)
        assert sample(logits[one], temperature[one], top_k[one], top_p[one], seeds[one], positions[one]) == together[i]
    turn = rng.permutation(count)
    shuffled = sample(logits[turn], temperature[turn], top_k[turn], top_p[turn], seeds[turn], positions[turn])
    assert (shuffled == together[turn]).all()
    assert (together[temperature == 0] == logits.argmax(dim=-1).numpy()[temperature == 0]).all()


def test_logits_are_not_changed() -> None:
    logits = LOGITS.repeat(3, 1)
    draw(logits, temperature=0.7, top_k=3, top_p=0.5)
    assert torch.equal(logits, LOGITS.repeat(3, 1))


def test_top_p_keeps_the_token_that_crosses_the_limit() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(2000, -1)
    numbers = np.arange(2000)
    assert set(draw(logits, top_p=0.45, positions=numbers)) == {0}
    assert set(draw(logits, top_p=0.55, positions=numbers)) == {0, 1}
    assert set(draw(logits, top_p=0.85, positions=numbers)) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [1e-6, 1e-60])
def test_the_smallest_top_p_leaves_the_most_likely_token(top_p: float) -> None:
    assert set(draw(LOGITS.flip(0).expand(200, -1), top_p=top_p, positions=np.arange(200))) == {9}


def test_top_k_keeps_ties_of_the_last_and_nothing_below() -> None:
    logits = torch.tensor([3.0, 1.0, 1.0, 0.9, 1.0]).expand(4000, -1)
    assert set(draw(logits, temperature=3.0, top_k=2, positions=np.arange(4000))) == {0, 1, 2, 4}


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    assert set(draw(LOGITS.expand(500, -1), temperature=5.0, top_k=1, positions=np.arange(500))) == {0}


@pytest.mark.parametrize("temperature", [1e-3, 1e-40])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_temperature_near_zero_is_greedy(temperature: float, top_p: float) -> None:
    logits = torch.tensor([1.0, 3.0, 3.5, -2.0]).expand(200, -1)
    assert set(draw(logits, temperature=temperature, top_p=top_p, positions=np.arange(200))) == {2}


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(np.arange(500), np.arange(500) * 3, torch.empty(500, 1000)).numpy().ravel()
    deviation = math.pi / math.sqrt(6)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=5 * deviation / math.sqrt(len(noise)))
    # The fourth central moment of a Gumbel variable is 5.4 times its variance squared.
    assert noise.var() == pytest.approx(deviation**2, rel=5 * math.sqrt(4.4 / len(noise)))
    for point in (-2.0, -1.0, 0.0, 1.0, 3.0, 6.0, 9.0):
        below = math.exp(-math.exp(-point))
        spread = math.sqrt(below * (1 - below) / len(noise))
        assert (noise <= point).mean() == pytest.approx(below, abs=5 * spread)
    assert len(np.unique(noise)) == len(noise)


@pytest.mark.parametrize("bits", [-1, 0])
def test_noise_is_finite_for_every_hash(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_mix", lambda x: torch.full_like(x, bits))
    assert gumbel_noise(np.zeros(1, np.int64), np.zeros(1, np.int64), torch.empty(1, 4)).isfinite().all()

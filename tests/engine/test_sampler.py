"""Draws follow the exact distribution, and a row's draw depends on nothing but its seed and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from batchrun.engine import sampler
from batchrun.engine.sampler import gumbel_noise, noise_keys, sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0, 0.7, -8.0])
DRAWS = 20_000


def draw(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
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
        np.full(count, min_p, dtype=np.float32),
        np.broadcast_to(np.asarray(seeds, dtype=np.int64), count).copy(),
        np.broadcast_to(np.asarray(positions, dtype=np.int64), count).copy(),
    ).numpy()


def exact(temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """float64 [V], by the definitions: k most likely, the smallest set that reaches top_p, those near the likeliest."""
    weights = np.exp(LOGITS.numpy().astype(np.float64) / temperature)
    order = np.argsort(-weights)
    kept = order[: top_k or len(order)]
    share = weights[kept] / weights[kept].sum()
    kept = kept[: int(np.searchsorted(np.cumsum(share), top_p)) + 1]
    kept = kept[weights[kept] >= min_p * weights[order[0]]]
    result = np.zeros(len(weights))
    result[kept] = weights[kept] / weights[kept].sum()
    return result


def excess(tokens: np.ndarray, probability: np.ndarray) -> float:
    """By how many of its standard deviations the chi-square statistic is above its mean; inf if a token was drawn that
    cannot be."""
    counts = np.bincount(tokens, minlength=len(probability))
    if counts[probability == 0].sum():
        return math.inf
    possible = probability > 0
    expected = probability[possible] * len(tokens)
    freedom = max(1, int(possible.sum()) - 1)
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


SETTINGS = [  # temperature, top_k, top_p, min_p: each alone, each pair, and all
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.6, 0, 1.0, 0.0),
    (1.0, 3, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.3, 5, 0.7, 0.0),
    (0.5, 4, 0.95, 0.0),
    (1.2, 5, 1.0, 0.3),
    (1.4, 0, 0.9, 0.25),
    (1.5, 6, 0.9, 0.2),
]


@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), SETTINGS)
def test_draws_follow_the_softmax(vary: str, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    numbers = np.arange(DRAWS)
    tokens = draw(LOGITS.expand(DRAWS, -1), temperature, top_k, top_p, min_p, **{vary: numbers})
    assert excess(tokens, exact(temperature, top_k, top_p, min_p)) < 5


@pytest.mark.parametrize(
    "wrong",
    [
        (1.0, 4, 1.0, 0.0),  # of top_k=3
        (1.0, 2, 1.0, 0.0),
        (1.2, 3, 1.0, 0.0),
    ],
)
def test_the_chi_square_sees_a_wrong_filter(wrong: tuple[float, int, float, float]) -> None:
    tokens = draw(LOGITS.expand(DRAWS, -1), *wrong, positions=np.arange(DRAWS))
    assert excess(tokens, exact(1.0, 3, 1.0)) > 5


def test_the_chi_square_sees_filters_in_another_order() -> None:
    """Probabilities that top-p adds up are those that top-k has left."""
    tokens = draw(LOGITS.expand(DRAWS, -1), 1.3, 5, 0.7, positions=np.arange(DRAWS))
    order = np.argsort(-LOGITS.numpy())
    share = np.exp(LOGITS.numpy()[order] / 1.3)
    first = order[: min(5, int(np.searchsorted(np.cumsum(share / share.sum()), 0.7)) + 1)]
    other = np.zeros(len(order))
    other[first] = np.exp(LOGITS.numpy()[first] / 1.3)
    assert excess(tokens, other / other.sum()) > 5


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
    count = 60
    logits = torch.from_numpy(3 * rng.normal(size=(count, 3000)).astype(np.float32))
    temperature = rng.choice([0, 0.5, 1, 1.5], count).astype(np.float32)
    top_k = rng.choice([0, 1, 5, 50, 300, 5000], count)
    top_p = rng.choice([0.3, 0.9, 1], count).astype(np.float32)
    min_p = rng.choice([0, 0.1], count).astype(np.float32)
    seeds, positions = rng.integers(0, 2**62, count), rng.integers(0, 5000, count)
    each = (temperature, top_k, top_p, min_p, seeds, positions)
    together = sample(logits, *each)
    for i in range(count):
        assert sample(logits[i : i + 1], *(values[i : i + 1] for values in each)) == together[i]
    turn = rng.permutation(count)
    assert (sample(logits[turn], *(values[turn] for values in each)) == together[turn]).all()
    assert (together[temperature == 0] == logits.argmax(dim=-1).numpy()[temperature == 0]).all()


def whole(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> int:
    """One row's draw by sorting all of it and adding noise to all of it."""
    scaled = (logits - logits.max()) / temperature
    ranked, order = scaled.sort(descending=True, stable=True)
    if 0 < top_k < len(ranked):
        ranked = ranked.masked_fill(ranked < ranked[top_k - 1], -torch.inf)
    probability = ranked.softmax(dim=-1)
    if top_p < 1:
        ranked = ranked.masked_fill(probability.cumsum(dim=-1) - probability >= top_p, -torch.inf)
    ranked = ranked.masked_fill(ranked < math.log(min_p or 1e-300), -torch.inf)
    noise = gumbel_noise(noise_keys(np.array([seed]), np.zeros(1, np.int64), logits.device), order[None])[0]
    return int(order[(ranked.double() + noise).argmax()])


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_looking_at_the_likeliest_first_changes_no_draw(spread: float, ties: bool) -> None:
    """Flat rows need a look at all of their tokens, steep ones at few; with ties, order decides what top-p keeps."""
    rng = np.random.default_rng(1)
    count, vocabulary = 120, 5000
    logits = torch.from_numpy((spread * rng.normal(size=(count, vocabulary))).astype(np.float32))
    logits = (logits * 2).round() / 2 if ties else logits
    temperature = rng.choice([0.7, 1, 2], count).astype(np.float32)
    top_k = rng.choice([0, 0, 3, 127, 128, 129, 2048, 3000, 6000], count)
    top_p = rng.choice([0.05, 0.5, 0.99, 1, 1], count).astype(np.float32)
    min_p = rng.choice([0, 0, 0, 0.02, 0.9], count).astype(np.float32)
    seeds = rng.integers(0, 2**62, count)
    drawn = sample(logits, temperature, top_k, top_p, min_p, seeds, np.zeros(count, np.int64))
    each = zip(logits, temperature, top_k, top_p, min_p, seeds, strict=True)
    assert drawn.tolist() == [whole(row, float(t), int(k), float(p), float(m), int(s)) for row, t, k, p, m, s in each]


def test_unfiltered_draws_reach_the_unlikely_tokens() -> None:
    """Of a flat row most draws lie beyond the tokens that are looked at first."""
    logits = torch.zeros(1, 4000).expand(3000, -1)
    tokens = draw(logits, seeds=np.arange(3000))
    assert excess(tokens // 400, np.full(10, 0.1)) < 5


@pytest.mark.parametrize("seed", range(4))
def test_filters_keep_what_those_of_transformers_keep(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(1, 400, generator=generator)
    for processor, setting in (
        (TopKLogitsWarper(7), {"top_k": 7}),
        (TopPLogitsWarper(0.6), {"top_p": 0.6}),
        (MinPLogitsWarper(0.1), {"min_p": 0.1}),
    ):
        expected = set(torch.isfinite(processor(torch.zeros(1, 1), scores.clone()))[0].nonzero()[:, 0].tolist())
        assert 1 < len(expected) < 100
        assert kept(scores, **setting) == expected


def kept(scores: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """The tokens that the filters leave of a row [1, V]."""
    settings = (torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    scaled = scores - scores.max()
    likeliest = sampler._likeliest(scaled, 128)
    keep, settled = sampler._filter(sampler.Draw(scaled, *settings, torch.zeros(1, dtype=torch.int64)), *likeliest)
    assert settled.all()
    return set(likeliest[1][keep].tolist())


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
    keys = noise_keys(np.arange(500), np.arange(500) * 3, torch.device("cpu"))
    noise = gumbel_noise(keys, torch.arange(1000)).numpy().ravel()
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
    assert gumbel_noise(torch.zeros(1, dtype=torch.int64), torch.arange(4)).isfinite().all()

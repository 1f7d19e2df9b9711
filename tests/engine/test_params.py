"""Sampling parameters say what they refuse before a request reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from batchrun.engine.params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", ("end", "")),
        ("repetition_max_pattern", -1),
        ("repetition_max_pattern", 1025),
        ("repetition_min_pattern", 0),
        ("repetition_min_count", 1),
    ],
)
def test_refuses(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_takes_one_stop_string_or_several() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [None, 0, 2**63 - 1, -(2**63)])
def test_takes_any_signed_64_bit_seed(seed: int | None) -> None:
    assert SamplingParams(seed=seed).seed == seed

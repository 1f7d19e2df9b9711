"""Sampling parameters say what they refuse before a request reaches the engine."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from batchrun.config import SamplingConfig
from batchrun.engine.params import SamplingParams, sampling_params


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
        ("min_tokens", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", 3),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", float("inf")),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {"yes": float("nan")}),
        ("allowed_token_ids", ()),
        ("bad_words", ("", "no")),
        ("logprobs", -1),
        ("logprobs", 1001),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 1001),
        ("repetition_max_pattern", -1),
        ("repetition_max_pattern", 1025),
        ("repetition_min_pattern", 0),
        ("repetition_min_count", 1),
    ],
)
def test_refuses(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("max_tokens", 0, "at least 1"),
        ("temperature", float("inf"), "at least 0 and finite"),
        ("top_p", 0, "above 0 and at most 1"),
        ("min_p", 2, "between 0 and 1"),
        ("presence_penalty", 9, "between -2 and 2"),
        ("repetition_penalty", 0, "above 0"),
        ("logit_bias", {"yes": 101}, "between -100 and 100"),
    ],
)
def test_says_the_range(name: str, value: Any, limit: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*: it must be {limit}$"):
        SamplingParams(**{name: value})


def test_min_tokens_may_not_be_more_than_max_tokens() -> None:
    with pytest.raises(ValueError, match="min_tokens=6 is more than max_tokens=5"):
        SamplingParams(max_tokens=5, min_tokens=6)
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5


def test_equal_parameters_are_one_key_however_they_are_given() -> None:
    """Text of digits is a token id; order does not count."""
    bias: list[Any] = [{"9": 1, 3: -2, "yes": 4}, {"yes": 4.0, 9: 1.0, "3": -2.0}, (("yes", 4), (9, 1), (3, -2))]
    params = {SamplingParams(logit_bias=one, bad_words="no", allowed_token_ids=[4]) for one in bias}  # type: ignore[arg-type]
    [only] = params
    assert only.logit_bias == ((3, -2.0), (9, 1.0), ("yes", 4.0))
    assert (only.bad_words, only.allowed_token_ids) == (("no",), (4,))
    assert pickle.loads(pickle.dumps(only)) == only


def test_every_setting_of_a_job_is_a_parameter() -> None:
    """But for the seed, of which each row gets its own."""
    theirs = {field.name for field in dataclasses.fields(SamplingParams)} - {"structured_outputs", "reasoning"}
    job = {field.name for field in dataclasses.fields(SamplingConfig)}
    assert theirs <= job
    assert job - theirs <= {"seed_by", "n"}
    changed = SamplingConfig(min_p=0.3, logit_bias={"5": 2.0}, bad_words="no", logprobs=2, seed=7)
    params = sampling_params(changed, seed=99)
    assert (params.min_p, params.logit_bias, params.bad_words) == (0.3, ((5, 2.0),), ("no",))
    assert (params.logprobs, params.seed) == (2, 99)


def test_takes_one_stop_string_or_several() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [None, 0, 2**63 - 1, -(2**63)])
def test_takes_any_signed_64_bit_seed(seed: int | None) -> None:
    assert SamplingParams(seed=seed).seed == seed

"""Sampling parameters say what they refuse before a request reaches the engine."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from batchrun.config import SamplingConfig
from batchrun.engine.params import SamplingParams, sampling_params
from batchrun.engine.structure import StructuredOutputs


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


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"temperature": "hot"}, "temperature='hot' is not a number"),
        ({"temperature": None}, "temperature=None is not a number"),
        ({"temperature": True}, "temperature=True is not a number"),
        ({"max_tokens": 1.5}, "max_tokens=1.5 is not a whole number"),
        ({"top_k": "3"}, "top_k='3' is not a whole number"),
        ({"seed": 1.5}, "seed=1.5 is not a whole number or None"),
        ({"logprobs": True}, "logprobs=True is not a whole number or None"),
        ({"ignore_eos": "yes"}, "ignore_eos='yes' is not True or False"),
        ({"stop": 5}, "stop=5 is not a list, each text"),
        ({"stop": [5]}, r"stop=\(5,\) is not a list, each text"),
        ({"bad_words": [None]}, r"bad_words=\(None,\) is not a list, each text"),
        ({"stop_token_ids": [1.5]}, r"stop_token_ids=\(1.5,\) is not a list, each a whole number"),
        ({"allowed_token_ids": 5}, "allowed_token_ids=5 is not a list, each a whole number"),
        ({"logit_bias": [5]}, r"logit_bias=\[5\] is not a dict of numbers by token"),
        ({"logit_bias": {5: "x"}}, "logit_bias: 5='x' is not a number by token id or text"),
        ({"structured_outputs": {"json": {}}}, r"structured_outputs=\{'json': \{\}\} is not StructuredOutputs or None"),
        ({"reasoning": "x"}, "reasoning='x' is not Reasoning or None"),
        ({"adapter": 5}, "adapter=5 is not text or None"),
    ],
)
def test_a_value_of_another_type_is_refused_before_it_comes_to_the_engine(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        SamplingParams(**given)


def test_numbers_of_numpy_are_numbers() -> None:
    given: dict[str, Any] = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "stop_token_ids": np.arange(2)}
    params = SamplingParams(**given)
    assert (params.max_tokens, params.temperature, params.stop_token_ids) == (3, 0.5, (0, 1))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"regex": 5}, "regex=5 is not text"),
        ({"grammar": b"x"}, "grammar=b'x' is not text"),
        ({"choice": 5}, "choice=5 must be a list of one or more non-empty strings"),
        ({"json_object": "x"}, "json_object='x' is not True or False"),
    ],
)
def test_forms_of_another_type_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        StructuredOutputs(**given)

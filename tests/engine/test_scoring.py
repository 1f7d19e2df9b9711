"""Scores of texts and choices among labels, as formulas and at the library's door."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from batchrun.engine.llm import LLM
from batchrun.engine.params import Likelihood
from batchrun.engine.scoring import Score, choose, windows
from tests.engine.families import assert_idle, engine_of, load


def likelihood(*logprobs: float, greedy: bool = True) -> Likelihood:
    return Likelihood(np.array(logprobs), np.array([greedy] * len(logprobs), dtype=bool))


def test_a_score_is_the_sum_of_its_parts() -> None:
    score = Score.of([likelihood(-1.0, -2.0), likelihood(-3.0, greedy=False)])
    assert (score.log_likelihood, score.num_tokens, score.is_greedy) == (-6.0, 3, False)
    assert score.perplexity == pytest.approx(math.exp(2))
    assert Score.of([likelihood(-1e6)]).perplexity == math.inf
    assert (Score.of([]).perplexity, Score.of([]).log_likelihood) == (None, 0.0)


@pytest.mark.parametrize(
    ("normalize", "label", "compared"),
    [("none", "no", [-4, -3]), ("tokens", "yes!!", [-1, -3]), ("bytes", "yes!!", [-4 / 5, -3 / 2])],
)
def test_labels_are_compared_whole_or_per_token_or_byte(normalize: str, label: str, compared: list[float]) -> None:
    choice = choose(["yes!!", "no"], [likelihood(-1, -1, -1, -1), likelihood(-3)], normalize)
    expected = np.exp(compared) / np.exp(compared).sum()
    assert choice.label == label
    assert choice.probabilities == pytest.approx(expected.tolist())
    assert choice.margin == pytest.approx(abs(expected[0] - expected[1]))
    assert choice.log_likelihoods == [-4, -3]


def test_bytes_are_those_of_utf8_and_impossible_labels_have_no_probability() -> None:
    choice = choose(["é", "ab", "x"], [likelihood(-2), likelihood(-2), likelihood(-1e5)], "bytes")
    assert choice.probabilities == [0.5, 0.5, 0.0]
    assert (choice.label, choice.margin) == ("é", 0.0)


@given(tokens=st.integers(0, 60), start=st.integers(1, 40), size=st.integers(2, 20), stride=st.integers(1, 30))
def test_windows_score_each_token_once_after_something(tokens: int, start: int, size: int, stride: int) -> None:
    scored: list[int] = []
    for first, begin, stop in windows(tokens, start, size, min(stride, size - 1)):
        assert first < begin < stop <= first + size
        scored += range(begin, stop)
    assert scored == list(range(start, tokens))


def test_windows_are_those_of_the_documentation() -> None:
    """The loop of transformers' page on perplexity: begin, end, and the tokens that are targets."""
    length, size, stride = 103, 32, 8
    expected, end_before = [], 0
    for begin in range(0, length, stride):
        end = min(begin + size, length)
        expected.append((begin, end, end - end_before))
        end_before = end
        if end == length:
            break
    found = [(first, stop, stop - scored) for first, scored, stop in windows(length, 1, size, stride)]
    assert found == [(0, 32, 31), *expected[1:]]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    return LLM(str(smollm2), dtype="float32", device="cpu", offline=True, kv_cache_gib=0.5)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


@torch.inference_mode()
def alone(model: Any, ids: list[int], start: int) -> float:
    """Log-likelihood of the tokens from `start` on."""
    logprobs = model(torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1].log_softmax(dim=-1)
    return float(logprobs[torch.arange(len(ids) - start), ids[start:]].double().sum())


def test_a_real_model_scores_real_texts_as_transformers_does(llm: LLM, model: Any, reviews: Path) -> None:
    texts = pq.read_table(reviews, columns=["text"])["text"].to_pylist()[:12]
    whole = llm.score(texts)
    for text, score in zip(texts, whole, strict=True):
        ids = llm.tokenizer(text)["input_ids"]
        assert score.num_tokens == len(ids) - 1
        assert score.log_likelihood == pytest.approx(alone(model, ids, 1), abs=1e-3)
        with torch.inference_mode():
            loss = float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss)
        assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    prompts = [f"Review: {text}\nLabel:" for text in texts]
    after = llm.score(prompts, [" positive and good"] * len(texts))
    for prompt, score in zip(prompts, after, strict=True):
        ids, start = llm.tokenizer(prompt + " positive and good")["input_ids"], len(llm.tokenizer(prompt)["input_ids"])
        assert score.log_likelihood == pytest.approx(alone(model, ids, start), abs=1e-3)
    assert_idle(engine_of(llm))


def test_a_real_model_chooses_as_transformers_does(llm: LLM, model: Any, reviews: Path) -> None:
    texts = pq.read_table(reviews, columns=["text"])["text"].to_pylist()[12:24]
    labels = [" positive", " negative", " neither of the two", " neither"]
    prompts = [f"Review: {text}\nLabel:" for text in texts]
    for prompt, choice in zip(prompts, llm.choose(prompts, labels), strict=True):
        start = len(llm.tokenizer(prompt)["input_ids"])
        expected = [alone(model, llm.tokenizer(prompt + label)["input_ids"], start) for label in labels]
        assert choice.log_likelihoods == pytest.approx(expected, abs=1e-3)
        assert choice.label == labels[int(np.argmax(expected))]


@pytest.fixture(scope="module")
def tiny(family_folder: Callable[[str], Path]) -> LLM:
    return load(family_folder("llama"))


def test_prompts_of_any_kind_and_labels_for_each(tiny: LLM) -> None:
    one = tiny.choose("w5 w6", [" w7", " w8"])[0]
    ids = tiny.tokenizer("w5 w6")["input_ids"]
    for same in (ids, {"prompt": "w5 w6"}, {"prompt_token_ids": ids}):
        (other,) = tiny.choose([same], [" w7", " w8"])
        assert other.log_likelihoods == pytest.approx(one.log_likelihoods, abs=1e-5)
    several = tiny.choose(["w5 w6", "w5"], [[" w8", " w7"], [" w9", " w5 w6", " w5"]])
    assert several[0].log_likelihoods == pytest.approx(one.log_likelihoods[::-1], abs=1e-5)
    assert len(several[1].probabilities) == 3


def test_one_token_has_nothing_to_score(tiny: LLM) -> None:
    one, two = tiny.score([[5], [5, 6]])
    assert (one.num_tokens, one.perplexity) == (0, None)
    assert two.num_tokens == 1


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda llm: llm.score(["w5"], []), "1 prompts and 0 continuations"),
        (lambda llm: llm.choose(["w5", "w6"], [["a", "b"]]), "2 prompts and 1 lists of labels"),
        (lambda llm: llm.choose("w5", ["w6"]), r"labels=\['w6'\] must be two or more"),
        (lambda llm: llm.choose("w5", ["w6", "w6"]), r"must be two or more, no two of them equal"),
        (lambda llm: llm.choose("w5", "w6"), "labels='w6' must be a list of texts"),
        (lambda llm: llm.score(["w5", "w6"], "ab"), "continuations='ab' must be a list of texts"),
        (lambda llm: llm.choose("w5", ["w6", "w7"], "words"), "normalize='words' is not one of none, tokens, bytes"),
        (lambda llm: llm.choose("w5", ["w6", ""]), "prompt 0: a continuation has no tokens"),
        (lambda llm: llm.score([[5] * 600]), "prompt 0: the prompt has 1 tokens; with 599 to score at most 512 fit"),
    ],
)
def test_what_cannot_be_scored_is_an_error(tiny: LLM, call: Callable[[LLM], Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        call(tiny)

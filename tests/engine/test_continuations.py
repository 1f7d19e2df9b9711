"""The likelihood of given tokens is what transformers says of prompt and tokens together, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.engine.continuations import walk
from batchrun.engine.params import Completion, Request, SamplingParams
from tests.engine.families import (
    FAMILIES,
    assert_idle,
    engine_of,
    load,
    random_prompt,
)

Asked = list[tuple[list[int], tuple[tuple[int, ...], ...]]]
Reference = Callable[[str], list[list[tuple[np.ndarray, np.ndarray]]]]


def some(seed: int, *lengths: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(random_prompt(seed + i, length)) for i, length in enumerate(lengths))


SHARED = random_prompt(0, 50)
# Single tokens, a trie with inner nodes that are continuations themselves, equal ones, one long one, a prompt of one
# token, one with many, and prompts that begin alike and end on both sides of a block of 16.
ASKED: Asked = [
    (random_prompt(1, 20), ((5,), (6,), (7,))),
    (random_prompt(2, 33), ((5, 6, 7), (5, 6), (5,), (5, 6, 8, 9), (5, 7, 7), (9, 9), (5, 6))),
    (random_prompt(3, 1), some(30, 70)),
    (random_prompt(6, 9), some(60, *[3] * 12)),
    (SHARED, some(40, 3, 5, 2)),
    (SHARED + random_prompt(4, 14), some(40, 3, 5, 2)),
    (SHARED + random_prompt(5, 15), some(50, 1, 20)),
]
MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "alone": {"max_num_seqs": 1},
    "chunks of 7": {"max_batched_tokens": 7},
    "no prefix caching": {"prefix_caching": False},
    "blocks of 4": {"block_size": 4},
    "torch attention, original layers": {"attention": "torch", "fused_layers": False},
}


@pytest.fixture(scope="session")
def reference(family_folder: Callable[[str], Path]) -> Reference:
    """family -> per request and continuation: log-probabilities, and whether each token is the likeliest."""
    known: dict[str, Any] = {}

    def likelihoods(family: str) -> Any:
        if family not in known:
            model = AutoModelForCausalLM.from_pretrained(
                family_folder(family), dtype=torch.float32, attn_implementation="eager"
            )
            known[family] = [[alone(model, prompt, tokens) for tokens in many] for prompt, many in ASKED]
        return known[family]

    return likelihoods


@torch.inference_mode()
def alone(model: Any, prompt: list[int], tokens: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(dim=-1)[torch.arange(len(tokens)), list(tokens)]
    return logprobs.numpy(), (logits.argmax(dim=-1) == torch.tensor(tokens)).numpy()


def requests() -> list[Request]:
    return [Request(i, prompt, continuations=many) for i, (prompt, many) in enumerate(ASKED)]


def assert_equal(completions: list[Completion], expected: Any) -> None:
    assert {done.key for done in completions} == set(range(len(ASKED)))
    for done in completions:
        assert (done.error, done.text, done.token_ids) == (None, "", [])
        assert done.likelihoods is not None
        assert len(done.likelihoods) == len(expected[done.key])
        for found, (logprobs, greedy) in zip(done.likelihoods, expected[done.key], strict=True):
            np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-4)
            assert found.greedy.tolist() == greedy.tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_equals_transformers(
    family: str, mode: str, family_folder: Callable[[str], Path], reference: Reference
) -> None:
    llm = load(family_folder(family), **MODES[mode])
    assert_equal(list(llm.stream(requests())), reference(family))
    assert_idle(engine_of(llm))


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_from_the_cache_and_when_preempted(
    family: str, family_folder: Callable[[str], Path], reference: Reference
) -> None:
    """Among rows that generate, in chunks, twice, so that prefixes are there; every third step preempts one."""
    engine = engine_of(load(family_folder(family), block_size=4, max_batched_tokens=48))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for _ in range(2):
        others = [Request(f"other {i}", random_prompt(70 + i, 12), params) for i in range(4)]
        for request in [*requests(), *others]:
            engine.add(request)
        done, steps, preempted = [], 0, set()
        while engine.has_work():
            done += engine.step()
            steps += 1
            slots = engine.scheduler.slots
            scoring = slots.order[slots.scoring[slots.order]]
            if steps % 3 == 0 and len(scoring):
                slot = int(scoring[-1])
                preempted.add(engine.scheduler.slots.sequence(slot).request.key)
                engine.scheduler._preempt(slot)
        scored = [one for one in done if isinstance(one.key, int)]
        assert_equal(scored, reference(family))
        assert all(len(one.token_ids) == 20 for one in done if one not in scored)
        assert preempted
    assert sum(one.cached_tokens for one in scored) > 0
    assert_idle(engine)


def test_rows_that_generate_say_what_they_say_alone(family_folder: Callable[[str], Path]) -> None:
    llm = load(family_folder("llama"), max_batched_tokens=32)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [prompt for prompt, _ in ASKED]
    expected = [done.token_ids for done in llm.generate(prompts, params)]
    mixed = [Request(f"g{i}", prompt, params) for i, prompt in enumerate(prompts)] + requests()
    found = {done.key: done.token_ids for done in llm.stream(mixed)}
    assert [found[f"g{i}"] for i in range(len(prompts))] == expected


PROMPTS = [SHARED + random_prompt(30 + i, n) for i, n in enumerate((1, 14, 15))] + [random_prompt(9, 40), [7]]


@torch.inference_mode()
def prompt_reference(model: Any, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities [n - 1, V] at each token of the prompt but the first."""
    return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)


@pytest.mark.parametrize("mode", ["batched", "chunks of 7", "blocks of 4"])
@pytest.mark.parametrize("max_tokens", [0, 12])
def test_prompt_logprobs_are_those_of_transformers(
    mode: str, max_tokens: int, family_folder: Callable[[str], Path]
) -> None:
    """Twice, so that prefixes are there, among rows that ask for none; rows that generate say what they say without."""
    folder = family_folder("llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    llm = load(folder, **MODES[mode])
    plain = SamplingParams(max_tokens=max(max_tokens, 1), ignore_eos=True)
    expected = [done.token_ids for done in llm.generate(PROMPTS, plain)]
    asking = [replace(plain, max_tokens=max_tokens, prompt_logprobs=k) for k in (0, 3, 1, 5, 2)]
    for _ in range(2):
        done = llm.generate(PROMPTS * 2, [*asking, *[plain] * 5])
        assert [one.token_ids for one in done[5:]] == expected
        for completion, prompt, params, tokens in zip(done, PROMPTS, asking, expected, strict=False):
            assert completion.error is None
            assert completion.token_ids == (tokens if max_tokens else [])
            assert completion.finish_reason == "length"
            assert completion.cached_tokens == 0
            ids, logprobs = completion.prompt_logprobs or pytest.fail("none")
            assert ids.shape == logprobs.shape == (len(prompt) - 1, int(params.prompt_logprobs or 0) + 1)
            told = prompt_reference(model, prompt)
            assert ids[:, 0].tolist() == prompt[1:]
            np.testing.assert_allclose(logprobs, told.gather(1, torch.from_numpy(ids).long()).numpy(), atol=1e-4)
            best = told.topk(ids.shape[1] - 1, dim=-1).values.numpy()
            np.testing.assert_allclose(logprobs[:, 1:], best, atol=1e-4)
        assert all(one.prompt_logprobs is None for one in done[5:])
    assert_idle(engine_of(llm))


def test_prompt_logprobs_survive_a_preemption_in_the_middle(family_folder: Callable[[str], Path]) -> None:
    """Before and after all of the prompt is computed: it is noted once, and generating goes on as before."""
    engine = engine_of(load(family_folder("llama"), block_size=4, max_batched_tokens=16))
    prompt = PROMPTS[1]
    found: dict[tuple[int, ...], Completion] = {}
    for preempted in ((), (2,), (7,), (1, 3, 9)):
        params = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=2)
        engine.add(Request(preempted, prompt, params))
        for step in range(100):
            if ended := engine.step():
                found[preempted] = ended[0]
                break
            if step in preempted:
                engine.scheduler._preempt(int(engine.scheduler.slots.order[-1]))
    first = found[()]
    assert first.prompt_logprobs is not None
    for done in found.values():
        assert done.token_ids == first.token_ids
        assert done.prompt_logprobs is not None
        np.testing.assert_allclose(done.prompt_logprobs.logprobs, first.prompt_logprobs.logprobs, atol=1e-4)
    assert engine.scheduler.num_preemptions == 5
    assert_idle(engine)


def test_a_prompt_may_fill_the_window_if_nothing_is_generated(family_folder: Callable[[str], Path]) -> None:
    llm = load(family_folder("llama"))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    whole, longer = llm.generate([random_prompt(0, 512), random_prompt(0, 513)], params)
    assert whole.prompt_logprobs is not None
    assert np.isfinite(whole.prompt_logprobs.logprobs).all()
    assert longer.error_type == "prompt_too_long"
    with pytest.raises(ValueError, match="max_tokens=0 is out of range"):
        SamplingParams(max_tokens=0)


def test_only_a_prompt_is_reused_and_what_is_written_over_is_not(family_folder: Callable[[str], Path]) -> None:
    """Continuations fill whole blocks, one after the other in the same place: later prompts must not find them."""
    llm = load(family_folder("llama"), block_size=4)
    prompt, long = random_prompt(1, 16), some(60, 17, 17, 17)
    first, second = (next(iter(llm.stream([Request(0, prompt, continuations=long)]))) for _ in range(2))
    # Its last token is computed again for its logits, and with it the block that it is in.
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    params = SamplingParams(max_tokens=8)
    (with_first,) = llm.generate([prompt + list(long[0])], params)
    assert with_first.cached_tokens == 16
    (alone,) = load(family_folder("llama"), block_size=4).generate([prompt + list(long[0])], params)
    assert with_first.token_ids == alone.token_ids


def test_aborted_rows_leave_nothing(family_folder: Callable[[str], Path]) -> None:
    llm = load(family_folder("llama"), max_batched_tokens=24)
    engine = engine_of(llm)
    for request in requests():
        engine.add(request)
    for _ in range(3):
        engine.step()
    for i in range(len(ASKED)):
        engine.abort(i)
    assert_idle(engine)


@pytest.mark.parametrize(
    ("prompt", "continuations", "why"),
    [
        ([], ((5,),), "the prompt has no tokens"),
        ([5], ((5,), ()), "a continuation has no tokens"),
        ([5], ((5,), (6, 256)), "token 256 is not one of the model's: its ids go from 0 to 255"),
        (random_prompt(0, 500), ((5,), tuple(random_prompt(0, 13))), "with 13 to score at most 512 fit"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    family_folder: Callable[[str], Path], prompt: list[int], continuations: Any, why: str
) -> None:
    llm = load(family_folder("llama"))
    (refused,) = llm.stream([Request(0, prompt, continuations=continuations)])
    assert refused.finish_reason == "error"
    assert why in str(refused.error)


def test_the_whole_window_can_be_scored(family_folder: Callable[[str], Path]) -> None:
    llm = load(family_folder("llama"))
    (done,) = llm.stream([Request(0, random_prompt(0, 500), continuations=some(1, 12))])
    assert done.error is None
    assert done.likelihoods is not None
    assert np.isfinite(done.likelihoods[0].logprobs).all()


def test_each_inner_node_is_computed_once() -> None:
    passes = walk(((1, 2, 3), (1, 2, 4), (1, 5), (1,), (6,), (1, 2, 3, 7, 8)))
    computed = [p.path[p.keep :].tolist() for p in passes]
    assert computed == [[1, 2, 3, 7]]
    assert [(p.keep, p.path.tolist()) for p in walk(((4,), (1, 3, 5, 5), (1, 2, 5, 5)))] == [
        (0, [1, 2, 5]),
        (1, [1, 3, 5]),
    ]
    assert sorted(np.concatenate([p.places for p in passes]).tolist()) == list(range(15))

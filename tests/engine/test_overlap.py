"""Steps that are launched before the tokens of the last one are read: every row says what it says without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from batchrun.config import EngineConfig
from batchrun.engine.llm import LLM
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.engine.structure import StructuredOutputs
from batchrun.errors import ConfigError
from tests.engine.families import assert_idle, engine_of, generate, load, make_optimistic, random_prompt

SHARED = random_prompt(0, 20)
PROMPTS = [random_prompt(i, length) for i, length in enumerate((1, 7, 16, 33))]
PROMPTS += [SHARED + random_prompt(100 + i, length) for i, length in enumerate((1, 6, 14))]


def run(llm: LLM, requests: list[Request]) -> tuple[dict[Any, Completion], int]:
    """Completions by key, and how many steps were launched ahead of the tokens before them."""
    engine, done, ahead = engine_of(llm), {}, 0
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for completion in engine.step():
            assert completion.key not in done
            done[completion.key] = completion
        ahead += engine._flying is not None
        engine.check_integrity()
    assert_idle(engine)
    return done, ahead


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "options", [{}, {"max_batched_tokens": 7}, {"block_size": 4, "num_blocks": 20, "max_num_seqs": 4}], ids=str
)
def test_greedy_rows_equal_generate(family: str, options: dict[str, Any], family_folder: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        family_folder(family), dtype=torch.float32, attn_implementation="eager"
    )
    expected = [generate(model, prompt, 12) for prompt in PROMPTS]
    llm = make_optimistic(load(family_folder(family), overlap="on", **options))
    requests = [Request(i, prompt, SamplingParams(max_tokens=12)) for i, prompt in enumerate(PROMPTS)]
    for cached in (False, True):
        done, ahead = run(llm, requests)
        assert [done[i].token_ids for i in range(len(PROMPTS))] == expected
        assert ahead >= 12
        assert not cached or sum(completion.cached_tokens for completion in done.values()) > 0
    if family == "llama":
        assert (engine_of(llm).scheduler.num_preemptions > 0) == ("num_blocks" in options)


def mixed_requests(llm: LLM) -> list[Request]:
    """Rows of every kind, those that need the host in each step among them."""
    prompts = [random_prompt(20 + i, 5 + i) for i in range(16)]
    free = llm.generate(prompts, SamplingParams(max_tokens=14, ignore_eos=True))
    kinds: list[dict[str, Any]] = [
        {},
        {"max_tokens": 1},
        {"stop_token_ids": (free[2].token_ids[6],)},
        {"stop": (free[3].text.split()[7] + " ",)},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.7, "top_k": 20, "seed": 5, "logprobs": 2},
        {"logprobs": 3},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "temperature": 1.0, "seed": 8},
        {"bad_words": (" ".join(free[9].text.split()[3:5]),)},
        {"min_tokens": 5, "stop_token_ids": (free[10].token_ids[2],)},
        {"logit_bias": {7: 3.0}, "allowed_token_ids": (5, 6, 7, 8, 9)},
        {"prompt_logprobs": 1},
        {"structured_outputs": StructuredOutputs(choice=("w7 w8 w9", "w7 w10"))},
        {"allowed_token_ids": (5,), "bad_words": ("w5",)},  # no token is left for it
        {"ignore_eos": False},
    ]
    base = {"max_tokens": 14, "ignore_eos": True}
    return [
        Request(i, prompt, SamplingParams(**{**base, **kind}))
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


def told(completion: Completion) -> tuple[Any, ...]:
    logprobs = [] if completion.logprobs is None else completion.logprobs.token_ids.tolist()
    given = [] if completion.prompt_logprobs is None else completion.prompt_logprobs.token_ids.tolist()
    ends = completion.finish_reason, completion.stop_reason, completion.error
    return completion.token_ids, completion.text, *ends, logprobs, given


def test_rows_of_every_kind_say_the_same(llama: Path) -> None:
    sync = load(llama, prefix_caching=False)
    requests = mixed_requests(sync)
    engine_of(sync).take_steps()
    expected, none = run(sync, requests)
    assert none == 0
    assert len({completion.finish_reason for completion in expected.values()}) == 3
    needed = engine_of(sync).take_steps()
    computed = sum(step.tokens for step in needed)
    ahead = load(llama, overlap="on", prefix_caching=False)
    done, _ = run(ahead, requests)
    assert {key: told(c) for key, c in done.items()} == {key: told(c) for key, c in expected.items()}
    steps = engine_of(ahead).take_steps()
    assert computed <= sum(step.tokens for step in steps) <= computed + len(requests)
    assert sum(step.sampled for step in steps) == sum(step.sampled for step in needed)
    # Rows that do not need the host are launched ahead, and of those that end at their last token none is wasted.
    done, ahead_steps = run(ahead, [request for request in requests if request.key in (0, 1, 4, 5, 6, 10, 11)])
    assert {key: told(c) for key, c in done.items()} == {key: told(expected[key]) for key in done}
    assert ahead_steps > 10


def test_a_row_that_needs_the_host_makes_only_its_own_steps_wait(llama: Path) -> None:
    llm = load(llama, overlap="on")
    engine = engine_of(llm)
    engine.add(Request("free", PROMPTS[1], SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.add(Request("penal", PROMPTS[2], SamplingParams(max_tokens=5, ignore_eos=True, repetition_penalty=1.2)))
    waits = []
    while engine.has_work():
        running = engine.scheduler.slots.num_running
        engine.step()
        if running:
            waits.append(engine._flying is None)
    assert waits[:4] == [True] * 4
    assert waits[5:-1] == [False] * len(waits[5:-1])


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_step_without_memory_is_made_smaller(overlap: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(i, p, SamplingParams(max_tokens=9, temperature=1.0, seed=i)) for i, p in enumerate(PROMPTS)]
    expected, _ = run(load(llama), requests)
    llm = load(llama, overlap=overlap)
    engine, failed = engine_of(llm), list[int]()
    draw = engine.executor.draw

    def limited(batch: Any, *rest: Any) -> Any:
        # After the model: what it wrote is written again.
        if batch.num_tokens > 60 or (batch.num_tokens in (6, 7) and len(failed) < 4):
            failed.append(batch.num_tokens)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return draw(batch, *rest)

    monkeypatch.setattr(engine.executor, "draw", limited)
    done, _ = run(llm, requests)
    assert {key: c.token_ids for key, c in done.items()} == {key: c.token_ids for key, c in expected.items()}
    assert len(failed) >= 2


def test_switches_may_be_bare_words_of_yaml() -> None:
    written = OmegaConf.merge(OmegaConf.structured(EngineConfig), OmegaConf.create("overlap: on\ncuda_graphs: off"))
    config = OmegaConf.to_object(written)
    assert isinstance(config, EngineConfig)
    assert (config.overlap, config.cuda_graphs) == ("on", "off")
    with pytest.raises(ConfigError, match="overlap"):
        EngineConfig(overlap="yes")


rows = st.lists(
    st.tuples(
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, 9),  # tokens
        st.integers(0, 6),  # the step that it comes before
        st.none() | st.tuples(st.sampled_from(["abort", "stop"]), st.integers(0, 8)),
        st.sampled_from([0.0, 1.0]),
    ),
    min_size=1,
    max_size=7,
)


@pytest.fixture(scope="module")
def tight(llama: Path) -> tuple[LLM, LLM]:
    options = {"block_size": 4, "num_blocks": 20, "max_num_seqs": 4, "max_batched_tokens": 24}
    return load(llama), make_optimistic(load(llama, overlap="on", **options))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows)
def test_rows_come_and_go_between_steps(rows: list[Any], tight: tuple[LLM, LLM]) -> None:
    calm, llm = tight
    engine, done = engine_of(llm), dict[Any, Completion]()
    requests = [
        Request(i, PROMPTS[prompt], SamplingParams(max_tokens=most, temperature=heat, seed=i, ignore_eos=True))
        for i, (prompt, most, _, _, heat) in enumerate(rows)
    ]
    expected = {request.key: run(calm, [request])[0][request.key].token_ids for request in requests}
    for step in range(1000):
        for request, (_, _, comes, goes, _) in zip(requests, rows, strict=True):
            if comes == step:
                engine.add(request)
            if goes is not None and comes + goes[1] == step:
                if goes[0] == "abort":
                    engine.abort(request.key)
                elif (stopped := engine.stop(request.key)) is not None:
                    done[request.key] = stopped
        done |= {completion.key: completion for completion in engine.step()}
        engine.check_integrity()
        if step > 20 and not engine.has_work():
            break
    assert_idle(engine)
    for key, (*_, goes, _) in enumerate(rows):
        if goes is None:
            assert done[key].token_ids == expected[key]
        elif key in done:
            assert expected[key][: len(done[key].token_ids)] == done[key].token_ids

"""Rows that end because they repeat themselves: the counts against a direct look, and a model that loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchrun.engine.llm import LLM
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.engine.repetition import RepetitionWatch
from tests.engine.families import assert_idle, engine_of, load, make_optimistic, random_prompt


def asks(largest: int, smallest: int = 1, count: int = 3, **others: Any) -> SamplingParams:
    return SamplingParams(
        repetition_max_pattern=largest, repetition_min_pattern=smallest, repetition_min_count=count, **others
    )


def repeats(tokens: list[int], params: SamplingParams) -> bool:
    """Whether the tokens end in one pattern, as often as asked."""
    sizes = range(params.repetition_min_pattern, params.repetition_max_pattern + 1)
    times = params.repetition_min_count
    return any(len(tokens) >= p * times and tokens[-p * times :] == tokens[-p:] * times for p in sizes)


class Rows:
    """Slots 0 … n - 1 that get one token each at a time, behind a prompt."""

    def __init__(self, params: list[SamplingParams], prompt: list[int]) -> None:
        self.watch = RepetitionWatch(len(params))
        self.token_ids = np.zeros((len(params), 200), dtype=np.int32)
        self.token_ids[:, : len(prompt)] = prompt
        self.num_prompt = np.full(len(params), len(prompt))
        self.num_tokens = self.num_prompt.copy()
        for slot, one in enumerate(params):
            self.watch.put(slot, one, np.empty(0, dtype=np.int32))

    def add(self, tokens: list[int], rows: list[int]) -> list[bool]:
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1
        found = self.watch.look(np.array(rows), self.token_ids, self.num_tokens, self.num_prompt)
        return [bool(one) for one in found]


@given(
    st.lists(st.integers(0, 2), max_size=50),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(0, 50),
)
def test_found_where_a_direct_look_finds_it(
    tokens: list[int], largest: int, smallest: int, count: int, preempted_at: int
) -> None:
    params = asks(largest, smallest, count)
    rows = Rows([asks(9), params, SamplingParams()], [1, 1, 1])
    for i, token in enumerate(tokens):
        if i == preempted_at:
            rows.watch.put(1, SamplingParams(), np.empty(0, dtype=np.int32))
            rows.watch.put(1, params, np.array(tokens[:i], dtype=np.int32))
        assert rows.add([token, token, token], [0, 1, 2]) == [
            repeats(tokens[: i + 1], asks(9)),
            repeats(tokens[: i + 1], params),
            False,
        ]


def test_a_row_out_of_step_with_others_keeps_its_count() -> None:
    rows = Rows([asks(1, count=4), asks(4, count=4)], [])
    assert rows.add([7, 5], [0, 1]) == [False, False]
    for _ in range(2):
        assert rows.add([7], [0]) == [False]
    assert rows.add([7, 5], [0, 1]) == [True, False]


def looping(folder: Path) -> LLM:
    """A model that answers each token with the next of its class modulo 3: 6 7 8 6 7 8 …"""
    llm = load(folder)
    model = engine_of(llm).model
    hidden, logits = model.hidden, model.logits
    last = np.empty(0, dtype=np.int64)

    def note(batch: Any) -> torch.Tensor:
        nonlocal last
        last = batch.token_ids[batch.logits_index]
        return hidden(batch)

    def follow(states: torch.Tensor, index: Any) -> torch.Tensor:
        answer = torch.zeros_like(logits(states, index))
        answer[np.arange(len(last)), 6 + (last + 1) % 3] = 1
        return answer

    model.hidden, model.logits = note, follow  # type: ignore[method-assign, assignment]
    return llm


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        (asks(3, count=4, max_tokens=100), 12, "repetition"),
        (asks(8, count=5, max_tokens=100), 15, "repetition"),
        (asks(8, smallest=4, count=3, max_tokens=100), 18, "repetition"),  # six tokens are a pattern too
        (asks(2, count=4, max_tokens=20), 20, "length"),
        (asks(3, count=4, max_tokens=11), 11, "length"),
        (asks(3, count=4, max_tokens=12), 12, "repetition"),
        (SamplingParams(max_tokens=20), 20, "length"),
    ],
)
def test_a_model_that_loops_is_stopped(llama: Path, params: SamplingParams, tokens: int, reason: str) -> None:
    llm = looping(llama)
    [done] = llm.generate([[6, 7, 8] * 20], params)
    assert (len(done.token_ids), done.finish_reason, done.stop_reason) == (tokens, reason, None)
    assert done.text == llm.tokenizer.decode(done.token_ids)
    assert_idle(engine_of(llm))


def test_rows_that_do_not_ask_go_on_beside_those_that_do(llama: Path) -> None:
    llm = looping(llama)
    each = [asks(3, max_tokens=40), SamplingParams(max_tokens=40), asks(6, smallest=6, count=2, max_tokens=40)]
    done = llm.generate([[6, 7, 8]] * 3, each)
    assert [(len(c.token_ids), c.finish_reason) for c in done] == [
        (9, "repetition"),
        (40, "length"),
        (12, "repetition"),
    ]


def test_preempted_rows_stop_where_others_do(llama: Path) -> None:
    """With a cache for a quarter of the rows, rows are preempted and begun again all the time."""
    params = asks(12, count=3, max_tokens=60, ignore_eos=True, temperature=0.3, seed=1)
    prompts = [random_prompt(n, 9) for n in range(12)]
    roomy, tight = load(llama), load(llama, num_blocks=24, block_size=4)
    make_optimistic(tight)
    done = [
        {key: (c.token_ids, c.finish_reason) for key, c in _all(llm, prompts, params).items()} for llm in (roomy, tight)
    ]
    assert engine_of(tight).scheduler.num_preemptions > 0
    assert done[0] == done[1]
    assert any(reason == "repetition" for _, reason in done[0].values())


def _all(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[Any, Completion]:
    return {c.key: c for c in llm.stream(Request(i, prompt, params) for i, prompt in enumerate(prompts))}

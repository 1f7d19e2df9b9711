"""The library door: prompts as text and ids, options by name, and a stream that takes no more than it needs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from batchrun.engine.llm import LLM
from batchrun.engine.params import Request, SamplingParams
from batchrun.engine.prompts import token_ids
from batchrun.errors import ConfigError
from tests.engine.families import assert_idle, engine_of, load, make_tokenizer, random_prompt

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(llama: Path) -> LLM:
    return load(llama)


def test_an_unknown_option_is_named_with_those_there_are(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"LLM\(\) has no option max_seqs, temprature: there are .*max_num_seqs"):
        LLM(str(llama), temprature=1, max_seqs=3)


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ({"block_size": "x"}, "LLM(block_size='x') must be int or None"),
        ({"max_num_seqs": 1.5}, "LLM(max_num_seqs=1.5) must be int"),
        ({"num_blocks": True}, "LLM(num_blocks=True) must be int or None"),
        ({"prefix_caching": 1}, "LLM(prefix_caching=1) must be bool"),
        ({"adapters": ["a"]}, "LLM(adapters=['a']) must be dict"),
    ],
)
def test_options_of_another_type_are_refused(option: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        LLM("nowhere", **option)


@pytest.mark.parametrize("messages", [[{"content": "hi"}], [{"role": "user"}], "hi"])
def test_messages_that_the_chat_template_cannot_render_are_refused(messages: Any) -> None:
    template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"cannot render .*role and content"):
        token_ids(tokenizer, {"messages": messages})


def test_a_value_out_of_range_is_named(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.block_size=0"):
        LLM(str(llama), block_size=0)
    with pytest.raises(ConfigError, match=r"model\.device='nowhere' is not a device"):
        LLM(str(llama), device="nowhere")
    with pytest.raises(ConfigError, match=r"model\.device=cuda:99 is not there"):
        LLM(str(llama), device="cuda:99")


def test_a_cache_without_room_is_refused_with_the_remedy(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"raise engine\.kv_cache_gib or lower engine\.block_size"):
        LLM(str(llama), device="cpu", kv_cache_gib=1e-6)
    with pytest.raises(ConfigError, match=r"engine\.num_blocks=1000000000000 asks for .* GiB of memory: lower it"):
        LLM(str(llama), device="cpu", num_blocks=10**12)


def test_text_and_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = random_prompt(1, 8)
    text = " ".join(f"w{token}" for token in ids)
    (by_text,), (by_ids,), (in_list,) = (llm.generate(prompt, PARAMS) for prompt in (text, ids, [text]))
    assert by_text.text == by_ids.text == in_list.text != ""
    assert by_text.prompt_tokens == len(ids)
    assert by_text.text == " ".join(f"w{token}" for token in by_text.token_ids if token > 3)


def test_completions_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [random_prompt(i, 4 + i) for i in range(6)]
    params = [SamplingParams(max_tokens=12 - 2 * i, ignore_eos=True) for i in range(6)]
    done = llm.generate(prompts, params)
    assert [completion.key for completion in done] == list(range(6))
    assert [len(completion.token_ids) for completion in done] == [12, 10, 8, 6, 4, 2]
    assert_idle(engine_of(llm))


def test_prompts_of_an_iterator_are_all_completed(llm: LLM) -> None:
    prompts = [random_prompt(seed, 8) for seed in range(3)]
    few = SamplingParams(max_tokens=2)
    found = llm.generate(iter(prompts), few)
    assert [c.token_ids for c in found] == [c.token_ids for c in llm.generate(prompts, few)]
    assert len(found) == 3


def test_samples_of_a_prompt_come_one_after_the_other(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=7, ignore_eos=True)
    three, one = llm.generate([[5, 6, 7], [8, 9]], dataclasses.replace(params, n=3)), llm.generate([[5, 6, 7]], params)
    assert [c.key for c in three] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert three[0].token_ids == one[0].token_ids
    assert len({tuple(c.token_ids) for c in three[:3]}) == 3
    again = llm.generate([[5, 6, 7]], dataclasses.replace(params, n=2))
    assert [c.token_ids for c in again] == [c.token_ids for c in three[:2]]
    assert_idle(engine_of(llm))


def test_samples_of_a_greedy_prompt_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="n=2 samples of a greedy prompt"):
        SamplingParams(n=2)
    with pytest.raises(ValueError, match="a request asks for one sample"):
        engine_of(llm).add(Request(0, [5], SamplingParams(n=2, temperature=1.0)))


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_parameters_are_one_for_all_or_one_each(llm: LLM) -> None:
    with pytest.raises(ValueError, match="3 prompts and 2 sampling parameters"):
        llm.generate([[5], [6], [7]], [PARAMS, PARAMS])


def test_stream_takes_only_what_it_needs_from_an_endless_source(llama: Path) -> None:
    llm = load(llama, max_num_seqs=4)
    taken = 0

    def endless() -> Iterator[Request]:
        nonlocal taken
        for key in count():
            taken += 1
            yield Request(key, random_prompt(key, 1 + key % 7), PARAMS)

    for finished, _ in enumerate(islice(llm.stream(endless()), 50), start=1):
        assert taken <= finished + 4 + 2 * 4, "more is held than what runs, what waits, and one step's completions"
    assert taken >= 50


def test_stream_goes_on_over_rows_that_are_refused(llama: Path) -> None:
    llm = load(llama, max_num_seqs=2)
    requests = [Request(i, [] if i % 3 else [5, 6, 7], PARAMS) for i in range(20)]
    done = {completion.key: completion.error_type for completion in llm.stream(requests)}
    assert done == {i: "empty_prompt" if i % 3 else None for i in range(20)}
    assert_idle(engine_of(llm))


def test_a_request_may_be_aborted_while_it_streams(llama: Path) -> None:
    llm = load(llama, max_num_seqs=2)
    requests = [
        Request(i, random_prompt(i, 5), SamplingParams(max_tokens=4 + 40 * (i == 1), ignore_eos=True)) for i in range(3)
    ]
    ends = {}
    for completion in llm.stream(requests):
        ends[completion.key] = completion.finish_reason
        if completion.key == 0:
            llm.abort(1)
            assert engine_of(llm).scheduler.slots.num_running <= 1, "its slot is free at once"
    assert ends == {0: "length", 1: "abort", 2: "length"}
    assert_idle(engine_of(llm))


def test_a_stream_keeps_no_statistics(llama: Path) -> None:
    llm = load(llama)
    llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=4))
    assert engine_of(llm).take_steps() == []

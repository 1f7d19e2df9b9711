"""Limits, ends, stops, seeds, aborts and statistics of the engine, on a tiny llama whose words are `w4` … `w255`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchrun.engine.llm import LLM
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.engine.seeds import row_seed
from tests.engine.families import VOCABULARY, assert_idle, engine_of, load, make_optimistic, random_prompt

FREE = SamplingParams(max_tokens=12, ignore_eos=True)


def run(llm: LLM, requests: list[Request]) -> dict[Any, Completion]:
    """Completions by key, with everything added before the first step."""
    for request in requests:
        engine_of(llm).add(request)
    return finish(llm)


def finish(llm: LLM) -> dict[Any, Completion]:
    done: dict[Any, Completion] = {}
    while engine_of(llm).has_work():
        for completion in engine_of(llm).step():
            assert completion.key not in done
            done[completion.key] = completion
    assert_idle(engine_of(llm))
    return done


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens if token > 3)  # the others are special


def test_prompts_at_the_limit(llama: Path) -> None:
    limit = 40
    llm = load(llama, max_model_len=limit)
    prompts = [random_prompt(n, n) for n in (10, limit - 1, limit, limit + 1, 20)]
    before, fits, full, over, after = llm.generate(prompts, FREE)
    assert [len(c.token_ids) for c in (before, fits, after)] == [12, 1, 12]
    assert (fits.finish_reason, fits.error) == ("length", None)
    for refused, length in ((full, limit), (over, limit + 1)):
        assert (refused.finish_reason, refused.error_type) == ("error", "prompt_too_long")
        assert refused.prompt_tokens == length
        assert refused.error is not None
        assert str(length) in refused.error
        assert str(limit) in refused.error
        assert (refused.text, refused.token_ids) == ("", [])
    assert_idle(engine_of(llm))


def test_the_pool_limits_a_row_like_the_model(llama: Path) -> None:
    llm = load(llama, block_size=16, num_blocks=2)
    (completion,) = llm.generate([random_prompt(1, 20)], SamplingParams(max_tokens=500, ignore_eos=True))
    assert len(completion.token_ids) == 12
    assert completion.finish_reason == "length"
    assert llm.generate([random_prompt(1, 32)])[0].error_type == "prompt_too_long"


@pytest.mark.parametrize("prompt", [[], ""])
def test_an_empty_prompt_is_an_error_row(prompt: Any, llama: Path) -> None:
    llm = load(llama)
    empty, other = llm.generate([prompt, random_prompt(1, 5)], FREE)
    assert (empty.finish_reason, empty.error_type, empty.text) == ("error", "empty_prompt", "")
    assert len(other.token_ids) == 12


@pytest.mark.parametrize("bad", [VOCABULARY, -1, 2**40])
def test_a_token_that_the_model_does_not_have_is_an_error_row(bad: int, llama: Path) -> None:
    llm = load(llama)
    refused, other = llm.generate([[5, bad, 6], [5, 6]], FREE)
    assert (refused.finish_reason, refused.error_type) == ("error", "invalid_row")
    assert refused.error is not None
    assert str(bad) in refused.error
    assert len(other.token_ids) == 12
    assert_idle(engine_of(llm))


def test_max_tokens_is_cut_to_the_window(llama: Path) -> None:
    llm = load(llama, max_model_len=40)
    (completion,) = llm.generate([random_prompt(1, 30)], SamplingParams(max_tokens=10**9, ignore_eos=True))
    assert (len(completion.token_ids), completion.finish_reason) == (10, "length")


def test_an_immediate_end_is_an_empty_text(llama: Path, tmp_path: Path) -> None:
    prompt = random_prompt(3, 9)
    free = load(llama).generate([prompt], FREE)[0].token_ids
    folder = shutil.copytree(llama, tmp_path / "model")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [1, free[0]]}))
    llm = load(folder)
    (ended,) = llm.generate([prompt], SamplingParams(max_tokens=12))
    assert (ended.text, ended.token_ids, ended.finish_reason, ended.stop_reason) == ("", free[:1], "stop", free[0])
    (ignored,) = llm.generate([prompt], FREE)
    assert (ignored.token_ids, ignored.finish_reason) == (free, "length")


def test_stop_token_ids_end_a_row_and_are_not_shown(llama: Path) -> None:
    prompt = random_prompt(4, 9)
    llm = load(llama)
    free = llm.generate([prompt], FREE)[0].token_ids
    end = free.index(free[5])
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(free[5], min(set(range(256)) - set(free))))
    stopped, other = llm.generate([prompt, prompt], [params, FREE])
    assert (stopped.token_ids, stopped.text) == (free[: end + 1], words(free[:end]))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", free[5])
    assert other.token_ids == free


def test_stop_strings_end_a_row_and_are_cut(llama: Path) -> None:
    prompt = random_prompt(5, 9)
    llm = load(llama)
    free = llm.generate([prompt], FREE)[0]
    stop = " ".join(free.text.split()[4:6])[1:-1]  # from inside one word into the next
    (stopped,) = llm.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True, stop=("nothing", stop)))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < 12


def test_a_stop_in_the_last_allowed_token_is_a_stop(llama: Path) -> None:
    prompt = random_prompt(5, 9)
    llm = load(llama)
    free = llm.generate([prompt], FREE)[0]
    position = free.token_ids.index(free.token_ids[3])
    params = SamplingParams(max_tokens=position + 1, stop_token_ids=(free.token_ids[3],), ignore_eos=True)
    assert llm.generate([prompt], params)[0].finish_reason == "stop"


def stopping_requests(llm: LLM) -> list[Request]:
    """Rows that each watch for a different string of their own, at different places of their text."""
    prompts = [random_prompt(20 + i, 6 + i) for i in range(10)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = []
    for i, free in enumerate(llm.generate(prompts, params)):
        stop = free.text.split()[6 + i] + " "
        requests.append(Request(i, prompts[i], SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop,))))
    return requests


def test_stop_strings_survive_preemption(llama: Path) -> None:
    calm = load(llama, block_size=4)
    requests = stopping_requests(calm)
    expected = run(calm, requests)
    assert all(completion.finish_reason == "stop" for completion in expected.values())
    for num_blocks in (9, 10, 11, 12):
        llm = make_optimistic(load(llama, block_size=4, num_blocks=num_blocks))
        done = run(llm, requests)
        assert engine_of(llm).scheduler.num_preemptions > 0
        assert {key: (c.text, c.stop_reason) for key, c in done.items()} == {
            key: (c.text, c.stop_reason) for key, c in expected.items()
        }


def test_a_row_does_not_inherit_the_stop_strings_of_an_aborted_one(llama: Path) -> None:
    llm = make_optimistic(load(llama, block_size=4, num_blocks=8, max_num_seqs=2))
    prompts = [random_prompt(40 + i, 6) for i in range(3)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    free = [c.text for c in llm.generate(prompts, params)]
    stop = free[2].split()[2]
    watching = SamplingParams(max_tokens=20, ignore_eos=True, stop=("never",))
    for key in range(2):
        engine_of(llm).add(Request(key, prompts[key], watching))
    before = engine_of(llm).scheduler.num_preemptions
    while engine_of(llm).scheduler.num_preemptions == before:
        engine_of(llm).step()
    preempted = engine_of(llm).scheduler.waiting.head().request.key
    engine_of(llm).abort(preempted)
    engine_of(llm).add(Request("new", prompts[2], SamplingParams(max_tokens=20, ignore_eos=True, stop=(stop,))))
    new = finish(llm)["new"]
    assert (new.stop_reason, new.text) == (stop, free[2][: free[2].index(stop)])


def test_a_greedy_row_is_not_touched_by_sampled_neighbours(llama: Path) -> None:
    prompts = [random_prompt(60 + i, 10) for i in range(9)]
    params = [SamplingParams(max_tokens=15, temperature=t, seed=i) for i, t in enumerate([0, 0.7, 1.2] * 3)]
    llm = load(llama)
    together = llm.generate(prompts, params)
    for i in range(9):
        assert load(llama, max_num_seqs=1).generate([prompts[i]], params[i])[0].token_ids == together[i].token_ids
    greedy = llm.generate(prompts, SamplingParams(max_tokens=15))
    same = [a.token_ids == b.token_ids for a, b in zip(together, greedy, strict=True)]
    assert same == [True, False, False] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3},
        {"max_batched_tokens": 9},
        {"block_size": 4, "num_blocks": 14},
        {"prefix_caching": False, "max_num_seqs": 1},
    ],
    ids=str,
)
def test_a_seeded_row_says_the_same_in_any_company(options: dict[str, Any], llama: Path) -> None:
    params = [SamplingParams(max_tokens=16, temperature=1.0, seed=row_seed(0, i)) for i in range(16)]
    requests = [Request(i, random_prompt(i // 4, 8 + i // 4), params[i]) for i in range(16)]
    expected = run(load(llama), requests)
    assert len({completion.text for completion in expected.values()}) == 16, "equal prompts have seeds of their own"
    llm = make_optimistic(load(llama, **options))
    shuffled = [requests[i] for i in np.random.default_rng(1).permutation(16)]
    assert {key: c.text for key, c in run(llm, shuffled).items()} == {key: c.text for key, c in expected.items()}
    assert (engine_of(llm).scheduler.num_preemptions > 0) == ("num_blocks" in options)


def test_rows_without_a_seed_differ(llama: Path) -> None:
    done = load(llama).generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=16, temperature=1.0))
    assert len({completion.text for completion in done}) == 4


def test_row_seeds_depend_on_every_part() -> None:
    seeds = {row_seed(0), row_seed(1), row_seed(0, 1), row_seed(0, 1, 2), row_seed(0, 12), row_seed(0, "a", 1)}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(0, "a", 1) == row_seed(0, "a", 1)


def test_aborted_rows_leave_nothing_behind(llama: Path) -> None:
    llm = load(llama, max_num_seqs=2, max_batched_tokens=8)
    requests = [Request(i, random_prompt(i, 12), SamplingParams(max_tokens=10, stop=("w",))) for i in range(5)]
    requests[0].params = requests[1].params = FREE
    for request in requests:
        engine_of(llm).add(request)
    assert engine_of(llm).step() == []
    assert engine_of(llm).scheduler.slots.num_running == 1  # eight of its twelve prompt tokens are computed
    engine_of(llm).abort(0)
    engine_of(llm).abort(3)
    engine_of(llm).abort("no such row")
    done = finish(llm)
    assert sorted(done) == [1, 2, 4]
    assert len(done[1].token_ids) == 12
    engine_of(llm).abort(1)
    assert_idle(engine_of(llm))


def test_everything_may_be_aborted(llama: Path) -> None:
    llm = load(llama, max_num_seqs=2)
    for i in range(4):
        engine_of(llm).add(Request(i, random_prompt(i, 20), FREE))
    engine_of(llm).step()
    for i in range(4):
        engine_of(llm).abort(i)
    assert engine_of(llm).step() == []
    assert_idle(engine_of(llm))


def test_a_key_is_refused_while_it_is_in_use(llama: Path) -> None:
    llm = load(llama)
    engine_of(llm).add(Request("a", [5, 6], FREE))
    with pytest.raises(ValueError, match="'a' is already in the engine"):
        engine_of(llm).add(Request("a", [7], FREE))
    assert len(finish(llm)["a"].token_ids) == 12
    assert len(run(llm, [Request("a", [7], FREE)])["a"].token_ids) == 12


def test_times_and_counts_of_a_completion(llama: Path) -> None:
    llm = load(llama, max_num_seqs=1)
    first, second = llm.generate([random_prompt(1, 40), random_prompt(1, 40)], FREE)
    assert (first.prompt_tokens, first.cached_tokens, second.cached_tokens) == (40, 0, 32)
    for completion in (first, second):
        assert 0 <= completion.queue_s <= completion.first_token_s <= completion.total_s
    assert second.queue_s > first.queue_s


def test_step_statistics_add_up(llama: Path) -> None:
    llm = make_optimistic(load(llama, block_size=4, num_blocks=16, max_num_seqs=4, max_batched_tokens=10))
    engine = engine_of(llm)
    for i in range(8):
        engine.add(Request(i, random_prompt(i // 2, 14), FREE))
    sampled = tokens = preemptions = 0
    hits = []
    while engine.has_work():
        waiting = len(engine.scheduler.waiting)
        engine.step()
        step = engine.last_step
        assert step is not None
        assert 0 < step.tokens <= 10
        assert 0 <= step.sampled <= step.running <= 4
        assert 0 <= step.kv_used <= 1
        assert step.seconds > 0
        assert step.waiting <= waiting + step.preemptions - preemptions
        assert step.preemptions >= preemptions
        preemptions, sampled, tokens = step.preemptions, sampled + step.sampled, tokens + step.tokens
        assert step.hit_rate <= step.ideal_hit_rate < 1
        hits.append(step.hit_rate)
    assert preemptions == engine.scheduler.num_preemptions > 0
    assert sampled == 8 * 12
    assert tokens >= 4 * 14 + 8 * 11
    assert 0 < hits[-1] < 0.5
    assert engine.last_step is not None
    assert engine.last_step.waiting == engine.last_step.kv_used == 0


def test_room_is_never_negative(llama: Path) -> None:
    llm = make_optimistic(load(llama, block_size=4, num_blocks=8, max_num_seqs=3))

    def requests() -> Iterator[Request]:
        for i in range(12):
            yield Request(i, random_prompt(i, 6), FREE)

    assert {completion.key for completion in llm.stream(requests())} == set(range(12))
    assert engine_of(llm).scheduler.num_preemptions > 0
    for i in range(20):
        engine_of(llm).add(Request(i, random_prompt(i, 6), FREE))
    assert engine_of(llm).room == 0
    finish(llm)

"""Streams: deltas, early stops, aborts, several callers at once, and nothing left behind however they end."""

from __future__ import annotations

import asyncio
import gc
import pickle
import random
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import psutil
import pytest
from hypothesis import given, settings

import batchrun
from batchrun.engine.detokenizer import REPLACEMENT
from batchrun.engine.llm import LLM
from batchrun.engine.params import Completion, Delta, Request, SamplingParams
from batchrun.engine.pool import EnginePool
from batchrun.errors import BatchrunError
from tests.engine.families import assert_idle, engine_of, load, make_model, make_optimistic, random_prompt
from tests.engine.test_detokenizer import BYTES

LONG = SamplingParams(max_tokens=300, ignore_eos=True)


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes, so that its text is full of characters that do not come whole."""
    folder = make_model("llama", tmp_path_factory.mktemp("bytes"), vocab_size=len(BYTES))
    BYTES.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(bytes_folder: Path) -> Iterator[LLM]:
    with load(bytes_folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def pool(bytes_folder: Path) -> Iterator[LLM]:
    with load(bytes_folder, workers="2", num_threads=2, max_num_seqs=16) as pool:
        assert isinstance(pool.engine, EnginePool)
        yield pool


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to be")


def grown(deltas: Iterator[Delta]) -> dict[Any, list[Delta]]:
    by_key: dict[Any, list[Delta]] = {}
    for delta in deltas:
        by_key.setdefault(delta.key, []).append(delta)
    return by_key


def sampled(number: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=5 + 7 * i, temperature=1.5, seed=i) for i in range(number)]


PROMPTS = [random_prompt(i % 3, 20 + i) for i in range(12)]


@pytest.mark.parametrize("door", ["llm", "pool"])
def test_deltas_add_up_and_show_no_broken_character(door: str, llm: LLM, request: pytest.FixtureRequest) -> None:
    expected = llm.generate(PROMPTS, sampled(12))
    assert any(c.text.encode("ascii", "ignore").decode() != c.text.replace(REPLACEMENT, "") for c in expected)
    rows = grown(request.getfixturevalue(door).stream(PROMPTS, sampled(12), deltas=True))
    for i, completion in enumerate(expected):
        *growing, last = rows[i]
        assert last.completion is not None
        assert last.finish_reason == completion.finish_reason
        assert last.completion.text == "".join(delta.text for delta in rows[i]) == completion.text
        assert [token for delta in rows[i] for token in delta.token_ids] == completion.token_ids
        assert all(delta.text and delta.completion is None for delta in growing)
        assert len(growing) > 0.2 * len(completion.token_ids)


def test_a_row_streams_as_its_tokens_come(llm: LLM) -> None:
    for delta in llm.stream([[5, 6, 7]], LONG, deltas=True):
        assert delta.completion is None, "the first delta comes long before the end"
        break


def test_what_a_stop_string_may_cut_is_not_shown(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPTS[3]], SamplingParams(max_tokens=60, ignore_eos=True))
    assert len(whole.text) > 30
    for start in range(2, 24, 3):
        stop = whole.text[start : start + 6]
        params = SamplingParams(
            max_tokens=60, ignore_eos=True, stop=(stop, whole.text[start + 1 : start + 3] + "never")
        )
        (deltas,) = grown(llm.stream([PROMPTS[3]], params, deltas=True)).values()
        text = "".join(delta.text for delta in deltas)
        assert text == whole.text[: whole.text.index(stop)]
        assert deltas[-1].completion is not None
        assert deltas[-1].completion.stop_reason == stop


@pytest.mark.parametrize("door", ["llm", "pool"])
def test_a_predicate_ends_a_row_where_its_text_first_pleases(
    door: str, llm: LLM, request: pytest.FixtureRequest
) -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    whole = {c.key: c for c in llm.generate(PROMPTS, params)}
    seen: set[str] = set()

    def two_spaces(text: str) -> bool:
        seen.add(text)
        return text.count("e") >= 2

    stopped = request.getfixturevalue(door).generate(PROMPTS, params, stop_when=two_spaces)
    ends = {c.stop_reason for c in stopped}
    assert "stop_when" in ends
    for c in stopped:
        assert whole[c.key].text.startswith(c.text)
        assert whole[c.key].token_ids[: len(c.token_ids)] == c.token_ids
        if c.stop_reason == "stop_when":
            assert (c.finish_reason, c.text.count("e") >= 2) == ("stop", True)
            assert not any(two_spaces(text) for text in seen if len(text) < len(c.text) and c.text.startswith(text))
        else:
            assert c.text == whole[c.key].text
    assert request.getfixturevalue("llm").generate(PROMPTS[0], params)[0].text == whole[0].text
    assert_idle(engine_of(llm))


def test_an_error_of_the_predicate_is_the_callers(llm: LLM) -> None:
    def fails(text: str) -> bool:
        raise LookupError("the list is empty")

    with pytest.raises(LookupError, match="the list is empty"):
        llm.generate(PROMPTS, LONG, stop_when=fails)
    assert_idle(engine_of(llm))


@pytest.fixture(scope="module", params=[True, False])
def crowded(llama: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Few blocks, with a prefix cache or without, and a scheduler that must preempt."""
    options = {"num_blocks": 40, "max_num_seqs": 8, "max_batched_tokens": 48, "prefix_caching": request.param}
    with make_optimistic(load(llama, **options)) as llm:
        yield llm


@settings(max_examples=5)
@given(st.integers(0, 10_000), st.booleans())
def test_aborting_half_of_the_rows_leaks_no_block(crowded: LLM, seed: int, deltas: bool) -> None:
    llm = crowded
    chance = random.Random(seed)
    requests = [
        Request(i, random_prompt(i % 3, 40)[: chance.randrange(1, 40)] + random_prompt(i, 3),
                SamplingParams(max_tokens=chance.randrange(1, 120), ignore_eos=True))
        for i in range(40)
    ]  # fmt: skip
    doomed = set(chance.sample(range(40), 20))
    ends: dict[Any, str] = {}
    items: Iterator[Any] = llm.stream(requests, deltas=True) if deltas else llm.stream(requests)
    for item in items:
        if item.finish_reason is not None:
            assert item.key not in ends
            ends[item.key] = item.finish_reason
        if doomed and chance.random() < 0.5:
            llm.abort(doomed.pop())
    assert ends.keys() == set(range(40))
    assert "length" in ends.values()
    assert_idle(engine_of(llm))


def test_after_aborts_the_cache_is_sound(crowded: LLM, llama: Path) -> None:
    assert engine_of(crowded).scheduler.num_preemptions, "the aborts came between preemptions"
    prompts, params = [random_prompt(i % 3, 40)[: 5 + 3 * i] for i in range(12)], SamplingParams(max_tokens=30)
    with load(llama, prefix_caching=False) as fresh:
        expected = [c.token_ids for c in fresh.generate(prompts, params)]
    for _ in crowded.stream(prompts, LONG):
        break
    assert [c.token_ids for c in crowded.generate(prompts, params)] == expected


def test_aborted_rows_leave_a_pool(pool: LLM) -> None:
    ends: dict[Any, str] = {}
    for completion in pool.stream(([*PROMPTS[i % 12], i] for i in range(60)), LONG):
        ends[completion.key] = completion.finish_reason
        for key in {*range(0, 60, 2)} - ends.keys():
            pool.abort(key)
    assert ends.keys() == set(range(60))
    assert set(ends.values()) == {"abort", "length"}
    pool.engine.check_integrity()
    assert not pool.engine.has_work()


def endless(taken: list[int], length: int = 6) -> Iterator[list[int]]:
    """Prompts that differ from one another in their first tokens."""
    for number in count():
        taken[0] = number + 1
        yield [4 + number // 250**place % 250 for place in range(3)] + [5] * (length - 3)


def growth(llama: Path, rows: int) -> list[int]:
    """Bytes by which the process has grown since the first tenth of so many rows, at each further tenth."""
    taken, process, sizes = [0], psutil.Process(), []
    with load(llama, max_num_seqs=64, num_blocks=512) as llm:
        for done, _ in enumerate(llm.stream(endless(taken, 40), SamplingParams(max_tokens=1)), start=1):
            assert taken[0] <= done + 2 * 64
            if done % (rows // 10) == 0:
                sizes.append(process.memory_info().rss)
            if done == rows:
                break
    return [size - sizes[0] for size in sizes[1:]]


def test_a_long_generator_of_prompts_keeps_memory_flat(llama: Path) -> None:
    assert max(growth(llama, 5000)) < 10 * 2**20


@pytest.mark.long
def test_a_million_prompts_keep_memory_flat(llama: Path) -> None:
    """But for the prefixes that were ever seen, which are counted up to a limit."""
    sizes = growth(llama, 1_000_000)
    print([f"{size / 2**20:.0f} MiB" for size in sizes])
    assert max(sizes) < 150 * 2**20
    assert sizes[-1] - sizes[5] < 10 * 2**20


def test_what_has_come_is_yielded_before_a_slow_source_is_asked_for_more_than_one(llm: LLM) -> None:
    taken = 0

    def slow() -> Iterator[list[int]]:
        nonlocal taken
        for number in range(6):
            taken += 1
            yield [5, 6, number + 7]
            time.sleep(0.2)

    for done, _ in enumerate(llm.stream(slow(), SamplingParams(max_tokens=1)), start=1):
        assert taken <= done + 3


def test_a_slow_caller_does_not_starve_the_engine(llama: Path) -> None:
    llm, taken = load(llama, max_num_seqs=8), [0]
    stream = llm.stream(endless(taken), SamplingParams(max_tokens=1))
    next(stream)
    for _ in range(30):
        before = taken[0]
        next(stream)
        assert taken[0] == before + 1, "one is taken for each that is given"
    stream.close()
    assert_idle(engine_of(llm))


def test_streams_of_several_threads_share_the_batch(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = [c.token_ids for c in llm.generate(PROMPTS, params)]
    results: dict[int, list[list[int]]] = {}

    def ask(number: int) -> None:
        results[number] = [c.token_ids for c in llm.generate(PROMPTS, params)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(3)] == [expected] * 3
    assert_idle(engine_of(llm))


def test_two_models_run_in_one_process(llama: Path, bytes_folder: Path, llm: LLM) -> None:
    with load(llama) as other:
        expected = [c.token_ids for each in (llm, other) for c in each.generate(PROMPTS, LONG)]
        first, second = llm.stream(PROMPTS, LONG), other.stream(PROMPTS, LONG)
        pairs = list(zip(first, second, strict=True))
    mixed = [c.token_ids for side in zip(*pairs, strict=True) for c in sorted(side, key=lambda c: c.key)]
    assert mixed == expected


def test_a_caller_that_stops_listening_leaves_nothing(llm: LLM) -> None:
    for completion in llm.stream(PROMPTS * 3, sampled(36)):
        assert completion.finish_reason
        break
    assert_idle(engine_of(llm))
    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    with pytest.raises(RuntimeError, match="no more"):
        stream.throw(RuntimeError("no more"))
    assert_idle(engine_of(llm))


def test_an_error_of_the_source_ends_the_stream(llm: LLM) -> None:
    def source() -> Iterator[Any]:
        yield [5, 6]
        yield {"text": "no key of a prompt"}

    broken: list[Any] = [[5, 1.5], {"prompt_token_ids": ["x"]}, {"prompt_token_ids": [[5]]}]
    for prompt in broken:
        with pytest.raises(TypeError, match="is not a prompt"):
            llm.generate([prompt])
    others: list[Any] = [{"max_tokens": 3}, ["x"]]
    for params in others:
        with pytest.raises(TypeError, match="is not SamplingParams"):
            llm.generate([[5, 6]], params)
    with pytest.raises(TypeError, match=r"\{'text': .* is not a prompt: it must be text, token ids, a Request, or"):
        list(llm.stream(source(), LONG))
    with pytest.raises(ValueError, match="there are 2 sampling parameters and more prompts"):
        list(llm.stream(PROMPTS, iter([LONG, LONG])))
    with pytest.raises(ValueError, match="request key 'a' is already in the stream"):
        list(llm.stream([Request("a", [5], LONG), Request("a", [6], LONG)]))
    assert_idle(engine_of(llm))


def test_ctrl_c_leaves_the_engine_usable(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[:3], LONG)
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream(endless([0]), LONG))
    assert_idle(engine_of(llm))
    assert [c.text for c in llm.generate(PROMPTS[:3], LONG)] == [c.text for c in expected]


def test_dicts_are_prompts_as_vllm_has_them(llm: LLM) -> None:
    kinds: list[Any] = [
        "abc",
        {"prompt": "abc"},
        {"prompt_token_ids": BYTES("abc")["input_ids"]},
        Request("r", BYTES("abc")["input_ids"]),
    ]
    texts = {c.text for c in llm.generate(kinds)}
    assert len(texts) == 1
    assert llm.generate({"prompt": "abc"})[0].text in texts


def test_chats_are_prompts_by_the_models_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{{ tools | map(attribute='name') | join(' ') if tools else '' }}{% for m in messages %}[{{ m.role }}] "
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ mood }}"
    )
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": "hi"}]
    one = llm.chat(messages, LONG, tools=[{"name": "look"}], chat_template_kwargs={"mood": "!"})
    two = llm.chat([messages, messages], [LONG, LONG])
    assert [c.prompt_tokens for c in one + two] == [len(BYTES("look[user] hi>!")["input_ids"])] + 2 * [
        len(BYTES("[user] hi>")["input_ids"])
    ]
    assert one[0].text == llm.generate("look[user] hi>!", LONG)[0].text


def test_close_is_final_and_may_be_repeated(llama: Path) -> None:
    llm = load(llama)
    stream = llm.stream(endless([0]), LONG)
    next(stream)
    llm.close()
    with pytest.raises(BatchrunError, match="this LLM is closed"):
        list(stream)
    llm.close()
    for use in (lambda: llm.generate([5]), lambda: llm.stream([[5]]), lambda: llm.abort(1), lambda: llm.engine):
        with pytest.raises(BatchrunError, match="this LLM is closed"):
            use()


def test_garbage_collection_closes(llama: Path) -> None:
    before = set(threading.enumerate())
    llm = load(llama)
    engine = weakref.ref(llm.engine)
    llm.generate([5, 6])
    del llm
    gc.collect()
    assert set(threading.enumerate()) <= before
    assert engine() is None


@pytest.mark.parametrize("door", ["stream", "astream"])
def test_a_stream_keeps_its_llm(llama: Path, door: str) -> None:
    """Also once it has read all prompts, with no other name for the LLM."""

    async def listen(stream: Any) -> list[Any]:
        return [item async for item in stream]

    items = getattr(load(llama), door)([random_prompt(i, 8) for i in range(4)], SamplingParams(max_tokens=4))
    gc.collect()
    assert len(asyncio.run(listen(items)) if door == "astream" else list(items)) == 4


def test_the_engine_is_free_as_soon_as_the_last_completion_has_come(llama: Path) -> None:
    """Whoever has it may use the engine, however slow the driver's thread is: that makes no step for others."""
    with load(llama) as llm:
        engine, driver, given = engine_of(llm), llm._open(), threading.Event()

        def outbox(events: list[Any]) -> None:
            engine.add(Request("mine", [5, 6, 7], LONG))
            given.set()

        driver.submit(Request(driver.next_number(), [5, 6], SamplingParams(max_tokens=2)), outbox)
        assert given.wait(60)
        for _ in range(2):  # the second order comes after what a step between them would have done
            driver.ask(lambda: None)
        assert engine.scheduler.waiting, "it has not been scheduled"
        done: list[Completion] = []
        while engine.has_work():
            done += engine.step()
        assert [completion.key for completion in done] == ["mine"]


def test_an_engine_that_fails_says_so_to_all(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(llama)

    def fail() -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine_of(llm).scheduler, "schedule", fail)
    for _ in range(2):
        with pytest.raises(BatchrunError, match="the engine has failed, and this LLM with it: out of memory") as caught:
            llm.generate([5, 6])
        assert isinstance(caught.value.__cause__, RuntimeError)


class TestAsync:
    def test_streams_of_several_tasks_share_the_batch(self, llm: LLM) -> None:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        expected = {c.key: c.text for c in llm.generate(PROMPTS, params)}

        async def ask() -> dict[Any, str]:
            return {completion.key: completion.text async for completion in llm.astream(PROMPTS, params)}

        async def ask_for_deltas() -> dict[Any, str]:
            texts: dict[Any, str] = dict.fromkeys(range(12), "")
            async for delta in llm.astream(PROMPTS, params, deltas=True):
                texts[delta.key] += delta.text
            return texts

        async def both() -> Any:
            return await asyncio.gather(ask(), ask_for_deltas(), ask())

        assert asyncio.run(both()) == [expected] * 3

    def test_the_loop_is_free_while_the_engine_computes(self, llm: LLM) -> None:
        async def ticks() -> int:
            ticked = 0
            async for delta in llm.astream([[5, 6]], LONG, deltas=True):
                await asyncio.sleep(0)
                ticked += delta.completion is None
            return ticked

        assert asyncio.run(ticks()) > 20

    def test_cancelling_aborts(self, llm: LLM) -> None:
        async def listen(started: asyncio.Event) -> None:
            async for _ in llm.astream(endless([0]), LONG, deltas=True):
                started.set()

        async def cancel() -> None:
            started = asyncio.Event()
            task = asyncio.create_task(listen(started))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        wait_until(lambda: not engine_of(llm).has_work())
        assert_idle(engine_of(llm))

    def test_no_more_is_taken_than_the_window_holds(self, llama: Path) -> None:
        llm, taken = load(llama, max_num_seqs=4), [0]

        async def slow() -> None:
            done = 0
            async for _ in llm.astream(endless(taken), SamplingParams(max_tokens=1)):
                done += 1
                await asyncio.sleep(0.01)
                assert taken[0] <= done + 8
                if done == 30:
                    return

        asyncio.run(slow())

    def test_the_source_may_be_asynchronous_and_fail(self, llm: LLM) -> None:
        async def source() -> AsyncIterator[list[int]]:
            for number in range(3):
                await asyncio.sleep(0.01)
                yield [5, 6, 7 + number]
            raise LookupError("no more")

        with pytest.raises(LookupError, match="no more"):
            asyncio.run(_collect(llm.astream(source(), SamplingParams(max_tokens=1))))
        assert asyncio.run(_collect(llm.astream([]))) == []

    def test_generate_works_below_a_running_loop(self, llm: LLM) -> None:
        async def cell() -> list[Completion]:
            return llm.generate([[5, 6]])

        assert len(asyncio.run(cell())) == 1


async def _collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


class TestDatasets:
    def test_a_map_is_cached_by_the_model(self, llm: LLM, bytes_folder: Path, llama: Path) -> None:
        from datasets.fingerprint import Hasher

        with load(bytes_folder, max_num_seqs=3) as same, load(llama) as other:
            assert Hasher.hash(same) == Hasher.hash(llm) != Hasher.hash(other)

    def test_map_runs_without_a_warning(self, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
        from datasets import Dataset

        def complete(batch: dict[str, list[str]]) -> dict[str, list[str]]:
            return {"answer": [c.text for c in llm.generate(batch["text"], SamplingParams(max_tokens=3))]}

        texts = ["ab", "cd", "ef"]
        mapped = Dataset.from_dict({"text": texts}).map(complete, batched=True, batch_size=2)
        assert mapped["answer"] == [c.text for c in llm.generate(texts, SamplingParams(max_tokens=3))]
        assert not caplog.records

    def test_a_copy_says_that_it_is_one(self, llm: LLM) -> None:
        copy = pickle.loads(pickle.dumps(llm))
        copy.close()
        uses = (copy.generate, copy.score, lambda prompt: copy.choose(prompt, ["a", "b"]))
        for use in uses:
            with pytest.raises(
                BatchrunError, match=r"this is a copy of an LLM, .* with datasets\.map leave num_proc at None"
            ):
                use("abc")


def test_the_door_is_named_in_the_package() -> None:
    assert batchrun.LLM is LLM
    assert batchrun.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = batchrun.Llm

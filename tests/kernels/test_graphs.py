"""Recorded decode steps, in Triton's interpreter with a recorder that runs them again: padding, places, tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from batchrun.config import EngineConfig
from batchrun.engine import graphs, loading
from batchrun.engine.attention import triton as backend_module
from batchrun.engine.attention.fixed import FixedTables
from batchrun.engine.attention.prefix import Sharing
from batchrun.engine.attention.triton import INTERPRETED_SMS, InvariantAttention, TritonAttention
from batchrun.engine.batch import Batch
from batchrun.engine.bursts import NO_LOSS, Bursts, StepCosts
from batchrun.engine.device_memory import DeviceMemory
from batchrun.engine.fixed_inputs import Field, FixedInputs
from batchrun.engine.graphs import DecodeGraphs, Form, GraphShape, buckets, graph_bytes
from batchrun.engine.llm import LLM
from batchrun.engine.params import Request, SamplingParams
from batchrun.engine.recorder import EagerRecorder, Recorded
from batchrun.engine.scheduler import Scheduler
from batchrun.errors import ConfigError
from batchrun_kernels import prefix_plan, tuned
from batchrun_kernels.decode_plan import PROGRAMS_PER_SM
from batchrun_kernels.tuned import Key
from tests.engine.adapters import make_adapter
from tests.engine.families import engine_of, load, make_model, make_optimistic, random_prompt

PROMPTS = [random_prompt(i, length) for i, length in enumerate((4, 11, 2, 9))]
PARAMS = [
    SamplingParams(max_tokens=7, ignore_eos=True),
    SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.9, top_p=0.9, seed=3),
    SamplingParams(max_tokens=3, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1, min_tokens=3),
]


class Places(EagerRecorder):
    """Also notes how many rows each replay has, and where kernels find what they attend over, which must not change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replayed: list[int] = []
        self._seen: list[Any] = []
        for name in ("paged_decode", "prefix_group"):
            monkeypatch.setattr(backend_module, name, self._noting(getattr(backend_module, name)))

    def _noting(self, attend: Any) -> Any:
        def noting(q: torch.Tensor, pages: Any, rows: Any, scoring: Any, plan: Any, **keywords: Any) -> Any:
            self._seen.append([*map(_place, rows), *map(_place, plan)])
            return attend(q, pages, rows, scoring, plan, **keywords)

        return noting

    def record(self, function: Any) -> Recorded:
        outputs, replay = super().record(function)
        expected = self._seen[-len(self._seen) // 2 :]

        def checked() -> None:
            self._seen.clear()
            replay()
            assert self._seen == expected
            self.replayed.append(len(outputs[1]))

        self._seen.clear()
        return Recorded(outputs, checked)


class Counting(EagerRecorder):
    """Counts the replays."""

    replayed = 0

    def record(self, function: Any) -> Recorded:
        outputs, replay = super().record(function)

        def counted() -> None:
            self.replayed += 1
            replay()

        return Recorded(outputs, counted)


def _spared(scheduler: Scheduler) -> float:
    return scheduler.bursts.spared


def _place(what: Any) -> Any:
    return (what.data_ptr(), what.shape, what.stride()) if isinstance(what, torch.Tensor) else what


def tokens(llm: LLM) -> list[list[int]]:
    return [list(completion.token_ids) for completion in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step does not fill holds numbers that a kernel cannot use."""
    opened, filled = FixedInputs.open, FixedTables.fill

    def opening(self: FixedInputs) -> dict[str, np.ndarray]:
        arrays = opened(self)
        for array in arrays.values():
            array.fill(np.nan if array.dtype == np.float32 else 2**30)
        return arrays

    def filling(self: FixedTables, *given: Any) -> None:
        self._blocks.fill_(2**30)
        works: list[Any] = [*self._decode.values(), *self._prefix.values()]
        for work in works:
            work._runs.fill_(torch.nan)
            work._run_lse.fill_(torch.nan)
        filled(self, *given)

    monkeypatch.setattr(FixedInputs, "open", opening)
    monkeypatch.setattr(FixedTables, "fill", filling)


def on_triton(folder: Path, backend: type[TritonAttention] = TritonAttention, **options: Any) -> LLM:
    """Attends with the kernels, without the check at load, which takes the interpreter long."""
    llm = load(folder, attention="torch", **options)
    engine = engine_of(llm)
    model, pool = engine.model, engine.pool
    model.backend = backend(model.layers, pool.num_blocks, pool.block_size, model.dtype, model.device)
    return llm


@pytest.mark.parametrize(("family", "overlap", "num_blocks"), [("llama", "off", 9), ("gemma2", "on", 13)])
def test_recorded_steps_say_the_same(
    family: str, overlap: str, num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows that are preempted and come back in other blocks, and windows that give blocks back."""
    folder = make_model(family, tmp_path, num_hidden_layers=2)
    expected = tokens(load(folder))
    llm = make_optimistic(on_triton(folder, overlap=overlap, max_num_seqs=4, block_size=4, num_blocks=num_blocks))
    engine, recorder = engine_of(llm), Places(monkeypatch)
    engine.executor.record(recorder, engine.max_model_len, engine.scheduler.expected_steps, at_once=True)
    backend = engine.model.backend
    assert isinstance(backend, TritonAttention)
    assert not any(page.keys.any() or page.values.any() for page in backend.pages), "padding was written"
    assert tokens(llm) == expected
    engine.check_integrity()
    assert engine.scheduler.num_preemptions > 0 or family != "llama"
    assert len(recorder.replayed) >= 5
    assert 4 in recorder.replayed, "three rows are padded"


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_groups_that_come_and_go(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of three templates, the shared pages of some of which are read in several pieces."""
    monkeypatch.setattr(backend_module, "MIN_GROUP_ROWS", 2)
    monkeypatch.setattr(backend_module, "MIN_SAVED_BLOCKS", 1)
    monkeypatch.setattr(prefix_plan, "MIN_CHUNK", 8)
    templates = [random_prompt(20 + i, length) for i, length in enumerate((70, 9, 10))]
    prompts = [templates[(0, 0, 1, 1, 1, 0, 2, 2)[i]] + random_prompt(i, 1 + i % 3) for i in range(8)]
    lengths = (5, 7, 4, 6, 5, 4, 6, 7)
    params = [SamplingParams(max_tokens=lengths[i], ignore_eos=True, seed=i, temperature=i % 2) for i in range(8)]
    folder = make_model(family, tmp_path, num_hidden_layers=2)
    expected = [list(completion.token_ids) for completion in load(folder).generate(prompts, params)]
    llm = on_triton(folder, overlap="on", max_num_seqs=8, block_size=4, num_blocks=200)
    engine, recorder = engine_of(llm), Places(monkeypatch)
    engine.executor.record(recorder, engine.max_model_len, engine.scheduler.expected_steps, at_once=True)
    recorded: DecodeGraphs = engine.executor.graphs
    found: list[Any] = []
    fill = recorded._fill

    def filling(batch: Batch, size: int, sharing: Sharing | None) -> None:
        found.append(sharing and (sharing.token_counts.tolist(), sharing.shared_lens.tolist()))
        fill(batch, size, sharing)

    monkeypatch.setattr(recorded, "_fill", filling)
    hidden = Mock(wraps=engine.model.hidden)
    monkeypatch.setattr(engine.model, "hidden", hidden)
    assert [list(completion.token_ids) for completion in llm.generate(prompts, params)] == expected
    engine.check_integrity()
    assert len(found) == len(recorder.replayed)
    groupings = {str(grouping) for grouping in found if grouping}
    assert len(groupings) >= 3, found
    assert None in found
    assert max(len(grouping[0]) for grouping in found if grouping) == 3
    assert all(is_mixed(call.args[0]) for call in hidden.call_args_list)


@pytest.mark.parametrize("at_once", [True, False])
def test_rows_that_share_pages_are_found_once_a_step(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the step is replayed or not."""
    looked = Mock(wraps=backend_module.shared_prefixes)
    monkeypatch.setattr(backend_module, "shared_prefixes", looked)
    llm = on_triton(make_model("llama", tmp_path, num_hidden_layers=1), max_num_seqs=4, block_size=4)
    engine, recorder = engine_of(llm), Places(monkeypatch)
    engine.executor.record(recorder, engine.max_model_len, engine.scheduler.expected_steps, at_once)
    steps = 0
    for number in range(4):
        engine.add(Request(number, PROMPTS[number], PARAMS[0]))
    while engine.has_work():
        engine.step()
        steps += 1
    assert looked.call_count == steps
    assert bool(recorder.replayed) == at_once


@pytest.mark.parametrize("at_once", [True, False])
def test_rows_are_let_in_together_so_that_steps_are_replayed(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it nearly every step has a prompt in it; if none is recorded yet, such steps say that it is worth it."""
    monkeypatch.setattr(graphs, "RECORD_S", 2 * graphs.SAVED_S)  # three numbers of rows: six steps
    folder = make_model("llama", tmp_path, num_hidden_layers=1)
    prompts = [random_prompt(i, 2) for i in range(20)]
    params = [SamplingParams(max_tokens=2 + i % 3, ignore_eos=True, temperature=i % 2, seed=i) for i in range(20)]
    expected = [list(completion.token_ids) for completion in load(folder).generate(prompts, params)]
    replayed = []
    for costs in (NO_LOSS, StepCosts(2.0, np.inf)):
        engine = engine_of(llm := on_triton(folder, overlap="on", max_num_seqs=4, block_size=4, num_blocks=40))
        recorder, scheduler = Counting(), engine.scheduler
        expects = scheduler.expected_steps if at_once else partial(_spared, scheduler)
        engine.executor.record(recorder, engine.max_model_len, expects, at_once)
        scheduler.bursts = Bursts(costs, engine.executor.graphs.replays)
        assert [list(completion.token_ids) for completion in llm.generate(prompts, params)] == expected
        replayed.append(recorder.replayed)
    assert replayed[1] >= replayed[0] + 6


def test_rows_are_let_in_at_once_where_no_step_is_replayed(tmp_path: Path) -> None:
    engine = engine_of(on_triton(make_model("llama", tmp_path, num_hidden_layers=1), max_num_seqs=2))
    engine.executor.record(EagerRecorder(), 64, lambda: 0.0)
    recorded: DecodeGraphs = engine.executor.graphs
    form = Form(grouped=False, adapted=False)
    assert not recorded.replays(), "nothing is expected"
    recorded._expected_steps = lambda: 1e6
    assert recorded.replays()
    recorded._recorded[form] = {}
    assert not recorded.replays(), "they cannot be recorded"
    recorded._recorded[form] = {1: Recorded((), lambda: None)}
    assert recorded.replays()
    engine.add(Request(0, [5, 6], SamplingParams(max_tokens=6)))
    engine.step()
    engine.scheduler.slots.adapter[engine.scheduler.slots.order] = 1
    assert not recorded.replays(), "a row has an adapter, and none is in the recorded steps"


def test_what_is_lost_to_a_step_that_is_not_replayed(tmp_path: Path) -> None:
    """A small model's steps are bound by the host, a large one's are not."""
    model = engine_of(load(make_model("llama", tmp_path))).model
    small = loading.step_costs(model)
    assert small.steps == pytest.approx(2)
    assert small.tokens > 1e6
    assert StepCosts.of(1.2e9, 0.44e9).tokens == pytest.approx(909, abs=1)
    assert StepCosts.of(16e9, 7e9) == NO_LOSS


def is_mixed(batch: Batch) -> bool:
    """Whether a step has more in it than rows that decode."""
    return batch.num_tokens > len(batch.slots) or len(batch.sampled) < len(batch.slots)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("limit", [None, 1])
def test_rows_with_adapters(limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if limit is not None:
        monkeypatch.setattr(graphs, "MOST_ADAPTER_BYTES", limit)
    folder = make_model("llama", tmp_path / "base", num_hidden_layers=2)
    kinds = {"a": ("q_proj", "down_proj", "lm_head"), "b": ("q_proj", "v_proj", "gate_proj")}
    paths = {name: make_adapter(tmp_path / name, folder, i, kinds[name], rank=2 + i) for i, name in enumerate(kinds)}
    adapters = {name: str(path) for name, path in paths.items()}
    names, lengths = (None, "a", "b", "a"), (9, 4, 3, 6)
    params = [
        SamplingParams(max_tokens=most, ignore_eos=True, adapter=name)
        for name, most in zip(names, lengths, strict=True)
    ]
    expected = [list(c.token_ids) for c in load(folder, adapters=adapters).generate(PROMPTS, params)]
    llm = on_triton(folder, adapters=adapters, overlap="on", max_num_seqs=4, block_size=4)
    engine, recorder = engine_of(llm), Places(monkeypatch)
    engine.executor.record(recorder, engine.max_model_len, engine.scheduler.expected_steps, at_once=True)
    hidden = Mock(wraps=engine.model.hidden)
    monkeypatch.setattr(engine.model, "hidden", hidden)
    assert [list(c.token_ids) for c in llm.generate(PROMPTS, params)] == expected
    others = [call.args[0] for call in hidden.call_args_list if not is_mixed(call.args[0])]
    assert all(batch.adapters is not None for batch in others)
    assert bool(others) == (limit is not None)
    assert len(recorder.replayed) >= (8 if limit is None else 3)


def test_recorded_steps_take_the_options_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries: dict[Key, Any] = {}
    monkeypatch.setattr(tuned, "entries", lambda: entries)
    folder, programs = make_model("llama", tmp_path), []
    for options in ({}, {"programs_per_sm": 1}):
        entries[Key("", "paged_decode", "8x4x4")] = options
        engine = engine_of(on_triton(folder, max_num_seqs=1))
        engine.executor.record(EagerRecorder(), 64, lambda: 0.0, at_once=True)
        recorded: DecodeGraphs = engine.executor.graphs
        plans = [work.plans(1).short for work in recorded._tables._decode.values()]
        programs += [plan.programs for plan in plans if plan is not None]
    assert programs == [INTERPRETED_SMS * PROGRAMS_PER_SM, INTERPRETED_SMS]


@pytest.mark.parametrize(
    ("family", "backend", "adapts", "kept"),
    [
        ("llama", TritonAttention, False, 9),
        ("gemma2", TritonAttention, False, 9),
        ("llama", TritonAttention, True, 19),
        ("llama", InvariantAttention, False, 5),
    ],
)
def test_their_memory_is_known_before_they_are_recorded(
    family: str,
    backend: type[TritonAttention],
    adapts: bool,
    kept: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The buffers to the byte; of the recorded steps what is kept beside one step of the most rows."""
    folder, adapters = make_model(family, tmp_path / "base", num_hidden_layers=2), {}
    if adapts:
        adapters = {"a": str(make_adapter(tmp_path / "a", folder, 1, ("q_proj",), rank=2))}
    llm = on_triton(folder, backend, adapters=adapters, max_num_seqs=20, block_size=4)
    engine = engine_of(llm)
    model, capacity = engine.model, engine.scheduler.slots.capacity
    engine.executor.record(EagerRecorder(), engine.max_model_len, engine.scheduler.expected_steps, at_once=True)
    made = engine.executor.graphs
    assert isinstance(model.backend, TritonAttention)
    sms = model.backend.num_sms
    shape = GraphShape(capacity, 4, engine.max_model_len, model.vocab_size, model.dtype, sms, adapts)
    buffers, recorded = graph_bytes(backend, model.layers, shape, 1000)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(made._tables, {})}
    held |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(made._inputs, {})}
    assert buffers == sum(held.values()) + made._every.nbytes
    largest, *others = [each.outputs for of_form in made._recorded.values() for each in of_form.values()]
    assert len(largest[0]) == capacity
    assert len(others) == kept
    assert recorded == 1000 + sum(part.nbytes for outputs in others for part in outputs)

    config, memory = EngineConfig(block_size=4, max_num_seqs=capacity), DeviceMemory(1, 0, 0, 0, 1000)
    monkeypatch.setattr(loading, "runs_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=sms))
    table = (capacity + 20) * model.vocab_size * 4
    for records, more in ((True, (buffers, recorded)), (False, (0, 0))):
        found = loading.with_fixed(memory, model, backend, config, engine.max_model_len, records=records)
        assert found == DeviceMemory(1, 0, 0, 0, 1000, table, 0, *more)


HOLDERS = ("_Decode", "_WholeRows", "_Prefix", "PrefillPlan", "FixedInputs")


def tensors(holder: Any, seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    """Those that buffers of recorded steps hold on the device, pages and host copies aside."""
    for value in holder if isinstance(holder, tuple) else vars(holder).values():
        parts = list(value.values()) if isinstance(value, dict) else [value]
        for part in parts:
            if isinstance(part, torch.Tensor):
                yield part
            elif type(part).__name__ in HOLDERS and id(part) not in seen:
                seen[id(part)] = part
                yield from tensors(part, seen)


def test_steps_are_recorded_when_they_are_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = on_triton(make_model("llama", tmp_path), max_num_seqs=2)
    engine = engine_of(llm)
    monkeypatch.setattr(graphs, "RECORD_S", 5 * graphs.SAVED_S)  # two numbers of rows: ten steps
    engine.executor.record(EagerRecorder(), 64, engine.scheduler.expected_steps)
    recorded: DecodeGraphs = engine.executor.graphs
    engine.add(Request(0, [5, 6], SamplingParams(max_tokens=6, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    assert not recorded._recorded
    engine.add(Request(1, [5, 6], SamplingParams(max_tokens=7, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    assert {form.grouped: sorted(steps) for form, steps in recorded._recorded.items()} == {False: [1, 2]}


def test_a_model_that_cannot_be_recorded_computes_as_before(tmp_path: Path) -> None:
    class Fails(EagerRecorder):
        def record(self, function: Any) -> Recorded:
            raise RuntimeError("operation not permitted when stream is capturing")

    folder = make_model("llama", tmp_path)
    expected = [list(c.token_ids) for c in load(folder).generate(PROMPTS[:1], PARAMS[0])]
    llm = on_triton(folder, max_num_seqs=2)
    engine = engine_of(llm)
    with pytest.raises(ConfigError, match="not permitted when stream is capturing"):
        engine.executor.record(Fails(), 64, lambda: 0.0, at_once=True)
    engine.executor.record(Fails(), 64, lambda: 1e6)
    assert [list(c.token_ids) for c in llm.generate(PROMPTS[:1], PARAMS[0])] == expected
    with pytest.raises(ConfigError, match="cuda_graphs=on needs a GPU"):
        load(folder, cuda_graphs="on")


def test_numbers_of_rows() -> None:
    assert buckets(1) == [1]
    assert buckets(6) == [1, 2, 4, 6]
    assert buckets(50) == [1, 2, 4, 8, 16, 32, 48, 50]


def test_fixed_inputs_keep_their_places_and_the_last_step() -> None:
    fields = {"a": Field((3,), torch.int64), "b": Field((2, 2), torch.float32)}
    inputs = FixedInputs(fields, torch.device("cpu"))
    places = {name: view.data_ptr() for name, view in inputs.device.items()}
    for step in range(3):
        arrays = inputs.open()
        arrays["a"][:], arrays["b"][:] = step, step + 0.5
        inputs.send()
        assert inputs.device["a"].tolist() == [step] * 3
        assert inputs.device["b"].flatten().tolist() == [step + 0.5] * 4
    inputs.open()["a"][:] = 9
    assert inputs.device["a"].tolist() == [2] * 3, "a step that is being filled is not seen"
    assert {name: view.data_ptr() for name, view in inputs.device.items()} == places

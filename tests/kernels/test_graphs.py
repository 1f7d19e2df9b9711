"""Recorded decode steps, in Triton's interpreter with a recorder that runs them again: padding, places, tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchrun.config import EngineConfig
from batchrun.engine import graphs, loading
from batchrun.engine.attention import triton as backend_module
from batchrun.engine.attention.triton import TritonAttention
from batchrun.engine.device_memory import DeviceMemory
from batchrun.engine.fixed_inputs import Field, FixedInputs
from batchrun.engine.graphs import DecodeGraphs, GraphShape, buckets, graph_bytes
from batchrun.engine.llm import LLM
from batchrun.engine.params import Request, SamplingParams
from batchrun.engine.recorder import EagerRecorder, Recorded
from batchrun.errors import ConfigError
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
        attend = backend_module.paged_decode

        def noting(q: torch.Tensor, pages: Any, rows: Any, scoring: Any, plan: Any, **keywords: Any) -> torch.Tensor:
            self._seen.append([*map(_place, rows), *map(_place, plan)])
            return attend(q, pages, rows, scoring, plan, **keywords)

        monkeypatch.setattr(backend_module, "paged_decode", noting)

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


def _place(what: Any) -> Any:
    return (what.data_ptr(), what.shape, what.stride()) if isinstance(what, torch.Tensor) else what


def tokens(llm: LLM) -> list[list[int]]:
    return [list(completion.token_ids) for completion in llm.generate(PROMPTS, PARAMS)]


def on_triton(folder: Path, **options: Any) -> LLM:
    """Attends with the kernels, without the check at load, which takes the interpreter long."""
    llm = load(folder, attention="torch", **options)
    engine = engine_of(llm)
    model, pool = engine.model, engine.pool
    model.backend = TritonAttention(model.layers, pool.num_blocks, pool.block_size, model.dtype, model.device)
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


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_their_memory_is_known_before_they_are_recorded(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers to the byte; of the recorded steps what is kept beside one step of the most rows."""
    llm = on_triton(make_model(family, tmp_path, num_hidden_layers=2), max_num_seqs=20, block_size=4)
    engine = engine_of(llm)
    model, capacity = engine.model, engine.scheduler.slots.capacity
    engine.executor.record(EagerRecorder(), engine.max_model_len, engine.scheduler.expected_steps, at_once=True)
    made = engine.executor.graphs
    assert isinstance(model.backend, TritonAttention)
    sms = model.backend.num_sms
    shape = GraphShape(capacity, 4, engine.max_model_len, model.vocab_size, model.dtype, sms)
    buffers, recorded = graph_bytes(TritonAttention, model.layers, shape, 1000)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(made._attention, {})}
    held |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(made._inputs, {})}
    assert buffers == sum(held.values()) + made._every.nbytes
    smaller = [each.outputs for size, each in made._recorded.items() if size != capacity]
    assert len(smaller) == 5
    assert recorded == 1000 + sum(part.nbytes for outputs in smaller for part in outputs)

    config, memory = EngineConfig(block_size=4, max_num_seqs=capacity), DeviceMemory(1, 0, 0, 0, 1000)
    monkeypatch.setattr(loading, "runs_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=sms))
    table = (capacity + 20) * model.vocab_size * 4
    for records, more in ((True, (buffers, recorded)), (False, (0, 0))):
        found = loading.with_fixed(memory, model, TritonAttention, config, engine.max_model_len, records=records)
        assert found == DeviceMemory(1, 0, 0, 0, 1000, table, 0, *more)


def tensors(holder: Any, seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    """Those that buffers of recorded steps hold on the device, pages and host copies aside."""
    for name, value in vars(holder).items():
        parts = list(value.values()) if isinstance(value, dict) else [value]
        for part in parts:
            if isinstance(part, torch.Tensor) and name not in ("_pieces", "_shape"):
                yield part
            elif type(part).__name__ in ("_Work", "FixedInputs") and id(part) not in seen:
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
    assert sorted(recorded._recorded) == [1, 2]


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

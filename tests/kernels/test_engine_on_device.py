"""The engine with the kernels that it uses on a GPU, in the interpreter, against the engine on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from transformers import AutoModelForCausalLM
from triton.runtime.interpreter import GridExecutor

from batchrun import SamplingParams
from batchrun.engine import (
    executor,
    feedback,
    layers,
    layers_device,
    likelihoods,
    logprobs,
    sampler,
    staging,
    token_counts,
)
from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention import triton
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.hook import NAME
from batchrun.engine.layers import fuse_model
from batchrun.engine.layers_device import DeviceLayer
from batchrun.engine.model import PagedModel
from batchrun.engine.params import Completion, Request
from tests.engine.adapters import make_adapter
from tests.engine.families import engine_of, generate, load, make_model, make_optimistic, random_prompt
from tests.engine.test_oracle import load_tight


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, the engine takes the CPU for a device that runs Triton."""

    def switch() -> None:
        for module in (executor, feedback, layers, likelihoods, logprobs, sampler):
            monkeypatch.setattr(module, "runs_triton", lambda device: True)

    return switch


class HostWaits(TorchFunctionMode):
    """Raises for what makes the host wait until a device has done all it was given: numbers read from a tensor, and
    arrays sent from ordinary memory."""

    READING = ("item", "tolist", "__bool__", "__int__", "__index__", "cpu", "nonzero", "is_nonzero")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._arrays: list[torch.Tensor] = []  # held, so that no other lies at their places
        wrap = torch.from_numpy

        def noted(array: np.ndarray) -> torch.Tensor:
            self._arrays.append(wrap(array))
            return self._arrays[-1]

        monkeypatch.setattr(torch, "from_numpy", noted)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = kwargs or {}, getattr(func, "__name__", "")
        assert name not in self.READING, name
        if name == "to" and not given.get("non_blocking"):
            assert args[0].data_ptr() not in {array.data_ptr() for array in self._arrays}, "an array is sent"
        if name in ("tensor", "as_tensor"):
            assert isinstance(args[0], torch.Tensor), name
        return func(*args, **given)


def test_a_step_is_launched_without_waiting_for_the_device(
    tmp_path: Path, on_device: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that rows can ask of their logits, and adapters; what kernels do is left out."""
    folder = make_model("llama", tmp_path / "base", num_hidden_layers=1)
    adapter = make_adapter(tmp_path / "a", folder, 1, ("q_proj",), rank=2)
    on_device()
    llm = load(folder, attention="triton", overlap="on", adapters={"a": str(adapter)})
    asked: list[dict[str, Any]] = [
        {"temperature": 0.9, "top_p": 0.9, "adapter": "a"},
        {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
        {"min_tokens": 3, "logit_bias": {5: 1.0}, "logprobs": 2},
        {"allowed_token_ids": [4, 5, 6]},
    ]
    for key, options in enumerate(asked):
        engine_of(llm).add(Request(key, PROMPTS[key % 3], SamplingParams(max_tokens=4, ignore_eos=True, **options)))
    engine, call = engine_of(llm), GridExecutor.__call__

    def unwatched(*given: Any, **keywords: Any) -> Any:
        with _pop_mode_temporarily():
            return call(*given, **keywords)

    launch = engine.executor.launch

    def watched(*given: Any) -> Any:
        with monkeypatch.context() as patch, HostWaits(patch):
            patch.setattr(GridExecutor, "__call__", unwatched)
            return launch(*given)

    monkeypatch.setattr(engine.executor, "launch", watched)
    finished = []
    while engine.has_work():
        finished += engine.step()
    assert [completion.error for completion in finished] == [None] * 4


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text", "phi3", "mixtral"])
def test_layers_of_the_usual_shape_are_fused(family: str, tmp_path: Path, on_device: Callable[[], None]) -> None:
    folder = make_model(family, tmp_path)
    model = PagedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME))
    prompts = [np.array(random_prompt(i, length), dtype=np.int32) for i, length in enumerate((2, 5))]
    expected = paged_logits(model, TorchAttention, prompts, 16)
    on_device()
    assert fuse_model(model) == len(model.layers)
    assert sum(isinstance(m, DeviceLayer) for m in model.module.modules()) == len(model.layers)
    assert (paged_logits(model, TorchAttention, prompts, 16) - expected).norm() < 1e-4 * expected.norm()


def test_layers_of_another_shape_stay(tmp_path: Path, on_device: Callable[[], None]) -> None:
    folder = make_model("olmo2", tmp_path)
    model = PagedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME))
    on_device()
    assert fuse_model(model) == 0


# Layers of each kind: plain; norms of heads; softcaps, windows and norms after; both; sinks; Dk apart from Dv; experts;
# KV of other layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {},
    "deepseek_v3": {},
    "mixtral": {},
    "gemma4_text": {"num_hidden_layers": 4},
}
MAX_TOKENS = 4
SHARED = random_prompt(0, 9)
PROMPTS = [random_prompt(1, 13), *(SHARED + random_prompt(2 + i, length) for i, length in enumerate((2, 5)))]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_generate(
    family: str, tmp_path: Path, on_device: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers and attention as on a GPU: prompts in pieces, prefix groups, and rows that are preempted."""
    monkeypatch.setattr(triton, "MIN_GROUP_ROWS", 2)
    monkeypatch.setattr(triton, "MIN_SAVED_BLOCKS", 1)
    grouped, written = (Mock(wraps=f) for f in (triton.prefix_group, layers_device.rope_and_cache))
    monkeypatch.setattr(triton, "prefix_group", grouped)
    monkeypatch.setattr(layers_device, "rope_and_cache", written)
    folder = make_model(family, tmp_path, **{"num_hidden_layers": 2, **FAMILIES[family]})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = [generate(reference, prompt, MAX_TOKENS) for prompt in PROMPTS]
    on_device()
    llm = make_optimistic(load_tight(folder, 10, max(map(len, PROMPTS)) + MAX_TOKENS, attention="triton"))
    model = engine_of(llm).model
    steps, sends = Mock(wraps=model.hidden), Mock()
    copy = staging.Buffer.copy

    def counted(buffer: staging.Buffer, size: int) -> None:
        sends()
        copy(buffer, size)

    monkeypatch.setattr(model, "hidden", steps)
    monkeypatch.setattr(staging.Buffer, "copy", counted)
    completions = llm.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    assert [completion.token_ids for completion in completions] == expected
    # One copy a step, and one when layers of a new kind attend first.
    assert steps.call_count < sends.call_count <= steps.call_count + len(model.layers)
    assert engine_of(llm).scheduler.num_preemptions > 0
    assert grouped.called
    fused = any(isinstance(m, DeviceLayer) for m in model.module.modules())
    assert written.called == fused == (family not in ("gpt_oss", "deepseek_v3", "gemma4_text"))


def test_the_engine_generates_the_same_tokens(tmp_path: Path, on_device: Callable[[], None]) -> None:
    folder = make_model("llama", tmp_path)
    prompts = [random_prompt(i, length) for i, length in enumerate((4, 7, 2))]
    params = [
        SamplingParams(temperature=0, max_tokens=4),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=4),
        SamplingParams(temperature=1.5, top_k=20, min_p=0.01, repetition_penalty=1.2, seed=4, max_tokens=4),
    ]
    with load(folder, attention="torch") as llm:
        expected = [list(completion.token_ids) for completion in llm.generate(prompts, params)]
    on_device()
    with load(folder, attention="torch") as llm:
        tokens = [list(completion.token_ids) for completion in llm.generate(prompts, params)]
        assert any(isinstance(m, DeviceLayer) for m in engine_of(llm).model.module.modules())
    assert tokens == expected
    assert [len(ids) for ids in tokens] == [4, 4, 4]


def test_penalties_are_made_of_counts_on_the_device(
    tmp_path: Path, on_device: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were counted run ahead of their tokens, and are counted again only when they were preempted."""
    folder = make_model("llama", tmp_path, num_hidden_layers=1)
    prompts = [random_prompt(i % 3, 5) for i in range(5)]
    params = [
        SamplingParams(max_tokens=8, ignore_eos=True, repetition_penalty=1.4, frequency_penalty=0.3),
        SamplingParams(max_tokens=6, ignore_eos=True, presence_penalty=0.7, temperature=1.0, seed=2),
        SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=8, ignore_eos=True, frequency_penalty=-0.5, logprobs=0, min_tokens=2),
        SamplingParams(max_tokens=3, ignore_eos=True, repetition_penalty=0.8, temperature=0.5, seed=3),
    ]
    options = {"attention": "torch", "fused_layers": False, "max_num_seqs": 4}
    with load(folder, **options) as llm:
        expected = llm.generate(prompts, params)
    on_device()
    counted: list[int] = []
    count = token_counts.count_tokens

    def noting(ids: torch.Tensor, slots: torch.Tensor, *rest: torch.Tensor) -> None:
        counted.append(len(slots))
        count(ids, slots, *rest)

    monkeypatch.setattr(token_counts, "count_tokens", noting)
    monkeypatch.setattr(token_counts, "FILL_ROWS", 2)
    for more in ({}, {"block_size": 4, "num_blocks": 9}):
        with load(folder, overlap="on", **options, **more) as llm:
            engine, ahead = engine_of(make_optimistic(llm) if more else llm), 0
            for i, prompt in enumerate(prompts):
                engine.add(Request(i, prompt, params[i]))
            done: dict[Any, Completion] = {}
            while engine.has_work():
                done |= {completion.key: completion for completion in engine.step()}
                ahead += engine._flying is not None
            assert ahead > 6
            assert (engine.scheduler.num_preemptions > 0) == bool(more)
        assert sum(counted) == 4 if not more else sum(counted) > 4
        counted.clear()
        for i, other in enumerate(expected):
            assert done[i].token_ids == other.token_ids
            mine, theirs = done[i].logprobs, other.logprobs
            assert (mine is None) == (theirs is None) == (params[i].logprobs is None)
            if mine is not None and theirs is not None:
                np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize("top", [0, 3])
def test_given_tokens_are_scored_as_on_the_cpu(top: int, on_device: Callable[[], None]) -> None:
    logits = (4 * torch.randn(6, 1500)).bfloat16()
    places, tokens = np.array([0, 0, 2, 5]), np.array([3, 1499, int(logits[2].float().argmax()), 77])

    def score() -> likelihoods.TokenScores:
        return likelihoods.token_scores(lambda at: logits[torch.from_numpy(at)], places, tokens, logits.device, top)

    expected = score()
    on_device()
    for mine, theirs in zip(score(), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)

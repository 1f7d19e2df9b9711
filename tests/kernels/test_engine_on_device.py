"""The engine with the kernels that it uses on a GPU, in the interpreter, against the engine on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun import SamplingParams
from batchrun.engine import layers, layers_device, sampler, staging
from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention import triton
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.hook import NAME
from batchrun.engine.layers import fuse_model
from batchrun.engine.layers_device import DeviceLayer
from batchrun.engine.model import PagedModel
from tests.engine.families import engine_of, generate, load, make_model, make_optimistic, random_prompt
from tests.engine.test_oracle import load_tight


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, the engine takes the CPU for a device that runs Triton."""

    def switch() -> None:
        for module in (layers, sampler):
            monkeypatch.setattr(module, "runs_triton", lambda device: True)

    return switch


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
    copy = staging._Buffer.copy

    def counted(buffer: staging._Buffer, size: int) -> None:
        sends()
        copy(buffer, size)

    monkeypatch.setattr(model, "hidden", steps)
    monkeypatch.setattr(staging._Buffer, "copy", counted)
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

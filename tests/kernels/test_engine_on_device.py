"""The engine with the kernels that it uses on a GPU, in the interpreter, against the engine on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun import SamplingParams
from batchrun.engine import layers, sampler
from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.hook import NAME
from batchrun.engine.layers import fuse_model
from batchrun.engine.layers_device import DeviceLayer
from batchrun.engine.model import PagedModel
from tests.engine.families import engine_of, load, make_model, random_prompt


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

"""The engine on a GPU that is none: nothing meets what lies on the host, and no step waits for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun import SamplingParams
from batchrun.engine import experts_device
from batchrun.engine.attention import triton
from batchrun.engine.layers_device import DeviceLayer
from batchrun.engine.llm import LLM
from tests.engine.families import engine_of, generate, load, make_model, random_prompt
from tests.kernels.pretended import Device, Graph, pretended

SHARED = random_prompt(0, 9)
PROMPTS = [random_prompt(1, 13), *(SHARED + random_prompt(2 + i, length) for i, length in enumerate((2, 5)))]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
OPTIONS: dict[str, Any] = {"device": "cuda:0", "max_num_seqs": 4, "max_batched_tokens": 16, "cuda_graphs": "off"}


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "MIN_GROUP_ROWS", 2)
    monkeypatch.setattr(triton, "MIN_SAVED_BLOCKS", 1)


def watch_launches(device: Device, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What steps will have waited for while they were launched."""
    executor, waits = engine_of(llm).executor, list[str]()
    launch = executor.launch

    def launching(*given: Any) -> Any:
        before = len(device.waits)
        launched = launch(*given)
        waits.extend(device.waits[before:])
        return launched

    monkeypatch.setattr(executor, "launch", launching)
    return waits


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt2", "deepseek_v3"])
def test_equals_generate(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(family, tmp_path, num_hidden_layers=2)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = [generate(reference, prompt, 4) for prompt in PROMPTS]
    with pretended() as device, load(folder, block_size=4, **OPTIONS) as llm:
        waits = watch_launches(device, llm, monkeypatch)
        fused = any(isinstance(m, DeviceLayer) for m in engine_of(llm).model.module.modules())
        assert fused == (family in ("llama", "gemma2", "qwen3_moe"))
        for _ in range(2):  # the second time from cached prefixes
            assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
    assert waits == []


def test_all_that_rows_ask_of_their_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model("llama", tmp_path, num_hidden_layers=1)
    asked: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 1.5, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 4},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.1},
        {"logprobs": 2, "min_tokens": 2, "logit_bias": {5: 1.0}},
        {"allowed_token_ids": [4, 5, 6], "bad_words": ["w7"]},
    ]
    params = [SamplingParams(max_tokens=4, ignore_eos=True, **options) for options in asked]
    prompts = [random_prompt(i, 4 + i) for i in range(len(asked))]
    with load(folder) as llm:
        expected = [c.token_ids for c in llm.generate(prompts, params)]
    with pretended() as device, load(folder, **OPTIONS) as llm:
        waits = watch_launches(device, llm, monkeypatch)
        assert [c.token_ids for c in llm.generate(prompts, params)] == expected
    assert waits == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_recorded_steps_are_replayed_without_the_host(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that read shared pages come and go, and rows end: nothing of it may be fixed in what was recorded. Experts
    are those of transformers, as in bfloat16 on a Hopper."""
    monkeypatch.setattr(experts_device, "torch_groups", lambda device, dtype: True)
    folder = make_model(family, tmp_path, num_hidden_layers=2)
    prompts = [SHARED + random_prompt(i, 2 + i) for i in range(4)]
    params = [
        SamplingParams(max_tokens=3 + 2 * i, ignore_eos=True, temperature=0.9 * (i % 2), seed=i) for i in range(4)
    ]
    with load(folder) as llm:
        expected = [c.token_ids for c in llm.generate(prompts, params)]
    replayed, replay = list[Graph](), Graph.replay

    def counted(graph: Graph) -> None:
        replayed.append(graph)
        replay(graph)

    monkeypatch.setattr(Graph, "replay", counted)
    with pretended(), load(folder, block_size=4, **{**OPTIONS, "cuda_graphs": "on"}) as llm:
        for _ in range(2):
            assert [c.token_ids for c in llm.generate(prompts, params)] == expected
    assert len(replayed) > 5

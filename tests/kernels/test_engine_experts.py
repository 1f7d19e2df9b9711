"""A model with experts, with the kernels that it uses on a GPU, in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchrun import SamplingParams
from batchrun.engine import layers
from batchrun.engine.experts_device import GroupedExperts, torch_groups
from tests.engine.families import build_model, engine_of, load, make_model, random_prompt


def test_generates_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model("qwen3_moe", tmp_path)
    prompts = [random_prompt(i, length) for i, length in enumerate((6, 9))]
    params = SamplingParams(temperature=0, max_tokens=3)
    with load(folder, attention="torch", fused_layers=False) as llm:
        expected = [completion.token_ids for completion in llm.generate(prompts, params)]
    monkeypatch.setattr(layers, "runs_triton", lambda device: True)
    with load(folder, attention="torch") as llm:
        assert [completion.token_ids for completion in llm.generate(prompts, params)] == expected
        modules = list(engine_of(llm).model.module.modules())
    assert sum(isinstance(module, GroupedExperts) for module in modules) == 3


@torch.inference_mode()
def test_a_choice_of_no_expert_adds_nothing() -> None:
    original = build_model("qwen3_moe").model.layers[0].mlp.experts
    original.config._experts_implementation = "eager"
    x, index, weights = torch.randn(7, 32), torch.randint(0, 5, (7, 2)), torch.rand(7, 2)
    torch.testing.assert_close(GroupedExperts(original)(x, index, weights), original(x, index, weights))


def test_torch_has_its_own_product_in_bfloat16_on_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    cuda = torch.device("cuda")
    for major, has in ((8, False), (9, True), (10, True), (12, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        assert torch_groups(cuda, torch.bfloat16) == has
        assert not torch_groups(cuda, torch.float16)
    assert not torch_groups(torch.device("cpu"), torch.bfloat16)

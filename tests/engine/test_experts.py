"""Packed experts: which families get them, that they compute what the originals did, and when they stay away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.experts import Experts, pack_experts
from batchrun.engine.layers import FusedLayer, fuse_model
from tests.engine.families import build_model
from tests.engine.test_layers import PROMPTS, load

# family: (fused layers, layers with packed experts) of three; in some the first layers have none
FUSED = {
    "mixtral": (3, 3),
    "qwen2_moe": (3, 3),
    "qwen3_moe": (3, 3),
    "granitemoe": (3, 3),
    "glm4_moe": (3, 2),
    "dots1": (3, 3),
    "olmoe": (0, 3),
    "deepseek_v3": (0, 2),
    "gpt_oss": (0, 0),
}


@pytest.mark.parametrize("family", FUSED)
def test_families_with_experts(family: str, family_folder: Callable[[str], Path]) -> None:
    model = load(family_folder(family))
    expected = paged_logits(model, TorchAttention, PROMPTS, 16)
    fuse_model(model)
    modules = list(model.module.modules())
    assert tuple(sum(isinstance(m, kind) for m in modules) for kind in (FusedLayer, Experts)) == FUSED[family]
    logits = paged_logits(model, TorchAttention, PROMPTS, 16)
    assert (logits - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_sums_over_any_choice(dtype: torch.dtype) -> None:
    original = build_model("qwen3_moe").model.layers[0].mlp.experts
    original.config._experts_implementation = "eager"
    x = torch.randn(50, 32)
    for index in (
        torch.randint(0, 4, (50, 3)),
        torch.full((50, 1), 2),  # the others have no token
        torch.randint(0, 5, (50, 2)),  # 4 is no expert
    ):
        weights = torch.rand(index.shape)
        # Not every release of transformers takes an index past the last expert.
        expected = original.float()(x, index.clamp(max=3), weights.masked_fill(index > 3, 0))
        computed = Experts(original.to(dtype))(x.to(dtype), index, weights.to(dtype))
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.005}[dtype]
        assert (computed.float() - expected).norm() < tolerance * expected.norm()


def test_experts_with_the_parts_but_other_numbers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("mixtral")
    kind = type(model.model.layers[1].mlp.experts)
    original = kind.forward
    changed = model.model.layers[1].mlp.experts
    monkeypatch.setattr(
        kind, "forward", lambda self, *given: original(self, *given) * (1.01 if self is changed else 1.0)
    )
    assert pack_experts(model) == 2
    assert model.model.layers[1].mlp.experts is changed

"""Fused decoder layers: which families get them, and that they compute what the original did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.engine import layers
from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.hook import NAME
from batchrun.engine.layers import FusedLayer, fuse_model
from batchrun.engine.linear import PackedHead, PackedLinear
from batchrun.engine.mlp import GatedMLP, OriginalMLP
from batchrun.engine.model import PagedModel
from tests.engine.families import random_prompt

PROMPTS = [np.array(random_prompt(i, length), dtype=np.int32) for i, length in enumerate((5, 40, 23))]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PagedModel:
    return PagedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral"])
def test_layers_of_the_usual_shape_are_fused(family: str, family_folder: Callable[[str], Path]) -> None:
    model = load(family_folder(family))
    expected = paged_logits(model, TorchAttention, PROMPTS, 16)
    assert fuse_model(model) == len(model.layers)
    assert sum(isinstance(m, FusedLayer) for m in model.module.modules()) == len(model.layers)
    assert isinstance(model.module.lm_head, PackedHead)
    logits = paged_logits(model, TorchAttention, PROMPTS, 16)
    assert (logits - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("family", ["gpt_oss", "gpt_neox", "cohere", "olmo2", "gemma4_text", "deepseek_v3"])
def test_layers_of_another_shape_stay(family: str, family_folder: Callable[[str], Path]) -> None:
    model = load(family_folder(family))
    assert fuse_model(model) == 0
    assert not any(isinstance(m, FusedLayer) for m in model.module.modules())


def change_norm(layer: Any) -> None:
    layer.input_layernorm.forward = lambda x: x * 1.01


def change_residual(layer: Any) -> None:
    original = layer.forward
    layer.forward = lambda *arguments, **keywords: original(*arguments, **keywords) * 1.001


def change_rotation(layer: Any) -> None:
    original = layer.self_attn.forward

    def forward(*arguments: Any, position_embeddings: Any, **keywords: Any) -> Any:
        cos, sin = position_embeddings
        return original(*arguments, position_embeddings=(cos, -sin), **keywords)

    layer.self_attn.forward = forward


@pytest.mark.parametrize("change", [change_norm, change_residual, change_rotation])
def test_a_layer_with_the_parts_but_other_numbers_stays(
    change: Callable[[Any], None], family_folder: Callable[[str], Path]
) -> None:
    model = load(family_folder("llama"))
    change(model.module.model.layers[1])
    expected = paged_logits(model, TorchAttention, PROMPTS, 16)
    assert fuse_model(model) == len(model.layers) - 1
    assert not isinstance(model.module.model.layers[1], FusedLayer)
    assert (paged_logits(model, TorchAttention, PROMPTS, 16) - expected).norm() < 1e-4 * expected.norm()


def test_an_mlp_with_the_parts_but_other_numbers_is_kept_inside(family_folder: Callable[[str], Path]) -> None:
    model = load(family_folder("llama"))
    mlp = model.module.model.layers[1].mlp
    original = mlp.forward
    mlp.forward = lambda x: original(x) * 1.01
    expected = paged_logits(model, TorchAttention, PROMPTS, 16)
    assert fuse_model(model) == len(model.layers)
    kinds = [type(layer.mlp) for layer in model.module.model.layers]
    assert kinds == [GatedMLP, OriginalMLP, GatedMLP]
    assert (paged_logits(model, TorchAttention, PROMPTS, 16) - expected).norm() < 1e-4 * expected.norm()


def test_rows_beyond_one_chunk_are_computed_alike(
    family_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(family_folder("qwen3"))
    fuse_model(model)
    whole = paged_logits(model, TorchAttention, PROMPTS, 40)
    monkeypatch.setattr(layers, "ROWS", 8)
    monkeypatch.setattr(GatedMLP, "rows", 8)
    assert (paged_logits(model, TorchAttention, PROMPTS, 40) - whole).norm() < 1e-5 * whole.norm()


def test_the_real_model_is_fused_in_bfloat16(smollm2: Path) -> None:
    model = load(smollm2, torch.bfloat16)
    expected = paged_logits(model, TorchAttention, PROMPTS, 40)
    assert fuse_model(model) == 30
    logits = paged_logits(model, TorchAttention, PROMPTS, 40)
    assert (logits - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)], ids=str)
def test_packed_products_are_the_linears_side_by_side(dtype: torch.dtype, biases: tuple[bool, ...]) -> None:
    linears = [torch.nn.Linear(24, size, bias=bias, dtype=dtype) for size, bias in zip((10, 6), biases, strict=True)]
    x, add = torch.randn(300, 24).to(dtype), torch.randn(300, 16).to(dtype)
    with torch.inference_mode():
        packed = PackedLinear(linears)
        exact = torch.cat([
            x.double() @ y.weight.double().T + (0 if y.bias is None else y.bias.double()) for y in linears
        ], dim=1)  # fmt: skip
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(packed(x).double(), exact, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(packed(x, add).double(), exact + add.double(), rtol=tolerance, atol=2 * tolerance)
        head = PackedHead(linears)
        assert head(x[:0]).shape == (0, 16)  # of a step in which no row ends its prompt
        assert packed(x[:0], add[:0]).shape == (0, 16)
        torch.testing.assert_close(head(x[None]).double(), exact[None], rtol=tolerance, atol=tolerance)

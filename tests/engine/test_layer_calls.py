"""Which models are computed in bfloat16 on a CPU without instructions for it: those whose layers will be compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchrun.config import EngineConfig, ModelConfig
from batchrun.engine import layer_calls
from batchrun.engine import model as model_module
from batchrun.engine.attention.cpu import CpuAttention
from batchrun.engine.checkpoint import Checkpoint, open_checkpoint
from batchrun.engine.compiled import can_compile
from batchrun.engine.hook import NAME
from batchrun.engine.layer_calls import FAMILIES, shape_allows
from batchrun.engine.layers import fuse_model
from batchrun.engine.model import PagedModel, choose_dtype
from batchrun_kernels.cpu.product import has_bfloat16_products
from tests.engine.families import VOCABULARY, build_model, make_model

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "vocab_size": VOCABULARY}


def stored_in_bfloat16(folder: Path, family: str = "llama", **shape: Any) -> Checkpoint:
    checkpoint = open_checkpoint(ModelConfig(str(make_model(family, folder, **shape)), device="cpu"))
    checkpoint.config.dtype = torch.bfloat16
    return checkpoint


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with products of bfloat16 of ours, and none of the library's."""
    monkeypatch.setattr(model_module, "_cpu_has_bfloat16", lambda: False)
    monkeypatch.setattr(layer_calls, "has_bfloat16_products", lambda: True)


@pytest.mark.skipif(not has_bfloat16_products(), reason="this processor has neither AVX512 nor AVX2")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layers_of_these_families_are_compiled(family: str) -> None:
    model = PagedModel(build_model(family, NAME, **WIDE).to(torch.bfloat16))
    assert shape_allows(model.module.config.get_text_config(decoder=True))
    fuse_model(model)
    assert can_compile(model, CpuAttention, torch.bfloat16)


def test_compiled_layers_are_in_bfloat16_and_others_in_float32(tmp_path: Path, avx2: None) -> None:
    auto = EngineConfig()
    wide = stored_in_bfloat16(tmp_path / "wide", **WIDE)
    assert choose_dtype("auto", wide, CPU, auto) == torch.bfloat16
    for change in ({"kv_cache_dtype": "int8"}, {"fused_layers": False}, {"attention": "torch"}):
        assert choose_dtype("auto", wide, CPU, replace(auto, **change)) == torch.float32
    assert choose_dtype("auto", wide, CPU, replace(auto, batch_invariant=True)) == torch.float32
    assert choose_dtype("auto", wide, CPU, auto, encodes=True) == torch.float32
    for size in ("intermediate_size", "vocab_size"):
        padded = stored_in_bfloat16(tmp_path / size, **{**WIDE, size: 264})
        assert choose_dtype("auto", padded, CPU, auto) == torch.float32
    unknown = stored_in_bfloat16(tmp_path / "olmo2", "olmo2", **WIDE)
    assert choose_dtype("auto", unknown, CPU, auto) == torch.float32
    assert choose_dtype("bfloat16", unknown, CPU, auto) == torch.bfloat16


def test_without_any_vectors_for_it_all_are_in_float32(
    tmp_path: Path, avx2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = stored_in_bfloat16(tmp_path / "wide", **WIDE)
    monkeypatch.setattr(layer_calls, "has_bfloat16_products", lambda: False)
    assert choose_dtype("auto", wide, CPU, EngineConfig()) == torch.float32

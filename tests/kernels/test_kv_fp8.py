"""`engine.kv_cache_dtype=fp8`: what rounding K and V costs, that nothing else changes, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.engine import layers
from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention import registry
from batchrun.engine.attention import triton as backend_module
from batchrun.engine.attention.base import LayerGeometry
from batchrun.engine.attention.cpu import CpuAttention
from batchrun.engine.attention.registry import cache_backend
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.attention.triton import Fp8Attention, TritonAttention
from batchrun.engine.hook import NAME
from batchrun.engine.memory import KvShape
from batchrun.engine.model import PagedModel
from batchrun.engine.params import SamplingParams
from batchrun.errors import ConfigError
from batchrun_kernels.paged import FP8
from tests.engine.families import engine_of, load, make_model, random_prompt

CPU = torch.device("cpu")
SHARED = random_prompt(0, 12)
PROMPTS = [random_prompt(1, 22), *(SHARED + random_prompt(i, 3) for i in (2, 3))]


class RoundedAttention(TorchAttention):
    """K and V as fp8 pages give them back."""

    def attend(self, call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(call, q, *(x.clamp(-448, 448).to(FP8).to(x.dtype) for x in (k, v)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Softcaps, and windows beside full attention."""
    return make_model("gemma2", tmp_path_factory.mktemp("gemma2"), num_hidden_layers=2)


def test_logits_are_near_those_of_full_pages(folder: Path) -> None:
    model = PagedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME))
    prompts = [np.array(prompt, dtype=np.int32) for prompt in PROMPTS]
    exact, rounded, found = (
        paged_logits(model, backend, prompts, 12) for backend in (TorchAttention, RoundedAttention, Fp8Attention)
    )
    assert (found - rounded).norm() < 1e-4 * exact.norm()
    assert 1e-3 * exact.norm() < (found - exact).norm() < 0.1 * exact.norm()


def test_generates_what_torch_does_with_rounded_keys_and_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces, cached prefixes and prefix groups, and layers that write their KV themselves."""
    monkeypatch.setattr(layers, "runs_triton", lambda device: True)
    monkeypatch.setattr(backend_module, "MIN_GROUP_ROWS", 2)
    monkeypatch.setattr(backend_module, "MIN_SAVED_BLOCKS", 1)
    options = {"block_size": 4, "max_batched_tokens": 16}
    ours = load(folder, attention="triton", kv_cache_dtype="fp8", **options)
    backend = engine_of(ours).model.backend
    assert isinstance(backend, Fp8Attention)
    assert {page.dtype for pages in backend.pages for page in pages[:2]} == {FP8}
    reference = load(folder, attention="torch", **options)
    engine = engine_of(reference)
    engine.model.backend = RoundedAttention(engine.model.layers, engine.pool.num_blocks, 4, torch.float32, CPU)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    found, expected = ([each.token_ids for each in llm.generate(PROMPTS, params)] for llm in (ours, reference))
    assert found == expected


def test_the_same_memory_holds_twice_the_tokens() -> None:
    layer = LayerGeometry(8, 128, 64)
    assert layer.bytes_per_token(torch.bfloat16) == 2 * layer.bytes_per_token(FP8) == 8 * (128 + 64) * 2
    assert "x 1 byte" in KvShape((layer,), FP8).formula()


def test_is_refused_where_no_kernel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_backend(TritonAttention, "fp8", CPU) is Fp8Attention
    for backend in (TorchAttention, CpuAttention):
        with pytest.raises(ConfigError, match=r"engine\.attention=triton only, and attention is by (cpu|torch): set"):
            cache_backend(backend, "fp8", CPU)
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_dtype=int8 .*engine\.attention=cpu"):
        cache_backend(TritonAttention, "int8", CPU)
    monkeypatch.setattr(registry, "stores_fp8", lambda device: False)
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or later, which cuda is not"):
        cache_backend(TritonAttention, "fp8", torch.device("cuda"))

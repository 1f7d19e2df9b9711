"""Layers as compiled calls: which models get them, and that they compute what the layers they stand for do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention import cpu
from batchrun.engine.attention.cpu import CpuAttention, Int8Attention
from batchrun.engine.compiled import can_compile, compile_layers
from batchrun.engine.hook import NAME
from batchrun.engine.layers import decoder_layers, fuse_model
from batchrun.engine.llm import LLM
from batchrun.engine.model import PagedModel
from batchrun.engine.params import SamplingParams
from batchrun_kernels.cpu.product import has_bfloat16_products
from tests.engine.families import VOCABULARY, build_model, make_model, random_prompt

pytestmark = pytest.mark.skipif(not has_bfloat16_products(), reason="this processor has neither AVX512 nor AVX2")

# Sizes without padding in the packed layout, so that our kernels can read them.
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "vocab_size": VOCABULARY}
PROMPTS = [np.array(random_prompt(i, length), dtype=np.int32) for i, length in enumerate((64, 61, 33))]


def wide_model(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> PagedModel:
    return PagedModel(build_model(family, NAME, **{**WIDE, **changes}).to(dtype))


def compiled_backend(model: PagedModel, threads: int) -> type[CpuAttention]:
    """Pages over which the model's layers are compiled as soon as they are there."""

    class Compiled(CpuAttention):
        def __init__(self, *shape: Any) -> None:
            super().__init__(*shape)
            compile_layers(model, self, threads)

    return Compiled


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3"])
@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_layers_equal_fused_ones(family: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases, norms of the heads, four norms in a layer, windows, softcap and layers without RoPE among them.

    One thread takes rows apart, in a step of 113 tokens, and three divide the outputs of each product.
    """
    monkeypatch.setattr(cpu, "TEAM_PAIRS", 1)
    model = wide_model(family)
    fuse_model(model)
    expected = paged_logits(model, CpuAttention, PROMPTS, 40)
    assert can_compile(model, CpuAttention, torch.bfloat16)
    logits = paged_logits(model, compiled_backend(model, threads), PROMPTS, 40)
    assert all(layer.compiled is not None for layer in decoder_layers(model.module))
    assert (logits - expected).norm() < 0.02 * expected.norm()


def test_the_number_of_threads_changes_nothing() -> None:
    model = wide_model("llama")
    fuse_model(model)
    one, four = (paged_logits(model, compiled_backend(model, n), PROMPTS, 40) for n in (1, 4))
    assert torch.equal(one, four)


def test_other_models_are_left_alone() -> None:
    model = wide_model("llama")
    assert not can_compile(model, CpuAttention, torch.bfloat16), "its layers are not fused"
    fuse_model(model)
    assert not can_compile(model, Int8Attention, torch.bfloat16)
    exact = wide_model("llama", torch.float32)
    fuse_model(exact)
    assert not can_compile(exact, CpuAttention, torch.float32)
    padded = wide_model("llama", intermediate_size=72)
    fuse_model(padded)
    assert not can_compile(padded, CpuAttention, torch.bfloat16)
    uneven = wide_model("gemma4_text", global_head_dim=64)
    fuse_model(uneven)
    assert not can_compile(uneven, CpuAttention, torch.bfloat16)


def test_an_engine_of_compiled_layers_generates_the_same_with_any_threads(tmp_path: Path) -> None:
    """Prefix groups, chunked prompts and preemption included; torch is left with one thread."""
    folder = make_model("llama", tmp_path / "model", **WIDE)
    shared = random_prompt(9, 40)
    prompts = [shared + random_prompt(i, 3 + 5 * i) for i in range(8)]
    texts = []
    for threads, batched in ((1, 512), (3, 24)):
        options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "block_size": 32, "num_blocks": 24}
        with LLM(str(folder), offline=True, num_threads=threads, max_batched_tokens=batched, **options) as llm:
            assert torch.get_num_threads() == 1
            completions = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
            texts.append([completion.token_ids for completion in completions])
    assert texts[0] == texts[1]

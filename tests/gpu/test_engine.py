"""The engine on a GPU: what it says, and how it keeps to its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchrun.config import EngineConfig
from batchrun.engine import host_pages
from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention import triton
from batchrun.engine.attention.triton import TritonAttention
from batchrun.engine.experts_device import GroupedExperts
from batchrun.engine.host_pages import make_swap
from batchrun.engine.layers_device import DeviceLayer
from batchrun.engine.llm import LLM
from batchrun.engine.params import SamplingParams
from tests.engine.families import FAMILIES, HARD_FAMILIES, assert_idle, engine_of, load, make_optimistic, random_prompt
from tests.engine.test_invariance import said
from tests.engine.test_oracle import LONGEST, MAX_TOKENS, PROMPTS, Reference, load_tight, token_ids

CUDA = torch.device("cuda")
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SAMPLED = [
    SamplingParams(temperature=(0.0, 0.7, 1.3)[i % 3], top_p=0.95, seed=i, max_tokens=MAX_TOKENS)
    for i in range(len(PROMPTS))
]


def on_gpu(folder: Path, **options: Any) -> LLM:
    return load(folder, **{"device": "cuda", **options})


@pytest.mark.parametrize("family", [*FAMILIES, *HARD_FAMILIES])
def test_equals_generate(family: str, family_folder: Callable[[str], Path], reference: Reference) -> None:
    with on_gpu(family_folder(family)) as llm:
        for _ in range(2):  # the second time from cached prefixes
            assert token_ids(llm.generate(PROMPTS, GREEDY)) == reference(family)
        assert_idle(engine_of(llm))


def test_tf32_is_near_float32_and_not_it(family_folder: Callable[[str], Path]) -> None:
    ids = np.array(PROMPTS[0], dtype=np.int32)
    logits = {}
    for dtype in ("float32", "tf32"):
        with on_gpu(family_folder("llama"), dtype=dtype) as llm:
            model = engine_of(llm).model
            assert model.dtype == torch.float32
            logits[dtype] = paged_logits(model, TritonAttention, [ids], 64)
    difference = (logits["tf32"] - logits["float32"]).norm() / logits["float32"].norm()
    assert 1e-5 < difference < 0.05


@pytest.mark.parametrize("attention", ["triton", "torch"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_equals_generate_when_preempted(
    family: str, attention: str, family_folder: Callable[[str], Path], reference: Reference
) -> None:
    llm = make_optimistic(load_tight(family_folder(family), 12, LONGEST, device="cuda", attention=attention))
    assert token_ids(llm.generate(PROMPTS, GREEDY)) == reference(family)
    assert engine_of(llm).scheduler.num_preemptions > 0
    assert_idle(engine_of(llm))


def test_equals_generate_with_kv_in_host_memory(
    family_folder: Callable[[str], Path], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pages, "swap_pays", lambda *given: True)
    llm = make_optimistic(load_tight(family_folder("llama"), 12, LONGEST, device="cuda"))
    engine = engine_of(llm)
    engine.scheduler.swap = swap = make_swap(0.01, engine.model, engine.pool)
    assert token_ids(llm.generate(PROMPTS, GREEDY)) == reference("llama")
    assert swap is not None
    assert swap.num_restored > 0
    assert_idle(engine)


@pytest.mark.parametrize("option", ["overlap", "cuda_graphs"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_says_the_same_with_it_on_and_off(
    option: str, family: str, family_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that share pages read them together, however few they are."""
    monkeypatch.setattr(triton, "MIN_GROUP_ROWS", 2)
    monkeypatch.setattr(triton, "MIN_SAVED_BLOCKS", 1)
    if option not in {field.name for field in fields(EngineConfig)}:
        pytest.skip(f"there is no engine.{option}")
    said = []
    for value in ("on", "off"):
        with on_gpu(family_folder(family), **{option: value}) as llm:
            said.append(token_ids(llm.generate(PROMPTS, SAMPLED)))
            assert_idle(engine_of(llm))
    assert said[0] == said[1]


def test_a_row_says_the_same_alone_and_among_others(family_folder: Callable[[str], Path]) -> None:
    with on_gpu(family_folder("qwen3"), prefix_caching=False) as llm:
        together = token_ids(llm.generate(PROMPTS, SAMPLED))
        alone = [token_ids(llm.generate([p], s))[0] for p, s in zip(PROMPTS, SAMPLED, strict=True)]
    assert together == alone


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "tf32"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe", "gpt2"])
def test_batch_invariance_to_the_bit(family: str, dtype: str, family_folder: Callable[[str], Path]) -> None:
    """Alone; together, with steps recorded or not; in another order, in pieces, and preempted."""
    folder, params = family_folder(family), [replace(one, logprobs=3) for one in SAMPLED]
    options: dict[str, Any] = {"dtype": dtype, "batch_invariant": True}
    with on_gpu(folder, prefix_caching=False, **options) as llm:
        alone = [said(llm.generate([p], one)[0]) for p, one in zip(PROMPTS, params, strict=True)]
    for graphs in ("on", "off"):
        with on_gpu(folder, cuda_graphs=graphs, **options) as llm:
            assert [said(completion) for completion in llm.generate(PROMPTS, params)] == alone
    llm = make_optimistic(load_tight(folder, 12, LONGEST, device="cuda", **options))
    assert [said(completion) for completion in llm.generate(PROMPTS[::-1], params[::-1])] == alone[::-1]
    assert engine_of(llm).scheduler.num_preemptions > 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_layers_are_fused_and_experts_grouped(dtype: str, family_folder: Callable[[str], Path]) -> None:
    """Both are refused at load unless they give the original's numbers."""
    with on_gpu(family_folder("qwen3_moe"), dtype=dtype) as llm:
        modules = list(engine_of(llm).model.module.modules())
        assert sum(isinstance(module, DeviceLayer) for module in modules) == 3
        own = dtype == "bfloat16" and torch.cuda.get_device_capability()[0] in (9, 10) and torch.version.hip is None
        assert sum(isinstance(module, GroupedExperts) for module in modules) == (0 if own else 3)
        assert all(completion.error is None for completion in llm.generate(PROMPTS, GREEDY))


def test_stays_within_its_share_of_the_memory(family_folder: Callable[[str], Path]) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    share, total = 0.5, torch.cuda.mem_get_info()[1]
    options: dict[str, Any] = {"num_blocks": None, "gpu_memory_utilization": share, "max_num_seqs": 4096}
    with on_gpu(family_folder("llama"), **options) as llm:
        prompts = [random_prompt(i, 100) for i in range(200)]
        assert all(completion.error is None for completion in llm.generate(prompts, GREEDY))
    assert torch.cuda.max_memory_allocated() <= share * total


def test_a_step_that_runs_out_of_memory_is_made_smaller(
    family_folder: Callable[[str], Path], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    with on_gpu(family_folder("llama"), prefix_caching=False) as llm:
        engine = engine_of(llm)
        hidden = engine.model.hidden

        def limited(batch: Any) -> torch.Tensor:
            sizes.append(batch.num_tokens)
            if batch.num_tokens > 100:
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")  # a petabyte
            return hidden(batch)

        monkeypatch.setattr(engine.model, "hidden", limited)
        assert token_ids(llm.generate(PROMPTS, GREEDY)) == reference("llama")
        engine.check_integrity()
    assert sizes[0] > 100 >= sizes[-1]

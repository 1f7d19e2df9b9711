"""`engine.attention=flash_attn` and `flashinfer`, with stand-ins of the packages that have their documented signatures,
check what they are given and compute in torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.engine.attention.base import LayerCall, LayerGeometry
from batchrun.engine.attention.flash_attn import FlashAttention2, FlashAttention3
from batchrun.engine.attention.flashinfer import FlashInferAttention
from batchrun.engine.attention.registry import attention_backend
from batchrun.engine.params import SamplingParams
from batchrun.errors import ConfigError
from batchrun_kernels.paged import KvPages, Rows, Scoring, paged_attention_torch
from tests.engine.families import engine_of, generate, load, make_model, random_prompt

CPU = torch.device("cpu")
SHARED = random_prompt(0, 9)
PROMPTS = [random_prompt(1, 17), *(SHARED + random_prompt(2 + i, length) for i, length in enumerate((2, 5)))]
MAX_TOKENS = 4


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows, scale: float, left: int, softcap: float
) -> torch.Tensor:
    assert q.is_contiguous()
    assert len(q) == rows.query_lens.sum()
    for array in rows[:4]:
        assert array is not None
        assert array.dtype == torch.int32
    assert rows.block_tables.min() >= 0
    window = left + 1 if left >= 0 else None
    return paged_attention_torch(q, KvPages(keys, values), rows, Scoring(scale, window, softcap or None))[0]


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    assert causal
    assert k.shape[1] % 256 == 0
    assert window_size[1] == (0 if window_size[0] >= 0 else -1)
    counts, lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert (max_seqlen_q, max_seqlen_k) == (counts.max(), lens.max())
    rows = Rows(block_table, lens, cu_seqlens_q[:-1], counts)
    return attend(q, k, v, rows, softmax_scale, window_size[0], softcap)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    assert causal
    counts = cu_seqlens_q.diff()
    assert max_seqlen_q == counts.max()
    rows = Rows(page_table, cache_seqlens, cu_seqlens_q[:-1], counts)
    return attend(q, k_cache, v_cache, rows, softmax_scale, window_size[0], softcap)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        assert causal
        self.plan_rows(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type
        self.scoring = sm_scale, window_left, logits_soft_cap or 0.0

    def plan_rows(self, starts, page_starts, indices, last, size):
        counts = page_starts.diff()
        assert len(indices) == page_starts[-1]
        assert (last >= 1).all()
        assert (last <= size).all()
        tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, (start, stop) in enumerate(pairwise(page_starts.tolist())):
            tables[row, : stop - start] = indices[start:stop]
        lens = ((counts - 1) * size + last).int()
        self.rows = Rows(tables, lens, starts[:-1], starts.diff())

    def run(self, q, paged_kv_cache):
        keys, values = paged_kv_cache
        assert (q.shape[1], *keys.shape[2:], keys.shape[1], q.dtype) == self.shape
        return attend(q, keys, values, self.rows, *self.scoring)


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
        super().__init__(float_workspace_buffer, kv_layout)
        assert use_tensor_cores

    def plan(  # type: ignore[override]
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
        sm_scale=None,
    ):  # fmt: skip
        self.plan_rows(torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len, page_size)
        self.shape = num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type
        self.scoring = sm_scale, window_left, logits_soft_cap or 0.0


STAND_INS: dict[str, tuple[Any, ...]] = {
    "flash_attn": (flash_attn_varlen_func,),
    "flash_attn_interface": (flash_attn_with_kvcache,),
    "flashinfer": (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper),
}
BACKENDS = {"flash_attn": FlashAttention2, "flash_attn_interface": FlashAttention3, "flashinfer": FlashInferAttention}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a package importable, and take the sizes and the type of tiny models, which it would not."""

    def put(name: str) -> None:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for member in STAND_INS[name]:
            setattr(module, member.__name__, member)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(BACKENDS[name], "dtypes", (torch.float32,))
        monkeypatch.setattr(BACKENDS[name], "head_dims", (8,))

    return put


@pytest.mark.parametrize("package", STAND_INS)
def test_equals_generate(package: str, install: Callable[[str], None], tmp_path: Path) -> None:
    """Softcaps, and windows that give pages back; prompts in pieces beside rows that decode."""
    install(package)
    folder = make_model("gemma2", tmp_path, num_hidden_layers=2)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = [generate(reference, prompt, MAX_TOKENS) for prompt in PROMPTS]
    size = 256 if package == "flash_attn" else 4
    attention = "flashinfer" if package == "flashinfer" else "flash_attn"
    llm = load(folder, attention=attention, block_size=size, num_blocks=4096 // size, max_batched_tokens=10)
    assert type(engine_of(llm).model.backend) is BACKENDS[package]
    completions = llm.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    assert [completion.token_ids for completion in completions] == expected


def test_is_refused_where_it_is_not_installed_or_takes_something_else(
    install: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, package in (("flash_attn", "flash-attn"), ("flashinfer", "flashinfer-python")):
        with pytest.raises(ConfigError, match=f"not installed: pip install {package}.*engine.attention=auto"):
            attention_backend(name, torch.device("cuda"))
    with pytest.raises(ConfigError, match="float16 or bfloat16, not in float32"):
        FlashAttention2([LayerGeometry(1, 64, 64)], 2, 256, torch.float32, CPU)
    with pytest.raises(ConfigError, match="a multiple of 8 up to 256 dimensions, not keys of 192 and values of 128"):
        FlashAttention2([LayerGeometry(1, 192, 128)], 2, 256, torch.bfloat16, CPU)
    with pytest.raises(ConfigError, match="heads of 64, 128, 256 dimensions, not keys of 80"):
        FlashInferAttention([LayerGeometry(1, 80, 80)], 2, 64, torch.bfloat16, CPU)
    backend = FlashAttention2([LayerGeometry(1, 64, 64)], 2, 256, torch.bfloat16, CPU)
    with pytest.raises(ConfigError, match="no sinks, and this model has"):
        backend.attend_written(LayerCall(0, 1.0, sinks=torch.zeros(1)), torch.zeros(1, 1, 64))
    install("flash_attn")
    folder = make_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.block_size=64 is not a multiple of 256.*engine\.block_size=256"):
        load(folder, attention="flash_attn", block_size=64)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8 is there for engine\.attention=triton only"):
        load(folder, attention="flash_attn", block_size=256, kv_cache_dtype="fp8")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match=r"flash_attn needs a GPU, and model\.device is cpu"):
        attention_backend("flash_attn", CPU)

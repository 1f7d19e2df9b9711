"""`engine.kv_cache_dtype=int8`: twice the tokens in the same memory, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from batchrun.engine.attention.cpu import CpuAttention, Int8Attention
from batchrun.engine.attention.registry import cache_backend
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.memory import KvShape
from batchrun.engine.params import SamplingParams
from batchrun.errors import ConfigError
from tests.engine.families import assert_idle, engine_of, load, random_prompt


def test_the_cpu_backend_alone_has_it() -> None:
    cpu = torch.device("cpu")
    assert cache_backend(TorchAttention, "auto", cpu) is TorchAttention
    assert cache_backend(CpuAttention, "int8", cpu) is Int8Attention
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_dtype=int8 .*engine\.attention=cpu"):
        cache_backend(TorchAttention, "int8", cpu)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_do_not_depend_on_chunks_or_cached_prefixes(dtype: str, family_folder: Callable[[str], Path]) -> None:
    """What was rounded when it was written is read alike by all that come after."""
    llm = load(family_folder("llama"), dtype=dtype, kv_cache_dtype="int8", max_batched_tokens=24)
    shared = random_prompt(0, 50)
    prompts = [shared + random_prompt(i, 7) for i in range(1, 7)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    assert isinstance(engine_of(llm).model.backend, Int8Attention)
    first = llm.generate(prompts, params)
    again = llm.generate(prompts, params)
    assert all(completion.cached_tokens >= 48 for completion in again)
    assert_idle(engine_of(llm))
    if dtype == "float32":
        assert [c.token_ids for c in first] == [c.token_ids for c in again]
    else:  # rounding between the parts differs with the chunk
        assert sum(a.token_ids == b.token_ids for a, b in zip(first, again, strict=True)) >= 4


def test_the_same_memory_holds_almost_twice_the_tokens(family_folder: Callable[[str], Path]) -> None:
    sizes = {
        kind: engine_of(
            load(family_folder("llama"), dtype="bfloat16", num_blocks=None, kv_cache_gib=1e-4, kv_cache_dtype=kind)
        ).pool.num_blocks
        for kind in ("auto", "int8")
    }
    # Heads of 8: 2 x 8 x 2 bytes against 2 x (8 + 4). With heads of 64 it is 1.9 times as many.
    assert sizes["int8"] / sizes["auto"] == pytest.approx(32 / 24, abs=0.05)
    config = AutoConfig.for_model(
        "llama", hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64
    )
    assert KvShape.of(config, torch.bfloat16).bytes_per_token == 23_040
    shape = KvShape.of(config, torch.int8)
    assert shape.bytes_per_token == 12_240
    assert "x 1 byte + 90 scales x 4 bytes" in shape.formula()

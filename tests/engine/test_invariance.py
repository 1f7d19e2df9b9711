"""`engine.batch_invariant`: bitwise the same completions whatever is computed beside a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.engine.attention.cpu import CpuAttention
from batchrun.engine.hook import NAME
from batchrun.engine.invariance import ROWS, FixedRows, check_invariance
from batchrun.engine.layers import fuse_model
from batchrun.engine.model import PagedModel
from batchrun.engine.params import Completion, SamplingParams
from batchrun.errors import ConfigError
from tests.engine.families import load, make_model, random_prompt

SHARED = random_prompt(99, 150)
PROMPTS = [[*SHARED, *random_prompt(i, 1 + 3 * i)] for i in range(5)] + [
    random_prompt(10 + i, 4 + 60 * i) for i in range(3)
]
PARAMS = [
    SamplingParams(temperature=(0.0, 0.7, 1.3)[i % 3], top_p=0.95, seed=i, max_tokens=5 + i % 4, logprobs=2)
    for i in range(len(PROMPTS))
]


def said(completion: Completion) -> tuple[list[int], bytes]:
    """Tokens, and the bits of their log-probabilities."""
    assert completion.logprobs is not None
    return list(completion.token_ids), completion.logprobs.logprobs.tobytes()


@pytest.mark.parametrize(("family", "dtype"), [("gemma3_text", "float32"), ("qwen3", "bfloat16")])
def test_a_row_is_the_same_in_any_batch(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.engine.attention.cpu.MIN_SAVED_BLOCKS", 1)  # rows that share a page are a group
    folder = make_model(family, tmp_path, hidden_size=192, intermediate_size=320)
    generator = np.random.default_rng(0)
    with load(folder, dtype=dtype, batch_invariant=True, block_size=128, prefix_caching=False) as llm:
        alone = [said(llm.generate([prompt], one)[0]) for prompt, one in zip(PROMPTS, PARAMS, strict=True)]
    for _ in range(3):
        options: dict[str, Any] = {
            "max_num_seqs": int(generator.integers(2, 12)),
            "max_batched_tokens": int(generator.integers(12, 300)),
            "prefix_caching": bool(generator.integers(2)),
            "num_blocks": int(generator.integers(5, 24)),  # the least holds two rows
            "block_size": 128,
        }
        some = generator.permutation(len(PROMPTS))[: generator.integers(5, len(PROMPTS) + 1)].tolist()
        with load(folder, dtype=dtype, batch_invariant=True, **options) as llm:
            completions = llm.generate([PROMPTS[i] for i in some], [PARAMS[i] for i in some])
        assert [said(c) for c in completions] == [alone[i] for i in some], options


def test_products_always_have_the_same_number_of_rows() -> None:
    seen: list[int] = []
    linear = torch.nn.Linear(8, 4)

    def compute(x: torch.Tensor, *add: torch.Tensor) -> torch.Tensor:
        seen.extend(len(each) for each in (x, *add))
        return linear(x) + sum(add)

    fixed, x, add = FixedRows(compute), torch.randn(1, 2 * ROWS + 3, 8), torch.randn(1, 2 * ROWS + 3, 4)
    torch.testing.assert_close(fixed(x), linear(x))
    torch.testing.assert_close(fixed(x, add=add), linear(x) + add)
    assert set(seen) == {ROWS}
    assert fixed(x[:, :0]).shape == (1, 0, 4)


def test_a_model_that_looks_at_the_batch_is_refused(llama: Path) -> None:
    model = PagedModel(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32, attn_implementation=NAME))
    fuse_model(model)
    embed = model.module.get_input_embeddings()
    lookup = embed.forward
    embed.forward = lambda ids: lookup(ids) * (1 + 1e-6 * ids.shape[-1])
    with pytest.raises(ConfigError, match=r"logits of a row of llama in torch\.float32.*another model\.dtype"):
        check_invariance(model, CpuAttention)


def test_experts_are_refused(family_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="not there for the experts of mixtral"):
        load(family_folder("mixtral"), batch_invariant=True, block_size=128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "torch"}, r"not there for engine\.attention=torch: use engine\.attention=cpu"),
        ({"block_size": 64}, r"needs engine\.block_size=128 or more, not 64"),
        ({"fused_layers": False}, r"not there for engine\.fused_layers=false"),
    ],
)
def test_settings_that_it_is_not_there_for_are_refused(llama: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(llama, batch_invariant=True, **{"block_size": 128, **options})

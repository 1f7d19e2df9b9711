"""Tiny models with random weights, one per family, saved as a folder that loads like any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from batchrun.engine.engine import Engine
from batchrun.engine.llm import LLM

VOCABULARY = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.2},
    "phi3": {"sliding_window": None},
    "gpt_oss": {"sliding_window": 8, **EXPERTS},
    "mixtral": {"sliding_window": None, **EXPERTS},
    "gpt_neox": {},
    "gemma4_text": {**SHARED_KV, "global_head_dim": 16},
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "head_dim": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}

# Checked at load only: other shapes of the same parts, at little cost.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 1.0},
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 8,
    },
    "gemma3n_text": {
        **SHARED_KV,
        "intermediate_size": [48] * 4,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "glm4": {},
    "gpt2": {"n_inner": 48},
    "olmo2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 16},
    "starcoder2": {"sliding_window": 8},
}


def make_model(family: str, folder: Path, **changes: Any) -> Path:
    """Build, scale and save a tiny model of `family` with a tokenizer. Weights depend on the family alone."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SHAPE, **{**FAMILIES, **MORE_FAMILIES}.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # four times the usual spread, so that attention and choices are not flat
                parameter.mul_(4)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 3 are BOS, EOS, padding and unknown; id i above them is the word `w` + i."""
    special = ["<s>", "</s>", "<pad>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(4, VOCABULARY))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def load(folder: Path, **options: Any) -> LLM:
    """The engine on one of these models, with room for 4096 tokens unless `options` say otherwise."""
    defaults = {
        "dtype": "float32",
        "device": "cpu",
        "block_size": 16,
        "num_blocks": 4096 // options.get("block_size", 16),
    }
    return LLM(str(folder), offline=True, **{**defaults, **options})


class Optimist:
    """A length estimate that expects next to nothing and never learns, so that the engine must preempt."""

    share = 0.01

    def observe(self, generated: int, allowed: int) -> None:
        pass

    def raise_after_preemption(self) -> None:
        pass


def make_optimistic(llm: LLM) -> LLM:
    llm.engine.scheduler.estimate = Optimist()  # type: ignore[assignment]
    return llm


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids other than the special ones."""
    return np.random.default_rng(seed).integers(4, VOCABULARY, size=length).tolist()


def assert_idle(engine: Engine) -> None:
    """Nothing runs, waits or is held, and the books of the pool agree."""
    scheduler = engine.scheduler
    assert not engine.has_work()
    engine.pool.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert scheduler.slots.num_free == scheduler.slots.capacity
    assert not scheduler._computing
    assert not engine._sequences

"""Tiny models with random weights, one per family, saved as a folder that loads like any checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
WINDOW: dict[str, Any] = {"sliding_window": 8}
MIXED: dict[str, Any] = {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS: dict[str, Any] = {**EXPERTS, "moe_intermediate_size": 16}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {  # compressed keys and values, as DeepSeek has them: Dk is 4 + 8, Dv is 6
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}

# One for each thing that attention must do: these are compared with `generate`, token for token.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "mistral": WINDOW,
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.2},
    "phi3": {"sliding_window": None},
    "gpt_oss": {**WINDOW, **EXPERTS},
    "mixtral": {"sliding_window": None, **EXPERTS},
    "gpt_neox": {},
    "gemma4_text": {**SHARED_KV, "global_head_dim": 16},
    "deepseek_v3": {**LATENT, **ROUTED, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}

# These too, in fewer ways.
HARD_FAMILIES: dict[str, dict[str, Any]] = {
    "biogpt": {},
    "cohere2": MIXED,
    "diffllama": {},
    "exaone4": {**MIXED, "sliding_window_pattern": 2},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 8},
    "gemma3n_text": {
        **SHARED_KV,
        "intermediate_size": [48] * 4,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt2": {"n_inner": 48},
    "gpt_bigcode": {"n_inner": 48, "multi_query": True},
    "mimo_v2_flash": {**MIXED, **ROUTED, "num_local_experts": 4, "v_head_dim": 6},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "olmo3": MIXED,
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phimoe": {**WINDOW, **EXPERTS},
    "qwen3_moe": SMALL_EXPERTS,
    "stablelm": {},
}

# Checked at load only: other mixes of the same parts.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**MIXED, **SMALL_EXPERTS, "num_dense_layers": 1, "num_shared_experts": 1},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "codegen": {"n_embd": 32, "rotary_dim": 4},
    "cohere": {"logit_scale": 1.0},
    "cohere2_moe": {**MIXED, **SMALL_EXPERTS},
    "ctrl": {"dff": 48},
    "cwm": MIXED,
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 0.5},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**LATENT, **ROUTED, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "dots1": {**MIXED, **ROUTED, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "dory": MIXED,
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    "exaone": {},
    "exaone_moe": {**MIXED, **SMALL_EXPERTS, "sliding_window_pattern": 2},
    "flex_olmo": EXPERTS,
    "gemma": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {**ROUTED, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**LATENT, **ROUTED, "n_group": 1, "topk_group": 1},
    "gptj": {"rotary_dim": 4},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granite_swa": MIXED,
    "granitemoe": EXPERTS,
    "granitemoe_swa": {**MIXED, **EXPERTS},
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 16},
    "granitemoehybrid": {
        **EXPERTS,
        "layer_types": ["attention"] * 3,
        "shared_intermediate_size": 16,
        "mamba_n_heads": 8,
    },
    "helium": {},
    "hrm_text": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "hy_v3": {**SMALL_EXPERTS, **ROUTED, "num_shared_experts": 1},
    "internlm3": {},
    "jais2": {},
    "jetmoe": {**EXPERTS, "kv_channels": 8},
    "laguna": {**MIXED, **SMALL_EXPERTS, "shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["full_attention"] * 3},
    "longcat_flash": {
        **LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 1,
    },
    "minicpm3": LATENT,
    "minimax_m2": SMALL_EXPERTS,
    "ministral": MIXED,
    "modernbert-decoder": {"local_attention": 8},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "persimmon": {},
    "qwen2_moe": {
        **SMALL_EXPERTS,
        "shared_expert_intermediate_size": 16,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "solar_open": {**ROUTED, "n_group": 1, "topk_group": 1},
    "starcoder2": WINDOW,
    "vaultgemma": {**MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.2},
    "youtu": LATENT,
}

ALL_FAMILIES = {**FAMILIES, **HARD_FAMILIES, **MORE_FAMILIES}
CLEAR = 2e-5  # of the two best logits: with less between them, rounding decides and a reference proves nothing


def known(families: Iterable[str]) -> list[str]:
    """Those that the installed transformers has: releases add families."""
    return [family for family in families if family in CONFIG_MAPPING]


def replaceable(families: Iterable[str]) -> list[str]:
    """Those known whose code looks its attention up by name: in some releases that of `codegen` and `gptj` does not."""
    classes = {family: MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]] for family in known(families)}
    return [
        family for family, cls in classes.items() if hasattr(sys.modules[cls.__module__], "ALL_ATTENTION_FUNCTIONS")
    ]


def make_model(family: str, folder: Path, **changes: Any) -> Path:
    """Build and save a tiny model of `family` with a tokenizer."""
    model = build_model(family, **changes)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def build_model(family: str, attention: str = "eager", **changes: Any) -> Any:
    """A tiny model in float32. Its weights depend on the family alone; spread wide enough, norms and biases
    too, that attention and choices are not flat and nothing is zero or one by default."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SHAPE, **ALL_FAMILIES.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    spread_weights(model)
    return model


@torch.no_grad()
def spread_weights(model: Any) -> None:
    """Make the weights of a new model wide, and its norms and biases other than one and zero."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))


@torch.inference_mode()
def generate(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers generates greedily, where rounding cannot have decided it."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=max_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > CLEAR, "the reference itself is undecided: choose another prompt"
    return out.sequences[0, len(prompt) :].tolist()


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


def engine_of(llm: LLM) -> Engine:
    """The engine of an LLM that has a single one, in this process."""
    assert isinstance(llm.engine, Engine)
    return llm.engine


def make_optimistic(llm: LLM) -> LLM:
    engine_of(llm).scheduler.estimate = Optimist()  # type: ignore[assignment]
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

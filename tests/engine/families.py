"""Tiny models with random weights, one per family, saved as a folder that loads like any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

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

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "phi3": {"sliding_window": None},
    "gpt_oss": {"sliding_window": 8, **EXPERTS},
    "mixtral": {"sliding_window": None, **EXPERTS},
    "gpt_neox": {},
}


def make_model(family: str, folder: Path, **changes: Any) -> Path:
    """Build, scale and save a tiny model of `family` with a tokenizer. Weights depend on the family alone."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES.get(family, {}), **changes})
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
    """Words `w0` … `w255`, one id each; `w0` is BOS and `w1` EOS."""
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w2", unk_token="w3"
    )

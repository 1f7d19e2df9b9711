"""Models of known shapes with random weights: what an engine takes for them does not depend on what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchrun.bench.tiny import save_word_tokenizer

QWEN3_600M: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SHAPES = {"qwen3-0.6b": ("qwen3", QWEN3_600M), "llama-8b": ("llama", LLAMA_8B), "tiny": ("qwen3", TINY)}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def save_random_model(shape: str, folder: Path, dtype: str, device: str) -> Path:
    """Save one of SHAPES with weights drawn on `device`, in a torch type's name, with a tokenizer of numbered words."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    family, sizes = SHAPES[shape]
    config = AutoConfig.for_model(family, **sizes, **SPECIAL)
    logging.disable_progress_bar()
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    save_word_tokenizer(folder, sizes["vocab_size"])
    del model
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    return folder

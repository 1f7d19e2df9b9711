"""A model that computes next to nothing, saved as any checkpoint is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 256


def save_tiny_model(folder: Path, positions: int = 512) -> Path:
    """Two Llama layers with random weights, and a tokenizer: ids 0 to 3 are special, id i above is the word `w` + i."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return save_word_tokenizer(folder, VOCABULARY)


def save_word_tokenizer(folder: Path, vocabulary: int) -> Path:
    """Ids 0 to 3 are special, id i above is the word `w` + i."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<pad>", "<unk>", *(f"w{i}" for i in range(4, vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder

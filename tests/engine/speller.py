"""A tiny llama that speaks bytes and some hundred words of JSON, with two ids that end a sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.engine.families import build_model

VOCABULARY = 400
ENDS = [1, 3]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "mood": {"enum": ["gut gelaunt", "日本語", "naïve"]},
        "parts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"score": {"type": "integer", "minimum": 1, "maximum": 5}},
                "required": ["score"],
                "additionalProperties": False,
            },
        },
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    },
    "required": ["name", "mood", "parts", "note"],
    "additionalProperties": False,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and some hundred words of JSON and of these tests."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [
        json.dumps(SCHEMA, ensure_ascii=False),
        '{"name": "x", "mood": "naïve", "parts": [{"score": 3}], "note": ""}',
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<pad>", "<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def make_speller(folder: Path) -> Path:
    """Build and save the model with its tokenizer."""
    model = build_model("llama", vocab_size=VOCABULARY)
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder

"""Tiny encoders and classifiers with random weights, saved as a folder, and transformers' own answers for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.engine.families import SHAPE, VOCABULARY, WINDOW, spread_weights

SPECIALS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"pad_token_id": 0, "max_position_embeddings": 513},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    "mpnet": {},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 3},
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "is_encoder_decoder": True},
}
DECODERS: dict[str, dict[str, Any]] = {"qwen3": {}, "mistral": WINDOW}


def make_encoder(family: str, folder: Path, classes: int = 0, **changes: Any) -> Path:
    """Build and save a tiny model, with a head for so many classes if any, and a tokenizer that takes pairs."""
    torch.manual_seed(2)
    labels = {"num_labels": classes} if classes else {}
    settings = {**SHAPE, **IDS, **ENCODERS.get(family, {}), **DECODERS.get(family, {}), **labels, **changes}
    config = AutoConfig.for_model(family, **settings)
    if family == "t5":
        model: Any = transformers.T5EncoderModel(config)
    else:
        model = (AutoModelForSequenceClassification if classes else AutoModel).from_config(config, dtype=torch.float32)
    spread_weights(model)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """[CLS] text [SEP], or [CLS] first [SEP] second [SEP]; id i from 4 on is the word `w` + i."""
    vocabulary = {word: i for i, word in enumerate([*SPECIALS, *(f"w{i}" for i in range(4, VOCABULARY))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def write_modules(folder: Path, pooling: dict[str, Any], *more: str, **settings: Any) -> None:
    """The files of sentence-transformers: Pooling, then the modules `more`, with `settings` of the first module."""
    kinds = ["Transformer", "Pooling", *more]
    places = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
    modules = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def random_texts(count: int, longest: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in rng.integers(4, VOCABULARY, rng.integers(1, longest))) for _ in range(count)]


@torch.inference_mode()
def hidden_states(folder: Path, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Float32 [n, H] of each row, computed alone and without padding."""
    module = transformers.T5EncoderModel if (folder / "config.json").read_text().count('"t5"') else AutoModel
    model = module.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(input_ids=torch.tensor([list(row)])).last_hidden_state[0].numpy() for row in rows]


@torch.inference_mode()
def class_logits(folder: Path, rows: Sequence[dict[str, list[int]]]) -> np.ndarray:
    """Float32 [rows, classes], each row computed alone, of what a tokenizer made of it."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = [{key: torch.tensor([value]) for key, value in row.items()} for row in rows]
    return np.concatenate([model(**given).logits.numpy() for given in inputs])

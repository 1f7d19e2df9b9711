"""Tiny tokenizers, made on the spot: every character in the alphabet is a token."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
LETTERS = [chr(code) for code in range(32, 127)] + ["\n", "\ufffd", "é", "日"]

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT_WITH_BOS = "{{ bos_token }}" + CHAT
CHAT_WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% endfor %}" + CHAT
)


@cache
def make_tokenizer(bos: bool, chat_template: str | None = CHAT) -> Any:
    """Character tokenizer; with `bos`, it puts <s> before each text unless told not to add special tokens."""
    vocab = {token: number for number, token in enumerate(SPECIALS + LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(SPECIALS)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    if chat_template is not None:
        wrapped.chat_template = chat_template
    return wrapped

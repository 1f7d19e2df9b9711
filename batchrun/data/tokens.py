"""What a tokenizer does of its own accord: the tokens it begins a text with, and the ids it knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def leading_specials(tokenizer: Any) -> list[int]:
    """Tokens that the tokenizer puts before a text by default: BOS, for most that put any."""
    plain = tokenizer("x", add_special_tokens=False)["input_ids"]
    full = tokenizer("x")["input_ids"]
    for length in range(len(full) - len(plain) + 1):
        if full[length : length + len(plain)] == plain:
            return list(full[:length])
    return []


def plain_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without what the tokenizer adds of its own accord."""
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def with_leading(ids: list[int], leading: list[int]) -> list[int]:
    """`ids` beginning with `leading` exactly once, whether the text already held it or not."""
    if not leading:
        return ids
    size = len(leading)
    while ids[:size] == leading:
        ids = ids[size:]
    return leading + ids


def vocab_size(tokenizer: Any) -> int:
    """One more than the largest token id, which may be above the number of tokens."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)

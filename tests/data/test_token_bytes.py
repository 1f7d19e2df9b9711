from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchrun.data.token_bytes import TokenBytes
from tests.engine.speller import make_tokenizer

TEXT = "Hello naïve 日本語 🙂\n x</s>"


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """As in Llama 2 and Mistral: pieces with a mark for a space, and bytes for what is no piece."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁Hello", -1.0), ("x", -1.0), ("▁na", -1.0)]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def with_marks() -> PreTrainedTokenizerFast:
    """As in T5."""
    pieces = [("<unk>", 0.0), *((text, -1.0) for text in ("▁", "▁Hello", "x", "▁na", "ï", "v", "e", "日", "\n"))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize(
    ("tokenizer", "text", "lead"),
    [
        (make_tokenizer(), TEXT, b""),
        (with_byte_fallback(), TEXT, b" "),
        (with_marks(), "Hello naïve 日x</s>", b" "),
    ],
)
def test_bytes_of_tokens_add_up_to_the_text(tokenizer: Any, text: str, lead: bytes) -> None:
    known = TokenBytes(tokenizer)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > 5
    assert b"".join(known[token] for token in ids) == lead + text.encode()


def test_a_row_of_the_head_that_is_no_token_adds_nothing() -> None:
    assert TokenBytes(make_tokenizer())[100_000] == b""

"""The bytes that single tokens stand for, of which several may make one character."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

SPACE = "\u2581"  # what SentencePiece has in the place of a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """By token id, the bytes that it adds to a text, as the decoder of a transformers tokenizer has them."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = None if backend is None else json.loads(backend.to_str())["decoder"]
        kinds = {each["type"] for each in (decoder or {}).get("decoders", [decoder or {"type": None}])}
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in kinds
        self._spaced = "Metaspace" in kinds or SPACE in json.dumps(decoder, ensure_ascii=False)
        self._added = {token: str(text) for token, text in tokenizer.added_tokens_decoder.items()}
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""  # a row of the model's head that is no token
        if self._byte_level:
            return bytes(_byte_of().get(char, 63) for char in piece)
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        text = piece.replace(SPACE, " ") if self._spaced else self._tokenizer.decode([token], skip_special_tokens=False)
        return str(text).encode()


@cache
def _byte_of() -> dict[str, int]:
    """The byte of each character in the vocabularies of byte-level BPE, by GPT-2's table: visible ones of Latin-1 are
    themselves, the others follow from U+0100 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}

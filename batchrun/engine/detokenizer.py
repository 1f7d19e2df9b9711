"""Text from tokens: whole at the end, and a little at a time for rows that watch for stop strings."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "�"  # what a tokenizer decodes an unfinished multi-byte character to


class IncrementalText:
    """Text of a growing token list, at a cost per token that does not grow with the text.

    Each look decodes only a short window: the tokens since `_prefix`, minus what the tokens up to
    `_read` already gave, because a token's text can depend on the one before it.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self.text = ""

    def add(self, token_id: int) -> str:
        """The text that this token completes: empty while a character is unfinished."""
        self._ids.append(token_id)
        old = self._decode(self._ids[self._prefix : self._read])
        new = self._decode(self._ids[self._prefix :])
        if new.endswith(REPLACEMENT) or len(new) <= len(old):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        self.text += new[len(old) :]
        return new[len(old) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip))


class StopMatcher:
    """Watches one row's text for its stop strings, across token borders."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], skip_special_tokens: bool) -> None:
        self._incremental = IncrementalText(tokenizer, skip_special_tokens)
        self._stop = stop
        self._overlap = max(len(s) for s in stop) - 1

    def add(self, token_id: int) -> tuple[str, str] | None:
        """(text before the stop string, the stop string) once the text holds one; the earliest wins."""
        seen = len(self._incremental.text)
        if not self._incremental.add(token_id):
            return None
        text = self._incremental.text
        start = max(0, seen - self._overlap)
        found = [(at, s) for s in self._stop if (at := text.find(s, start)) >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda match: (match[0], -len(match[1])))
        return text[:at], stop

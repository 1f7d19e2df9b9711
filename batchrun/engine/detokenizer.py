"""Text from tokens: whole at the end, and a little at a time for rows that watch for stop strings."""

from __future__ import annotations

from typing import Any

from batchrun.engine.params import SamplingParams

REPLACEMENT = "�"  # what a tokenizer decodes an unfinished multi-byte character to
LONGEST = 16  # tokens that one character may have; more bytes than that will never become one
CHARACTER = 4  # tokens at the end of such bytes that may yet begin one


class IncrementalText:
    """Text of a growing token list, at a cost per token that does not grow with the text.

    Each look decodes only a short window: the tokens since `_prefix`, minus what the tokens up to
    `_read` already gave, because a token's text can depend on the one before it.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # the tokens since `_prefix`
        self._read = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, token_id: int) -> str:
        """The text that this token completes: empty while a character is unfinished."""
        self._window.append(token_id)
        old, new, end = self._decode(self._read), self._decode(), len(self._window)
        long = end - self._read >= LONGEST
        if new.endswith(REPLACEMENT):
            if not long:
                return ""
            end -= CHARACTER
            new = self._decode(end)
        elif len(new) <= len(old):
            if long:  # of special tokens that are not shown
                del self._window[self._read :]
            return ""
        self._window = self._window[self._read :]
        self._read = end - self._read
        self._pieces.append(new[len(old) :])
        return new[len(old) :]

    def _decode(self, end: int | None = None) -> str:
        return str(self._tokenizer.decode(self._window[:end], skip_special_tokens=self._skip))


def whole_characters(text: str) -> str:
    """The text of tokens that were cut off anywhere, without the character that they leave unfinished."""
    ended = text.rstrip(REPLACEMENT)
    return ended if len(text) - len(ended) < CHARACTER else text


class StopMatcher:
    """Watches one row's text for its stop strings, across token borders.

    A stop string that was complete with the first `min_tokens` tokens is text like any other.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._incremental = IncrementalText(tokenizer, params.skip_special_tokens)
        self._stop = params.stop
        self._include = params.include_stop_str_in_output
        self._overlap = max(map(len, params.stop)) - 1
        self._early = params.min_tokens  # tokens to come at which no stop counts
        self._tail = ""  # the end of the text before the newest piece, as long as a stop string may begin in it

    def add(self, token_id: int) -> tuple[str, str] | None:
        """(text, the stop string) once the text holds one: the earliest wins, and of two at one place the longer.

        The text goes to the stop string's beginning, or to its end if it is to be included.
        """
        piece = self._incremental.add(token_id)
        self._early -= 1
        recent = self._tail + piece
        seen, self._tail = len(self._tail), recent[max(0, len(recent) - self._overlap) :]
        if not piece or self._early >= 0:
            return None
        found = [(at, -len(s), s) for s in self._stop if (at := recent.find(s, max(0, seen - len(s) + 1))) >= 0]
        if not found:
            return None
        at, _, stop = min(found)
        text = self._incremental.text
        start = len(text) - len(recent) + at
        return text[: start + len(stop) if self._include else start], stop

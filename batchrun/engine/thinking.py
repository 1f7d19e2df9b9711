"""Rows that think before they answer: where that begins and ends, while tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from batchrun.engine.detokenizer import IncrementalText, whole_characters
from batchrun.engine.reasoning import Reasoning

# What an answer without thinking begins with, where it is more than the answer.
PREAMBLE = {"<|channel|>analysis<|message|>": "<|channel|>final<|message|>"}
TAIL_TOKENS = 32  # of a prompt: a marker in them is one of the chat template


class Thinkers:
    """Opens the thinking of rows; knows which end markers are always the same tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}  # of each end marker
        self._fixed: dict[str, bool] = {}

    def open(self, reasoning: Reasoning, prompt_ids: np.ndarray, *, decide_at_once: bool) -> Thinking | None:
        """For a row with this prompt (integers [n]). None if the prompt has the thinking behind it.

        With `decide_at_once`, the first token says whether there is thinking, and not only all of the start marker.
        """
        end = reasoning.end
        if end not in self._ids:
            ids = self._ids[end] = self._tokenizer(end, add_special_tokens=False)["input_ids"]
            # Added tokens are cut out of a text before the rest of it is tokenised, whatever stands beside them.
            added = self._tokenizer.added_tokens_decoder
            whole = self._tokenizer.decode(ids, skip_special_tokens=False) == end
            self._fixed[end] = whole and ids[0] in added and ids[-1] in added
        tail = self._tokenizer.decode(prompt_ids[-TAIL_TOKENS:].tolist(), skip_special_tokens=False).rstrip()
        if tail.endswith(end.rstrip()):
            return None
        begun = tail.endswith(reasoning.start.rstrip())
        return Thinking(reasoning, self._tokenizer, self._ids[end], self._fixed[end], begun, decide_at_once)


class Thinking:
    """One row's way through its thinking to the answer. Until it is `over`, its tokens are given to `add`.

    `closing` are the tokens of the end marker; if they are `fixed`, no others make its text.
    """

    def __init__(
        self,
        reasoning: Reasoning,
        tokenizer: Any,
        closing: list[int],
        fixed: bool,
        begun: bool,
        decide_at_once: bool,
    ) -> None:
        self.reasoning = reasoning
        self.closing = closing
        self.over = False
        self.answer_at = 0  # tokens of the completion before the answer
        self._tokenizer = tokenizer
        self._begun = begun
        self._decide_at_once = decide_at_once
        self._ids: list[int] = []
        self._rest = ""  # text of the answer in the token that ends the thinking
        self._text = None if fixed else IncrementalText(tokenizer, skip_special_tokens=False)
        self._tail = ""  # the end of the thinking's text, as long as the end marker may begin in it

    @property
    def spent(self) -> bool:
        """Whether the thinking has had all the tokens it may have, and is not about to end by itself."""
        most = self.reasoning.max_tokens
        if most is None or len(self._ids) < most or self.over or not self._begun:
            return False
        if self._text is None:
            return not any(self._ids[-n:] == self.closing[:n] for n in range(1, len(self.closing)))
        end = self.reasoning.end
        return not self._tail.endswith(tuple(end[:n] for n in range(1, len(end))))

    def add(self, token: int) -> list[int]:
        """Take the completion's next token. Returns the tokens that turn out to be of the answer."""
        self._ids.append(token)
        if not self._begun:
            return self._look_for_start()
        if self._ends(token):
            self._rest = self._decode(self._ids).partition(self.reasoning.end)[2]
            self._answer(len(self._ids))
        return []

    def close(self, room: int) -> list[int]:
        """End the thinking as if the model had: the tokens to say so with, at most `room`, which may be too few."""
        closing = self.closing[:room]
        self._ids += closing
        if closing == self.closing:
            self._answer(len(self._ids))
        return closing

    def answer(self, text: str) -> str:
        """The answer, whose tokens decode to `text`, without the line breaks that part it from the thinking."""
        if self._begun and not self.over:
            return ""
        return (self._rest + text).lstrip("\n") if self.answer_at else text

    def count(self, token_ids: Sequence[int]) -> int:
        """How many of a completion's tokens come before the answer."""
        return self.answer_at if self.over else len(token_ids) if self._begun else 0

    def thought(self, token_ids: Sequence[int]) -> str | None:
        """The text of the thinking in a completion's tokens; None if there is none."""
        if not self._begun:
            return None
        text = self._decode(token_ids[: self.count(token_ids)]).lstrip().removeprefix(self.reasoning.start)
        return whole_characters(text.partition(self.reasoning.end)[0]).strip() or None

    def _look_for_start(self) -> list[int]:
        """The first tokens: of thinking if they are the start marker, else of the answer."""
        text, start = self._decode(self._ids).lstrip(), self.reasoning.start
        preamble = PREAMBLE.get(start, start)
        if text.startswith(start) or (self._decide_at_once and text and start.startswith(text)):
            self._begun = True
        elif text.startswith(preamble):
            self._answer(len(self._ids))
        elif self._decide_at_once or not (start.startswith(text) or preamble.startswith(text)):
            self._answer(0)
            return self._ids
        return []

    def _ends(self, token: int) -> bool:
        """Whether the end marker is complete with this token."""
        if self._text is None:
            return token == self.closing[-1] and self._ids[-len(self.closing) :] == self.closing
        recent = self._tail + self._text.add(token)
        self._tail = recent[-len(self.reasoning.end) :]
        return self.reasoning.end in recent

    def _answer(self, at: int) -> None:
        self.over, self.answer_at = True, at

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

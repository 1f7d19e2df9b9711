"""Text of the rows that stream it, piece by piece as their tokens come. Other rows cost nothing."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from batchrun.engine.detokenizer import IncrementalText
from batchrun.engine.params import Completion
from batchrun.engine.sequence import Sequence
from batchrun.engine.slots import Slots


class Piece(NamedTuple):
    """Text that a row has come to since the last piece. Where it begins is told, because a row whose engine died is
    computed again, and tells its beginning twice."""

    key: Hashable
    text: str
    token_ids: list[int]
    first_char: int
    first_token: int


@dataclass(slots=True)
class _Row:
    sequence: Sequence
    growing: IncrementalText
    tokens: int = 0  # read from the sequence
    told: int = 0  # of these, in pieces
    shown: int = 0  # characters in pieces
    held: str = ""  # text that is not in a piece yet


class PieceWriter:
    """The rows that stream, and their pieces since the last look. A piece has no broken character in it, and nothing
    that a stop string may yet cut off. Of a row that thinks only the answer is text, once it has begun."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rows: dict[Hashable, _Row] = {}
        self._ready: list[Piece] = []

    def open(self, sequence: Sequence) -> None:
        """From now on the sequence streams."""
        growing = IncrementalText(self._tokenizer, sequence.request.params.skip_special_tokens)
        self._rows[sequence.request.key] = _Row(sequence, growing)

    def close(self, key: Hashable) -> None:
        """A row has ended or is forgotten; one that does not stream is ignored."""
        self._rows.pop(key, None)

    def write(self, slots: Slots, finished: Iterable[Completion]) -> None:
        """Read what this step has brought. The rest of a finished row is in its completion."""
        if not self._rows:
            return
        for completion in finished:
            self.close(completion.key)
        for row in self._rows.values():
            if row.sequence.slot >= 0:
                self._read(row, slots)

    def take(self) -> list[Piece]:
        """The pieces since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def _read(self, row: _Row, slots: Slots) -> None:
        slot, start, thinking = row.sequence.slot, row.sequence.num_prompt, row.sequence.thinking
        if thinking is not None:
            if not thinking.over:
                return
            row.tokens = max(row.tokens, thinking.answer_at)
        generated = slots.token_ids[slot, start : slots.num_tokens[slot]]
        new = "".join(row.growing.add(token) for token in generated[row.tokens :].tolist())
        row.tokens = len(generated)
        if thinking is not None and not row.shown and not row.held:
            new = thinking.answer(new) if new else ""
        if not new:
            return
        text, params = row.held + new, row.sequence.request.params
        safe = len(text) - _held(text, params.stop)
        row.held = text[safe:]
        if safe:
            tokens = generated[row.told :].tolist()
            self._ready.append(Piece(row.sequence.request.key, text[:safe], tokens, row.shown, row.told))
            row.shown, row.told = row.shown + safe, len(generated)


def _held(text: str, stop: tuple[str, ...]) -> int:
    """Characters at the end of the text with which a stop string begins."""
    longest = max(map(len, stop), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-size:]) for s in stop):
            return size
    return 0

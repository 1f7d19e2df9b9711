"""Cutting a prompt that is too long: between characters, at the left, at the right or in the middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Span = tuple[int, int]


def cut_text(
    body: str, room: int, policy: str, tokenizer: Any, whole: Callable[[str], tuple[str, list[int]]]
) -> tuple[str, list[int]] | None:
    """A prompt of at most `room` tokens with as much of `body` as fits, or None if nothing of it does.

    `whole` makes the prompt, text and ids, of a body. `policy` says where the body is cut: truncate_left,
    truncate_right or truncate_middle. A character that several tokens share is kept whole or not at all.
    """
    spans = token_spans(tokenizer, body)
    keep = len(spans) + room - len(whole(body)[1])
    while keep > 0:
        kept = _kept(body, spans, keep, policy)
        if not kept.strip():
            return None
        text, ids = whole(kept)
        if len(ids) <= room:
            return text, ids
        # Tokens at the edges of what is left may have come apart: as many more have to go.
        keep -= len(ids) - room
    return None


def cut_ids(ids: Sequence[int], room: int, policy: str, bos: int | None) -> list[int] | None:
    """The first, last or outer of the token ids, behind `bos` if they begin with it: `room` in all, or None."""
    head = list(ids[:1]) if bos is not None and ids[0] == bos else []
    rest = list(ids[len(head) :])
    keep = room - len(head)
    if keep < 1:
        return None
    left = _left(keep, policy)
    return head + rest[:left] + rest[len(rest) - (keep - left) :]


def token_spans(tokenizer: Any, text: str) -> list[Span]:
    """Where each token of the text begins and ends, in characters; evenly spaced if the tokenizer cannot tell."""
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [(int(start), int(stop)) for start, stop in encoded["offset_mapping"]]
    count = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return [(len(text) * i // count, len(text) * (i + 1) // count) for i in range(count)]


def _kept(text: str, spans: Sequence[Span], keep: int, policy: str) -> str:
    """The text of `keep` of its tokens."""
    keep = min(keep, len(spans) - 1)
    left = _left(keep, policy)
    right = len(spans) - (keep - left)
    # Tokens of one character have overlapping spans: the character is left out with the first of them that is.
    # Spaces between spans belong to the token that follows.
    end = min(spans[left - 1][1], spans[left][0]) if left else 0
    begin = spans[right - 1][1] if right < len(spans) else len(text)
    return text[:end] + text[begin:]


def _left(keep: int, policy: str) -> int:
    """How many of `keep` tokens are taken from the left."""
    return {"truncate_right": keep, "truncate_left": 0, "truncate_middle": keep - keep // 2}[policy]

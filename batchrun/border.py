"""Where a prompt ends and what follows it begins, in tokens: for jobs and for the library door alike."""

from __future__ import annotations

from collections.abc import Sequence


def tokens_after(prompt: list[int], whole: list[int], alone: Sequence[int]) -> tuple[int, ...]:
    """Tokens of a text that follows a prompt: those of both as one text without those of the prompt.

    Where the border runs through a token, so that the prompt has other tokens in the whole, they are those of the text
    alone. Otherwise this is what lm-evaluation-harness does.
    """
    stays = len(whole) > len(prompt) and whole[: len(prompt)] == prompt
    return tuple(whole[len(prompt) :] if stays else alone)

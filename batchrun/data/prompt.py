"""What one row sends to the model, or why it sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchrun.errors import ErrorType


@dataclass(slots=True)
class Prompt:
    """What one row sends to the model, or why it sends nothing.

    `ids` is kept for a prompt that is too long, so that its length can be reported. `text` is the whole rendered
    text, None for ready ids and for rows whose text could not be made.
    """

    ids: list[int]
    error_type: ErrorType | None = None
    error: str | None = None
    text: str | None = None
    params: dict[str, Any] | None = None  # the row's own sampling parameters, by their names in the config
    skipped: bool = False  # the error is one that the settings ask to pass over
    truncated_tokens: int = 0  # that were cut to make it fit
    tools: bool = True  # whether calls of tools may come: not for a row that is shown none, of a job that shows some
    # What the row asks next, given the answers to this prompt and those before it; None where there is nothing more.
    follow: Callable[[Sequence[str]], Prompt | None] | None = None
    # For tasks that score what may follow: its texts, what stands between the prompt and each, and the tokens of both.
    texts: list[str] = field(default_factory=list)
    joint: str = ""
    continuations: tuple[tuple[int, ...], ...] = ()
    first: str | None = None  # of a pair of texts: the one before `text`
    type_ids: list[int] | None = None  # of a pair: which of the two each token is of, 0 or 1


class RowError(Exception):
    """One row cannot be sent. `error_type` is what its output row shows."""

    def __init__(self, error_type: ErrorType, message: str) -> None:
        super().__init__(message)
        self.error_type: ErrorType = error_type


class Draft(NamedTuple):
    """A prompt in the making: its text is `whole(body)`, and the body is the part that may be cut."""

    prompt: Prompt
    body: str = ""
    whole: Callable[[str], str] | None = None

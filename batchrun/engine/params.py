"""What goes into the engine and what comes out: sampling parameters, a request, a completion. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from batchrun.config import MAX_PATTERN
from batchrun.engine.structure import StructuredOutputs
from batchrun.errors import ErrorType


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names and meanings follow vLLM and OpenAI.

    Raises ValueError naming the value and its limit.
    """

    max_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is all
    seed: int | None = None  # None: the engine derives one from the request's number
    stop: tuple[str, ...] = ()  # strings that end the text; cut from it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None  # the form of the text, which decides alone when it may end
    # Ends a row whose last tokens are one pattern of so many tokens, so many times in a row; 0: never.
    repetition_max_pattern: int = 0
    repetition_min_pattern: int = 1
    repetition_min_count: int = 8

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a finite number above it")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0 is all)")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must fit into 64 bits with a sign")
        if any(not s for s in stop):
            raise ValueError(f"stop={stop!r} holds an empty string")
        if not 0 <= self.repetition_max_pattern <= MAX_PATTERN:
            raise ValueError(
                f"repetition_max_pattern={self.repetition_max_pattern} must be between 0 (off) and {MAX_PATTERN}"
            )
        if self.repetition_min_pattern < 1:
            raise ValueError(f"repetition_min_pattern={self.repetition_min_pattern} must be at least 1")
        if self.repetition_min_count < 2:
            raise ValueError(f"repetition_min_count={self.repetition_min_count} must be at least 2")


@dataclass(slots=True)
class Request:
    """One prompt to complete."""

    key: Hashable  # the caller's own name for it, handed back with the completion
    prompt_ids: Sequence[int] | np.ndarray
    params: SamplingParams = field(default_factory=SamplingParams)
    deltas: bool = False  # whether its text is wanted piece by piece


@dataclass(slots=True)
class Completion:
    """What became of a request. Times are seconds since the request entered the engine."""

    key: Hashable
    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length | repetition | error | abort
    stop_reason: str | int | None = None  # the stop string or token id that ended it, or "stop_when"
    error_type: ErrorType | None = None
    error: str | None = None
    max_tokens: int | None = None  # that there could have been, in what the prompt leaves of the window
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was found in the cache
    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def cut(self, text: str, num_tokens: int, stop_reason: str) -> Completion:
        """The same, had it been stopped after so many tokens."""
        return replace(
            self, text=text, token_ids=self.token_ids[:num_tokens], finish_reason="stop", stop_reason=stop_reason
        )


@dataclass(slots=True)
class Delta:
    """What a streamed request has come to since its last delta. The texts of its deltas add up to the completion's."""

    key: Hashable
    text: str
    token_ids: list[int]
    completion: Completion | None = None  # with the last one

    @property
    def finish_reason(self) -> str | None:
        """The completion's, on the last delta."""
        return self.completion.finish_reason if self.completion else None

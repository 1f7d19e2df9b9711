"""Models that think before they answer: how that is marked in their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Text that opens and closes the thinking of a family: gpt-oss; Magistral; Seed-OSS; EXAONE Deep; DeepSeek R1, Qwen 3,
# GLM 4.5, Phi 4, SmolLM 3 and most others.
KNOWN = {
    "<|channel|>analysis<|message|>": "<|end|><|start|>assistant<|channel|>final<|message|>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<thought>": "</thought>",
    "<think>": "</think>",
}


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How the thinking of a completion is told from its answer, and bounded.

    Raises ValueError naming the value and its limit.
    """

    start: str  # text that opens the thinking; the prompt may end with it already
    end: str  # text that closes it
    max_tokens: int | None = None  # of thinking; after so many the end is written for the model
    stop_in_thinking: bool = False  # whether stops end a row in its thinking too

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if not getattr(self, name).strip():
                raise ValueError(f"reasoning {name}={getattr(self, name)!r} must be the text of a marker")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"reasoning max_tokens={self.max_tokens} must be at least 1")


def known_markers(chat_template: Any) -> tuple[str, str] | None:
    """The markers of thinking that a chat template speaks of, if it is text that speaks of known ones."""
    text = chat_template if isinstance(chat_template, str) else ""
    return next((pair for pair in KNOWN.items() if any(marker in text for marker in pair)), None)

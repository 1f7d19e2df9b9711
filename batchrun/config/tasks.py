"""What tasks other than generating are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchrun.config.base import in_range, one_of, setting, strings
from batchrun.errors import ConfigError

TASKS = ("generate", "choose", "score", "embed", "rank")
NORMALIZE = ("none", "tokens", "bytes")


@dataclass
class ChooseConfig:
    """task=choose: which of some labels the model finds likeliest after the prompt."""

    labels: Any = setting(
        None, "the labels: a list, or the name of a column that has a list for each row", identity=True
    )
    delimiter: str | None = setting(
        None,
        "text between prompt and label; default: a space for prompt.kind=completion or with prompt.prefill, else none",
        identity=True,
    )
    normalize: str = setting(
        "none",
        "likelihoods that are compared: none (of whole labels), or per token or byte: tokens or bytes",
        identity=True,
    )

    def __post_init__(self) -> None:
        one_of("choose.normalize", self.normalize, NORMALIZE)
        if isinstance(self.labels, str):
            return
        self.labels = strings("choose.labels", self.labels) or None
        if self.labels is not None and (len(self.labels) < 2 or len(set(self.labels)) < len(self.labels)):
            raise ConfigError(f"choose.labels={self.labels} must be two labels or more, no two of them equal")


@dataclass
class ScoreConfig:
    """task=score: how likely the model finds a text, or the end of one."""

    continuation: str | None = setting(
        None,
        "Jinja2 template of a text that follows the prompt, so that only it is scored; default: the prompt is",
        identity=True,
    )
    stride: int | None = setting(
        None,
        "score texts beyond the window, in windows that move on by so many tokens; default: an error",
        identity=True,
    )

    def __post_init__(self) -> None:
        in_range("score.stride", self.stride, 1)

"""How a text, or a pair of texts, is scored by a classification head."""

from __future__ import annotations

from dataclasses import dataclass

from batchrun.config.base import one_of, setting
from batchrun.errors import ConfigError

ACTIVATIONS = ("none", "sigmoid", "softmax")


@dataclass
class RankConfig:
    """What task=rank scores: the job's prompt, or a pair of texts in place of it."""

    query: str | None = setting(
        None, "first text of a pair: a Jinja2 template; with prompt.kind=chat, the user's turn", identity=True
    )
    text: str | None = setting(
        None, "second text of a pair: a Jinja2 template; with prompt.kind=chat, the answer", identity=True
    )
    activation: str = setting(
        "auto",
        "what becomes of the model's numbers: none, sigmoid or softmax; auto: as the model's config says",
        identity=True,
    )

    def __post_init__(self) -> None:
        one_of("rank.activation", self.activation, ("auto", *ACTIVATIONS))
        if (self.query is None) != (self.text is None):
            raise ConfigError("rank.query and rank.text are a pair: set both, or neither")

"""How the thinking of a model that thinks is told from its answer."""

from __future__ import annotations

from dataclasses import dataclass

from batchrun.config.base import in_range, setting
from batchrun.errors import ConfigError

AUTO = "auto"


@dataclass
class ReasoningConfig:
    """How the thinking of a model that thinks is told from its answer, and bounded."""

    start: str | None = setting(
        AUTO,
        "text that opens the thinking; auto: a known one that the chat template speaks of; null: texts stay whole",
        identity=True,
    )
    end: str | None = setting(AUTO, "text that closes the thinking; auto or null as for start", identity=True)
    max_tokens: int | None = setting(
        None, "tokens of thinking after which its end is written for the model; default: no limit", identity=True
    )
    stop_in_thinking: bool = setting(
        False, "sampling.stop and stop_token_ids end a row in its thinking too", identity=True
    )

    def __post_init__(self) -> None:
        in_range("reasoning.max_tokens", self.max_tokens, 1)
        given = {key: value for key in ("start", "end") if (value := getattr(self, key)) not in (None, AUTO)}
        for key, value in given.items():
            if not value.strip():
                raise ConfigError(f"reasoning.{key}={value!r} must be the text of a marker, or null")
        if self.start != self.end and len(given) < 2:
            raise ConfigError(
                f"reasoning.start={self.start} and reasoning.end={self.end}: set both to the texts of the model's "
                "markers, or both to auto or null"
            )
        if self.start is None:
            self._check_unused("reasoning.start is null")

    def resolve(self, markers: tuple[str, str] | None) -> None:
        """Put known markers, or null, in the place of auto. Raises ConfigError for settings that are then of no use."""
        if self.start == AUTO:
            self.start, self.end = markers or (None, None)
            if markers is None:
                self._check_unused("no known markers are in the chat template")

    def _check_unused(self, why: str) -> None:
        if self.max_tokens is not None or self.stop_in_thinking:
            raise ConfigError(
                f"reasoning.max_tokens and reasoning.stop_in_thinking need to know where thinking ends, and {why}: "
                "set reasoning.start and reasoning.end to the texts that open and close it"
            )

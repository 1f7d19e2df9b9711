"""The keyword arguments of `LLM` as sections of the config."""

from __future__ import annotations

import dataclasses
from typing import Any

from batchrun.config import EmbedConfig, EngineConfig, ModelConfig, RankConfig
from batchrun.engine.checkpoint import Checkpoint
from batchrun.errors import ConfigError

READING = {"embed": EmbedConfig, "rank": RankConfig}  # the sections of tasks that only read, by task


def split_options(
    model: str, options: dict[str, Any], reading: type[EmbedConfig | RankConfig] | None
) -> tuple[ModelConfig, EngineConfig, EmbedConfig | RankConfig | None]:
    """The sections of the config that options are of; those of `reading` too, if that is given.

    Raises ConfigError for an option that none of them has.
    """
    sections: list[type[Any]] = [ModelConfig, EngineConfig, *([reading] if reading else [])]
    names = [{f.name for f in dataclasses.fields(section)} for section in sections]
    known = set().union(*names)
    if unknown := set(options) - known:
        raise ConfigError(f"LLM() has no option {', '.join(sorted(unknown))}: there are {', '.join(sorted(known))}")
    chosen = [{key: value for key, value in options.items() if key in own} for own in names]
    chosen[0].setdefault("path", model)
    made = [section(**given) for section, given in zip(sections, chosen, strict=True)]
    return made[0], made[1], made[2] if reading else None


def identity(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """What is equal for equal models, whatever computes them: their files and what changes completions."""
    names = sorted(f.name for f in dataclasses.fields(ModelConfig) if f.metadata["identity"])
    model = tuple((name, getattr(checkpoint.model, name)) for name in names)
    return checkpoint.identity(), repr(checkpoint.adapter_identity()), model

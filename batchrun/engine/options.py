"""The keyword arguments of `LLM` as sections of the config."""

from __future__ import annotations

import dataclasses
import os
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from batchrun.config import EmbedConfig, EngineConfig, ModelConfig, RankConfig
from batchrun.engine.checkpoint import Checkpoint
from batchrun.errors import ConfigError

READING = {"embed": EmbedConfig, "rank": RankConfig}  # the sections of tasks that only read, by task


def split_options(
    model: str, options: dict[str, Any], reading: type[EmbedConfig | RankConfig] | None
) -> tuple[ModelConfig, EngineConfig, EmbedConfig | RankConfig | None]:
    """The sections of the config that options are of; those of `reading` too, if that is given.

    Raises ConfigError for an option that none of them has, or whose value is of another type.
    """
    sections: list[type[Any]] = [ModelConfig, EngineConfig, *([reading] if reading else [])]
    names = [{f.name for f in dataclasses.fields(section)} for section in sections]
    known = set().union(*names)
    if unknown := set(options) - known:
        raise ConfigError(f"LLM() has no option {', '.join(sorted(unknown))}: there are {', '.join(sorted(known))}")
    chosen = [{key: value for key, value in options.items() if key in own} for own in names]
    chosen[0].setdefault("path", model)
    for section, given in zip(sections, chosen, strict=True):
        _check_types(section, given)
    made = [section(**given) for section, given in zip(sections, chosen, strict=True)]
    return made[0], made[1], made[2] if reading else None


def _check_types(section: type[Any], given: dict[str, Any]) -> None:
    """Raise ConfigError for a value of another type than its field's; paths and whole numbers may stand for texts."""
    hints = get_type_hints(section)
    for name, value in given.items():
        kinds = _kinds(hints[name])
        if isinstance(value, bool):
            fits = bool in kinds
        elif str in kinds and isinstance(value, os.PathLike | int):
            given[name], fits = str(value), True
        else:
            fits = isinstance(value, kinds) or (isinstance(value, int) and float in kinds)
        if not fits:
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ConfigError(f"LLM({name}={value!r:.60}) must be {wanted}")


def _kinds(hint: Any) -> tuple[type, ...]:
    """The classes that a type hint of a config allows."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _kinds(part))
    return (get_origin(hint) or hint,)


def identity(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """What is equal for equal models, whatever computes them: their files and what changes completions."""
    names = sorted(f.name for f in dataclasses.fields(ModelConfig) if f.metadata["identity"])
    model = tuple((name, getattr(checkpoint.model, name)) for name in names)
    return checkpoint.identity(), repr(checkpoint.adapter_identity()), model

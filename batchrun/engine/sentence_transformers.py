"""What the files of sentence-transformers beside a model say of its embeddings, read without that package."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchrun.engine.support import UnsupportedModel
from batchrun.errors import ConfigError

MODULES = "modules.json"
# By the key that is true in the folder of the Pooling module.
POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
# Newer files name it in one key.
POOLING_NAMES = {"weightedmean": "weighted_mean", "lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}
NO_EFFECT = ("Dropout",)


@dataclass(slots=True)
class SentenceTransformer:
    """The modules that follow the transformer, and how texts are prepared for it."""

    pooling: str = "mean"
    dense: list[Path] = field(default_factory=list)
    size: int | None = None  # numbers that come out of the last dense layer; None: there is none
    normalize: bool = False
    max_length: int | None = None  # tokens, special ones among them
    lower_case: bool = False
    pools_prompt: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_sentence_transformer(folder: Path, pooling: str = "auto") -> SentenceTransformer | None:
    """None for a folder without modules.json. The mode that its files name is not looked at if `pooling` is another.

    Raises UnsupportedModel for a module that is not known here, ConfigError for a file that is not what it should be.
    """
    if not (folder / MODULES).is_file():
        return None
    found = SentenceTransformer()
    for module in _read(folder / MODULES):
        kind, place = str(module["type"]).rpartition(".")[2], folder / module["path"]
        if found.normalize and kind not in NO_EFFECT:
            raise UnsupportedModel(f"{folder / MODULES}: {kind} comes after Normalize, which has to be the last module")
        if kind == "Transformer":
            _read_transformer(found, place)
        elif kind == "Pooling":
            config = _read(place / "config.json")
            found.pooling = _pooling(config, place) if pooling == "auto" else pooling
            found.pools_prompt = config.get("include_prompt", True)
        elif kind == "Dense":
            found.dense.append(place)
            found.size = _read(place / "config.json")["out_features"]
        elif kind == "Normalize":
            found.normalize = True
        elif kind not in NO_EFFECT:
            raise UnsupportedModel(
                f"{folder / MODULES} has a module {kind}: known are Transformer, Pooling, Dense, Normalize and Dropout"
            )
    config = _read(folder / "config_sentence_transformers.json", {})
    found.prompts = {name: text for name, text in (config.get("prompts") or {}).items() if isinstance(text, str)}
    found.default_prompt = config.get("default_prompt_name")
    return found


def _read_transformer(found: SentenceTransformer, folder: Path) -> None:
    """The settings of the first module, in a file that older versions named after the family."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        config = _read(path)
        found.max_length = config.get("max_seq_length")
        found.lower_case = config.get("do_lower_case", False)


def _pooling(config: dict[str, Any], folder: Path) -> str:
    modes = [mode for key, mode in POOLING_KEYS.items() if config.get(key)]
    if named := config.get("pooling_mode"):
        modes = [POOLING_NAMES.get(name, name) for name in ([named] if isinstance(named, str) else named)]
    if len(modes) != 1 or modes[0] not in POOLING_KEYS.values():
        raise UnsupportedModel(
            f"{folder / 'config.json'}: it pools by {' and '.join(modes) or 'no mode'}, and one mode of "
            f"{', '.join(POOLING_KEYS.values())} is needed: choose one with embed.pooling"
        )
    return modes[0]


def _read(path: Path, default: Any = None) -> Any:
    if default is not None and not path.is_file():
        return default
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error

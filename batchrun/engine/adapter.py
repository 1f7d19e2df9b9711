"""LoRA adapters as peft saves them: which products they change, and by how much. Nothing is computed here."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from batchrun.config import ModelConfig
from batchrun.engine.support import is_vision_language
from batchrun.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILE = "adapter_model.safetensors"
FACTOR = re.compile(r"base_model\.model\.(?P<product>.+)\.lora_(?P<side>[AB])\.weight")
# Settings of peft that the product with an adapter does not depend on, or that are read below. Any other that is set
# makes it something else than W + scale B A.
UNDERSTOOD = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# Other ways to begin a training take something out of the base weights, which are then not the base model's own.
PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


class Factors(NamedTuple):
    """What an adapter adds to the weight of one product: scale B A."""

    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA checkpoint in a local folder. `key` is the setting that names it, for messages."""

    key: str
    folder: Path
    products: Mapping[str, Factors]  # by the product's name in the model

    def identity(self) -> str:
        """sha256 over its settings and weights."""
        digest = hashlib.sha256()
        for name in (CONFIG_FILE, WEIGHT_FILE):
            digest.update(f"{name}:{(self.folder / name).stat().st_size};".encode())
            with (self.folder / name).open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        return digest.hexdigest()

    def read(self) -> dict[str, tuple[Any, Any]]:
        """By product, A [rank, in] and scale B [out, rank], float32 torch tensors on the CPU."""
        from safetensors.torch import load_file

        tensors = load_file(self.folder / WEIGHT_FILE)
        found: dict[str, tuple[Any, Any]] = {}
        for product, factors in self.products.items():
            a, b = (tensors[f"base_model.model.{product}.lora_{side}.weight"].float() for side in "AB")
            found[product] = a, b * factors.scale
        return found


def open_adapters(model: ModelConfig, config: Any, purpose: str) -> tuple[Adapter | None, dict[str, Adapter]]:
    """`model.adapter`, if there is one, and `model.adapters` by name; `config` is that of the model they are for.

    Raises ConfigError for files that are missing or damaged, for kinds that are not plain LoRA, and for adapters that
    do not fit the model.
    """
    named = {f"model.adapters.{name}": path for name, path in model.adapters.items()}
    given = named or ({} if model.adapter is None else {"model.adapter": model.adapter})
    if not given:
        return None, {}
    if purpose != "generate":
        raise ConfigError(f"{next(iter(given))} is for models that generate: merge it into the weights with peft first")
    shapes = product_shapes(model, config)
    opened = [_open(key, Path(path).expanduser().resolve(), shapes) for key, path in given.items()]
    return (None, dict(zip(model.adapters, opened, strict=True))) if named else (opened[0], {})


def product_shapes(model: ModelConfig, config: Any) -> dict[str, tuple[int, int]]:
    """(in, out) of each linear product of a model, by name, from its config alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto_class = AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM
    with torch.device("meta"):
        module = auto_class.from_config(config, trust_remote_code=model.trust_remote_code)
    return {name: features(part) for name, part in module.named_modules() if is_product(part)}


def is_product(module: Any) -> bool:
    """Whether a module is x W^T + b and nothing else."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    return type(module) in (Linear, Conv1D)


def features(module: Any) -> tuple[int, int]:
    """(in, out) of a product; `Conv1D` of transformers keeps its weight as [in, out]."""
    return (module.nx, module.nf) if hasattr(module, "nx") else (module.in_features, module.out_features)


def _open(key: str, folder: Path, shapes: Mapping[str, tuple[int, int]]) -> Adapter:
    here = f"{key}={folder}"
    settings = _settings(here, folder)
    _check_kind(here, settings)
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in _tensor_shapes(here, folder).items():
        match = FACTOR.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"{here}: its tensor {name} is no factor of a linear product: only plain LoRA of such products is there"
            )
        sides.setdefault(match["product"], {})[match["side"]] = shape
    if not sides:
        raise ConfigError(f"{here}: {WEIGHT_FILE} holds no tensors: save the adapter again")
    return Adapter(key, folder, {name: _factors(here, settings, shapes, name, sides[name]) for name in sorted(sides)})


def _factors(
    here: str,
    settings: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, int]],
    name: str,
    sides: Mapping[str, tuple[int, ...]],
) -> Factors:
    base = settings.get("base_model_name_or_path")
    remedy = f"use the model that it was made for{f', {base}' if base else ''}"
    if name not in shapes:
        raise ConfigError(f"{here} changes {name}, and this model has no linear product of that name: {remedy}")
    if sides.keys() != {"A", "B"}:
        raise ConfigError(f"{here}: of {name} only lora_{next(iter(sides))} is there: copy or save the adapter again")
    rank = int(_of_pattern(settings, "rank_pattern", name, settings["r"]))
    inputs, outputs = shapes[name]
    if sides["A"] != (rank, inputs) or sides["B"] != (outputs, rank):
        raise ConfigError(
            f"{here}: {name} of this model is [{outputs}, {inputs}], and the adapter's factors are "
            f"{list(sides['B'])} and {list(sides['A'])} at rank {rank}: {remedy}"
        )
    alpha = float(_of_pattern(settings, "alpha_pattern", name, settings["lora_alpha"]))
    return Factors(rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def _settings(here: str, folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(f"{here} is not a folder: name one with {CONFIG_FILE} and {WEIGHT_FILE}, as peft saves them")
    path = folder / CONFIG_FILE
    try:
        settings = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{here} has no {CONFIG_FILE}: name the folder that peft saved the adapter in") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} is not the settings of an adapter: save it again")
    return settings


def _check_kind(here: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the adapter is W + scale B A and nothing else."""
    remedy = "merge it into the weights with peft's merge_and_unload, save those, and set model to their folder"
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{here}: peft_type={settings.get('peft_type')!r} is not LORA: {remedy}")
    if settings.get("bias", "none") != "none":
        raise ConfigError(f"{here}: bias={settings['bias']!r} must be none: {remedy}")
    begun = settings.get("init_lora_weights")
    if begun not in PLAIN_BEGINNINGS:
        raise ConfigError(
            f"{here}: init_lora_weights={begun!r} trains against base weights that are changed first: save it with "
            "path_initial_model_for_weight_conversion of peft's save_pretrained"
        )
    for key in sorted(key for key, value in settings.items() if value and key not in UNDERSTOOD):
        raise ConfigError(f"{here}: {key}={settings[key]!r} makes it more than plain LoRA: {remedy}")
    for key in ("r", "lora_alpha"):
        if not isinstance(settings.get(key), (int, float)) or settings[key] <= 0:
            raise ConfigError(f"{here}: {key}={settings.get(key)!r} must be a number above 0: save the adapter again")


def _tensor_shapes(here: str, folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHT_FILE
    if not path.is_file():
        raise ConfigError(f"{here} has no {WEIGHT_FILE}: save the adapter with safe_serialization=True")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or cut off ({error}): copy or download it again") from error


def _of_pattern(settings: Mapping[str, Any], key: str, name: str, default: Any) -> Any:
    """The value of the first pattern that the end of a product's name matches, as peft looks it up."""
    patterns = settings.get(key) or {}
    return next((value for end, value in patterns.items() if re.match(rf"(.*\.)?({end})$", name)), default)

"""Scales of keys and values in a checkpoint, for pages of fp8: what is stored times its scale is the number.

Tools that calibrate them write one number for each layer, K and V, under names of their own: `self_attn.k_scale`
(compressed-tensors), `self_attn.k_proj.k_scale` (ModelOpt), `self_attn.k_proj.output_scale` (older compressed-tensors,
Quark), `self_attn.attn.k_scale` (vLLM) and `self_attn.kv_scale`, one for both (AutoFP8).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from batchrun.engine.attention.base import LayerGeometry
from batchrun.errors import ConfigError

log = logging.getLogger(__name__)

LAYER = r"(?:^|\.)(?:layers|h|blocks)\.(?P<layer>\d+)\.\w*att\w*\."
NAMES = (
    re.compile(LAYER + r"(?:attn\.|\w+_proj\.)?(?P<parts>kv|k|v)_scale"),
    re.compile(LAYER + r"(?P<parts>k|v)_proj\.output_scale"),
)
OTHER_PARTS = ("vision", "visual", "audio")  # of models whose language part is used alone
SETTING = "engine.kv_cache_dtype=fp8"

Scales = list[tuple[float, float]]


def read_scales(folder: Path, layers: Sequence[LayerGeometry], count: int) -> Scales:
    """The scales of K and of V for each attention call of a model of `count` decoder layers; 1 where there is none.

    Raises ConfigError for scales of heads or channels, for any that is not above 0, and for those of a model whose
    layers do not attend once each.
    """
    found: dict[tuple[int, str], float] = {}
    for name, layer, parts, value in _stored(folder):
        if value.numel() != 1:
            raise ConfigError(
                f"{SETTING} has one scale for the keys of a layer and one for its values, and {name} in {folder} has "
                f"{value.numel()}: set engine.kv_cache_dtype=auto"
            )
        number = float(value.float())
        if not 0 < number < float("inf"):
            raise ConfigError(f"{name} in {folder} is {number}, and a scale must be above 0: the file is damaged")
        found |= {(layer, part): number for part in parts}
    if not found:
        log.info("the checkpoint has no scales of keys and values: numbers beyond 448 are cut")
        return [(1.0, 1.0)] * len(layers)
    if len(layers) != count or max(layer for layer, _ in found) >= count:
        raise ConfigError(
            f"{SETTING}: the scales in {folder} are of {1 + max(layer for layer, _ in found)} layers, and this model "
            f"of {count} attends {len(layers)} times: set engine.kv_cache_dtype=auto"
        )
    log.info("%d scales of keys and values are in the checkpoint, for %d layers", len(found), count)
    owners = [i if layer.source is None else layer.source for i, layer in enumerate(layers)]
    return [(found.get((i, "k"), 1.0), found.get((i, "v"), 1.0)) for i in owners]


def _stored(folder: Path) -> Iterator[tuple[str, int, str, torch.Tensor]]:
    """Name, layer, k or v or both, and value of each scale in the safetensors files of a folder."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                found = next((match for pattern in NAMES if (match := pattern.search(name))), None)
                if found and found.end() == len(name) and not any(part in name for part in OTHER_PARTS):
                    yield name, int(found["layer"]), found["parts"], file.get_tensor(name)

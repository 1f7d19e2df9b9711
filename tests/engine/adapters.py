"""Random LoRA adapters as peft saves them, and the same models with them merged, by the formula alone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

ATTENTION = ("q_proj", "v_proj")


def products(folder: Path, ends: Sequence[str]) -> dict[str, Any]:
    """The linear products of a model whose names end with one of these."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kinds = (torch.nn.Linear, Conv1D)
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds) and name.endswith(tuple(ends))}


def make_adapter(
    folder: Path, base: Path, seed: int, ends: Sequence[str] = ATTENTION, rank: int = 4, **settings: Any
) -> Path:
    """A random adapter of the products of `base` whose names end with one of these, large enough to be heard."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, product in products(base, ends).items():
        # nn.Linear keeps [out, in], Conv1D [in, out].
        shape = product.weight.shape if isinstance(product, torch.nn.Linear) else product.weight.shape[::-1]
        own = settings.get("rank_pattern", {}).get(name.rpartition(".")[2], rank)
        for side, size in (("A", (own, shape[1])), ("B", (shape[0], own))):
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = 0.3 * torch.randn(size, generator=generator)
    assert tensors
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", "init_lora_weights": True, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def scale_of(settings: dict[str, Any], name: str, rank: int) -> float:
    alpha = float(settings.get("alpha_pattern", {}).get(name.rpartition(".")[2], settings["lora_alpha"]))
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


@torch.no_grad()
def merged(base: Path, adapter: Path | None) -> Any:
    """transformers' model with W + scale B A in the place of each W."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    if adapter is None:
        return model
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key, a in tensors.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = scale_of(settings, name, len(a)) * (tensors[key.replace("lora_A", "lora_B")] @ a)
        module = model.get_submodule(name)
        weight = module.weight + (delta if isinstance(module, torch.nn.Linear) else delta.T)
        module.weight = torch.nn.Parameter(weight)
    return model

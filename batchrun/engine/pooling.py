"""From hidden states to one vector a text, by the formulas of sentence-transformers' Pooling, Dense and Normalize."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from batchrun.engine.pooler import EmbeddingPooler
from batchrun.engine.support import UnsupportedModel
from batchrun.errors import ConfigError

DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


def pool(hidden: torch.Tensor, lengths: torch.Tensor, pooling: str, skip: int = 0) -> torch.Tensor:
    """Vectors float32 [B, H] of hidden states [B, L, H], of which the first `lengths` [B] of each row are tokens.

    `pooling` is a mode of embed.pooling; the first `skip` tokens count for none but cls and last.
    """
    if pooling == "cls":
        return hidden[:, 0].float()
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1].float()
    places = torch.arange(hidden.shape[1], device=hidden.device)
    real = (places < lengths[:, None]) & (places >= skip)
    hidden = hidden.float()
    if pooling == "max":
        return hidden.masked_fill(~real[..., None], -torch.inf).amax(dim=1)
    weights = real.float() * (places + 1 if pooling == "weighted_mean" else 1)
    total = weights.sum(dim=1, keepdim=True).clamp(min=1e-9)
    # One product a row, where an elementwise one would write another tensor of the size of `hidden`.
    summed = (weights[:, None] @ hidden)[:, 0]
    return summed / (total.sqrt() if pooling == "mean_sqrt_len" else total)


class Embed(torch.nn.Module):
    """Hidden states to embeddings, as `pooler` says. Raises ConfigError or UnsupportedModel for its dense layers."""

    def __init__(self, pooler: EmbeddingPooler, allow_pickle: bool = False) -> None:
        super().__init__()
        self.pooler = pooler
        self.dense = torch.nn.Sequential(*(_load_dense(folder, allow_pickle) for folder in pooler.dense))

    def forward(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """float32 [B, size] of hidden [B, L, H] and lengths [B]."""
        pooler = self.pooler
        vectors: torch.Tensor = self.dense(pool(hidden, lengths, pooler.pooling, pooler.skip))[:, : pooler.size]
        return F.normalize(vectors, dim=-1) if pooler.normalize else vectors


def _load_dense(folder: Path, allow_pickle: bool) -> torch.nn.Module:
    """The layer of a folder with config.json and weights, in float32."""
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in DENSE_ACTIVATIONS:
        raise UnsupportedModel(f"{folder}: its activation {name} is not one of {', '.join(DENSE_ACTIVATIONS)}")
    if (folder / "model.safetensors").is_file():
        weights = load_file(folder / "model.safetensors")
    elif allow_pickle and (folder / "pytorch_model.bin").is_file():
        weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise ConfigError(f"{folder} has no model.safetensors: convert its weights, or set model.allow_pickle=true")
    layer = torch.nn.Linear(config["in_features"], config["out_features"], bias="linear.bias" in weights)
    layer.load_state_dict({key.removeprefix("linear."): value.float() for key, value in weights.items()})
    return torch.nn.Sequential(layer, getattr(torch.nn, name)())

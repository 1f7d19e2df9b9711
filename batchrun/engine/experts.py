"""Experts as packed products: tokens sorted by expert, one gated MLP for each expert that has any, summed by weight.

Only the experts themselves are replaced. Whatever chooses them, and experts that all tokens share, stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from batchrun.engine.linear import holds_floats
from batchrun.engine.mlp import ACTIVATIONS, GatedMLP

PROBE_TOKENS = 11
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}  # relative, as for whole layers


class Experts(torch.nn.Module):
    """In the place of a transformers module with `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I]."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(
            GatedMLP(SimpleNamespace(gate_up_proj=_linear(up), down_proj=_linear(down), act_fn=module.act_fn))
            for up, down in zip(module.gate_up_proj.detach(), module.down_proj.detach(), strict=True)
        )

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], the k experts of each token [T, k] and their weights [T, k] -> [T, H].

        An index past the last expert stands for none.
        """
        chosen = top_k_index.flatten()
        order = chosen.argsort()
        given = x[order // top_k_index.shape[1]]
        computed = torch.zeros_like(given)
        start = 0
        for expert, count in enumerate(torch.bincount(chosen, minlength=len(self.experts)).tolist()):
            if count and expert < len(self.experts):
                stop = start + count
                computed[start:stop] = self.experts[expert](given[start:stop])
                start = stop
        by_token = torch.empty_like(computed)
        by_token[order] = computed
        weights = top_k_weights[:, None].to(x.dtype)
        return torch.bmm(weights, by_token.view(len(x), -1, x.shape[1]))[:, 0]


@torch.inference_mode()
def pack_experts(module: Any, form: Callable[[Any], torch.nn.Module] = Experts) -> int:
    """Replace by `form` all experts below a module that gives the same numbers; returns how many sets of them."""
    replaced = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            packed = _packed(child, form) if _has_known_parts(child) else None
            if packed is not None:
                setattr(parent, name, packed)
                replaced += 1
    return replaced


def _packed(module: Any, form: Callable[[Any], torch.nn.Module]) -> torch.nn.Module | None:
    """The packed form, or None if it gives other numbers."""
    count, hidden, _ = module.down_proj.shape
    dtype, chosen = module.down_proj.dtype, min(2, count)
    x = torch.sin(torch.arange(PROBE_TOKENS * hidden).float()).view(PROBE_TOKENS, hidden).to(dtype)
    index = torch.stack([torch.arange(t, t + chosen) % count for t in range(PROBE_TOKENS)])
    weights = torch.linspace(0.1, 0.9, PROBE_TOKENS * chosen).view(PROBE_TOKENS, chosen).to(dtype)
    x, index, weights = (part.to(module.down_proj.device) for part in (x, index, weights))
    try:
        expected = module(x, index, weights).float()
        packed = form(module)
        difference = (packed(x, index, weights).float() - expected).norm()
    except (AttributeError, RuntimeError, ValueError, TypeError):
        return None
    return packed if difference <= TOLERANCE[dtype] * expected.norm() else None


def _has_known_parts(module: Any) -> bool:
    weights = dict(module.named_parameters(recurse=False))
    if set(weights) != {"gate_up_proj", "down_proj"} or any(weight.dim() != 3 for weight in weights.values()):
        return False
    if not all(map(holds_floats, weights.values())):
        return False
    experts, hidden, inner = weights["down_proj"].shape
    return weights["gate_up_proj"].shape == (experts, 2 * inner, hidden) and (
        type(getattr(module, "act_fn", None)).__name__ in ACTIVATIONS
    )


def _linear(weight: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(weight=weight, bias=None, out_features=len(weight))

"""The half of a decoder layer after its attention: a gated MLP with merged products, or the original block as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from batchrun.engine.linear import PackedLinear, is_plain
from batchrun_kernels.cpu.after import GELU_TANH, SILU
from batchrun_kernels.cpu.layer import gelu_tanh_and_mul, silu_and_mul
from batchrun_kernels.cpu.scalar import elements


class Activation(NamedTuple):
    """act(gate) * up, as a part of the product or as a pass of its own over [T, 2 I] -> [T, I]."""

    kind: int
    apart: Callable[[np.ndarray, np.ndarray], None]


ACTIVATIONS = {
    "SiLUActivation": Activation(SILU, silu_and_mul),
    "SiLU": Activation(SILU, silu_and_mul),
    "GELUTanh": Activation(GELU_TANH, gelu_tanh_and_mul),
}


class GatedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up as one product."""

    rows = 256  # tokens at once: their activations stay in the cache of a core

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.gate_up = PackedLinear(parts(module, "gate_up_proj", ("gate_proj", "up_proj")))
        self.down = PackedLinear([module.down_proj])
        self.activation = ACTIVATIONS[_activation_name(module)]

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, H]; `add` [T, H] is added before the result is rounded."""
        inner = self.gate_up.gated(x, self.activation.kind)
        if inner is None:
            gated = self.gate_up(x)
            inner = x.new_empty(len(x), self.down.in_features)
            self.activation.apart(elements(gated), elements(inner))
        return self.down(inner, add)


class OriginalMLP(torch.nn.Module):
    """A block of another shape: experts, or an MLP without a gate."""

    rows = 8192  # experts read their weights for each call: the more tokens share that, the better

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, H]; `add` [T, H] is added to the result."""
        out = self.module(x[None])
        y: torch.Tensor = (out[0] if isinstance(out, tuple) else out)[0]  # some return their router's logits too
        return y if add is None else y + add


def mlp_forms(module: Any) -> list[GatedMLP | OriginalMLP]:
    """What may stand for a layer's MLP, the fastest first; whether it gives the same numbers is for the caller."""
    return [GatedMLP(module), OriginalMLP(module)] if _is_gated(module) else [OriginalMLP(module)]


def parts(module: Any, merged: str, single: tuple[str, ...]) -> list[Any]:
    """A product that some families store merged and others in parts."""
    return [getattr(module, merged)] if hasattr(module, merged) else [getattr(module, name) for name in single]


def busy_children(module: Any) -> set[str]:
    """Names of the children that compute something: dropout at inference and Identity do not."""
    idle = (torch.nn.Dropout, torch.nn.Identity)
    return {name for name, child in module.named_children() if not isinstance(child, idle)}


def _is_gated(module: Any) -> bool:
    known = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}
    if not busy_children(module) <= known or not hasattr(module, "down_proj"):
        return False
    plain = all(is_plain(child) for name, child in module.named_children() if name.endswith("_proj"))
    return plain and _activation_name(module) in ACTIVATIONS


def _activation_name(module: Any) -> str:
    return type(getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)).__name__

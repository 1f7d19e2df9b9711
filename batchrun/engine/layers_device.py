"""The fused decoder layer of layers.py for a GPU: the library's products, with Triton kernels for what lies between.

Beside its four products a layer reads and writes its activations four times: for the two norms, with the residual
addition in the second, for the norm and RoPE of the heads, which also brings K and V to the pages of a backend that
says where they are, and for the gate of the MLP.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch

from batchrun.engine import hook
from batchrun.engine.attention.base import LayerCall
from batchrun.engine.layers import (
    NORM_NAMES,
    TOLERANCE,
    Seen,
    decoder_layers,
    has_known_parts,
    mlp_of,
    plain_attention,
    replace_layers,
)
from batchrun.engine.linear import PackedLinear
from batchrun.engine.mlp import GatedMLP, OriginalMLP, mlp_forms, parts
from batchrun_kernels.act_and_mul import act_and_mul
from batchrun_kernels.cpu.after import GELU_TANH, SILU
from batchrun_kernels.rms_norm import add_rms_norm, rms_norm
from batchrun_kernels.rope_and_cache import HeadNorm, rope, rope_and_cache

log = logging.getLogger(__name__)

ACTIVATIONS = {SILU: "silu", GELU_TANH: "gelu_tanh"}


class DeviceNorm:
    """RMS norm with the original's weight; `unit_offset` is Gemma's 1 + w."""

    def __init__(self, module: Any, unit_offset: bool) -> None:
        self.weight = module.weight.detach()
        self.eps = float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 1e-6)
        self.unit_offset = unit_offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H]."""
        return rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual [T, H], and the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps, unit_offset=self.unit_offset)


class DeviceMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, form: GatedMLP) -> None:
        super().__init__()
        self.gate_up, self.down = form.gate_up, form.down
        self.activation = ACTIVATIONS[form.activation.kind]

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, H]; `add` [T, H] is added to the result."""
        result: torch.Tensor = self.down(act_and_mul(self.gate_up(x), self.activation), add)
        return result


@dataclass(frozen=True, slots=True)
class Switches:
    """What cannot be read off a layer's parts and is found by trying."""

    unit_offset: bool
    rotation: Literal["halves", "pairs", "none"]


class DeviceLayer(torch.nn.Module):
    """Takes and returns what a transformers decoder layer does: hidden states [1, T, H]."""

    def __init__(self, layer: Any, mlp: DeviceMLP | OriginalMLP, call: LayerCall, switches: Switches) -> None:
        super().__init__()
        attention = layer.self_attn
        self.call, self.mlp, self.rotation = call, mlp, switches.rotation
        if hasattr(layer, "attention_type"):
            self.attention_type = layer.attention_type
        self.qkv = PackedLinear(parts(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")))
        self.output = PackedLinear([attention.o_proj])
        self.head_dim = int(attention.head_dim)
        self.heads = self.output.in_features // self.head_dim
        self.kv_heads = (self.qkv.out_features // self.head_dim - self.heads) // 2
        offset = switches.unit_offset
        self.norms = {name: DeviceNorm(getattr(layer, name), offset) for name in NORM_NAMES if hasattr(layer, name)}
        self.head_norm: HeadNorm | None = None
        if hasattr(attention, "q_norm"):
            q, k = DeviceNorm(attention.q_norm, offset), DeviceNorm(attention.k_norm, offset)
            self.head_norm = HeadNorm(q.weight, k.weight, q.eps, offset)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, **_: Any) -> torch.Tensor:
        x, norms = hidden_states[0], self.norms
        mixed: torch.Tensor = self.output(self._attend(norms["input_layernorm"](x), position_embeddings))
        if "pre_feedforward_layernorm" in norms:
            inner, h = norms["pre_feedforward_layernorm"].of_sum(norms["post_attention_layernorm"](mixed), x)
            out = h + norms["post_feedforward_layernorm"](self.mlp(inner))
        else:
            inner, h = norms["post_attention_layernorm"].of_sum(mixed, x)
            out = self.mlp(inner, add=h)
        return out[None]

    def _attend(self, x: torch.Tensor, position_embeddings: Any) -> torch.Tensor:
        """Attention over the normed [T, H] before its output product: [T, heads * head_dim]."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.rotation == "none":
            if self.head_norm is not None:
                raise ValueError("a norm of the heads without rotation has no kernel")
        else:
            cos, sin = (part[0] for part in position_embeddings)
            pages = hook.destination(self.call)
            if pages is not None:
                rope_and_cache(q, k, v, cos, sin, pages, norm=self.head_norm, interleaved=self.rotation == "pairs")
                return hook.attend_written(self.call, q).reshape(len(x), -1)
            rope(q, k, cos, sin, norm=self.head_norm, interleaved=self.rotation == "pairs")
        return hook.attend(self.call, q, k, v).reshape(len(x), -1)


def fuse_on_device(model: Any) -> int:
    """Put fused layers into a PagedModel where they are shown to compute the same; returns how many were replaced."""
    replaced = replace_layers(model, fuse_device_layer)
    log.info("%d of %d layers are fused", replaced, len(decoder_layers(model.module) or model.layers))
    return replaced


@torch.inference_mode()
def fuse_device_layer(layer: Any, seen: Seen, dtype: torch.dtype) -> DeviceLayer | None:
    """The fused form of a layer, or None if it has another shape or gives other numbers."""
    if not has_known_parts(layer) or not isinstance(seen.output, torch.Tensor):
        return None
    change = (seen.output - seen.hidden_states).float().norm()
    forms = [DeviceMLP(form) if isinstance(form, GatedMLP) else form for form in mlp_forms(mlp_of(layer))]
    rotations: tuple[Literal["halves", "pairs", "none"], ...] = ("halves", "pairs", "none")
    for form, offset, rotation in product(forms, (False, True), rotations):
        try:
            fused = DeviceLayer(layer, form, seen.call, Switches(offset, rotation))
            with hook.forward_context(plain_attention):
                output = fused(seen.hidden_states, **seen.keywords)
        except (AttributeError, RuntimeError, ValueError, TypeError, KeyError):
            continue
        if (output - seen.output).float().norm() <= TOLERANCE[dtype] * change:
            return fused
    return None

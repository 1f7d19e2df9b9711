"""One fused decoder layer in the place of transformers' own, where it is shown to compute the same.

Most decoders are one shape: norm, QKV, RoPE, attention, output, residual, norm, gated MLP, residual, with a few
switches. A layer whose parts have that shape is rebuilt from its own weights (QKV and gate/up as one product
each, weights packed, one pass per elementwise part) and takes the original's place only if it gives the
original's numbers on the same inputs. An MLP of another shape is called inside as it is; every other layer stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from batchrun.engine import hook
from batchrun.engine.adapted import row_chunks
from batchrun.engine.attention.base import LayerCall
from batchrun.engine.checkpoint import position_limit
from batchrun.engine.device import runs_triton
from batchrun.engine.experts import pack_experts
from batchrun.engine.linear import PackedHead, PackedLinear, is_plain
from batchrun.engine.mlp import GatedMLP, OriginalMLP, busy_children, mlp_forms, parts
from batchrun_kernels.cpu.layer import rms_norm, rotate
from batchrun_kernels.cpu.scalar import elements

log = logging.getLogger(__name__)

ROWS = 256  # tokens at once between attention calls: their activations stay in the cache of a core
PROBE_TOKENS = 11
# Relative error of what the layer adds to its input. In half precision the original rounds between its parts.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}


class Norm:
    """RMS norm with the original's weight; `offset` 1 is Gemma's 1 + w."""

    def __init__(self, module: Any, offset: float) -> None:
        self.weight = (module.weight.detach().float() + offset).numpy()
        self.eps = float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 1e-6)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        rms_norm(elements(x), self.weight, self.eps, elements(out))
        return out


@dataclass(frozen=True, slots=True)
class Switches:
    """What cannot be read off a layer's parts and is found by trying."""

    norm_offset: float
    rotates: bool


class FusedLayer(torch.nn.Module):
    """Takes and returns what a transformers decoder layer does: hidden states [1, T, H]."""

    def __init__(self, layer: Any, mlp: GatedMLP | OriginalMLP, call: LayerCall, switches: Switches) -> None:
        super().__init__()
        attention = layer.self_attn
        self.call = call
        self.rotates = switches.rotates
        if hasattr(layer, "attention_type"):
            self.attention_type = layer.attention_type
        self.qkv = PackedLinear(parts(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")))
        self.output = PackedLinear([attention.o_proj])
        self.head_dim = int(attention.head_dim)
        self.heads = self.output.in_features // self.head_dim
        self.kv_heads = (self.qkv.out_features // self.head_dim - self.heads) // 2
        self.head_norms, self.head_eps = self._head_norms(attention, switches.norm_offset)
        self.norms = {
            name: Norm(getattr(layer, name), switches.norm_offset) for name in NORM_NAMES if hasattr(layer, name)
        }
        self.mlp = mlp
        self.compiled: Callable[[torch.Tensor, Any], torch.Tensor] | None = None  # all of it as one call

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, **_: Any) -> torch.Tensor:
        x = hidden_states[0]
        if self.compiled is not None:
            return self.compiled(x, position_embeddings)[None]
        norms, post = self.norms, "pre_feedforward_layernorm" in self.norms
        mixed = self._attend(x, position_embeddings)
        out = torch.empty_like(x)
        for rows in row_chunks(len(x), self.mlp.rows):
            if post:
                h = x[rows] + norms["post_attention_layernorm"](self.output(mixed[rows]))
                out[rows] = h + norms["post_feedforward_layernorm"](self.mlp(norms["pre_feedforward_layernorm"](h)))
            else:
                h = self.output(mixed[rows], add=x[rows])
                out[rows] = self.mlp(norms["post_attention_layernorm"](h), add=h)
        return out[None]

    def _attend(self, x: torch.Tensor, position_embeddings: Any) -> torch.Tensor:
        """Attention over [T, H] before its output product: [T, heads * head_dim]."""
        qkv = x.new_empty(len(x), self.qkv.out_features)
        for rows in row_chunks(len(x), ROWS):
            qkv[rows] = self.qkv(self.norms["input_layernorm"](x[rows]))
        heads = qkv.view(len(x), -1, self.head_dim)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.rotates:
            cos, sin = (elements(part[0]) for part in position_embeddings)
            turning = heads[:, : self.heads + self.kv_heads]
            rotate(elements(turning), cos, sin, self.head_norms, self.head_eps)
        return hook.attend(self.call, q, k, v).reshape(len(x), -1)

    def _head_norms(self, attention: Any, offset: float) -> tuple[np.ndarray, float]:
        """Weights of q_norm and k_norm per head, [heads + kv heads, head_dim]; [0, 0] if there are none."""
        if not hasattr(attention, "q_norm"):
            return np.empty((0, 0), dtype=np.float32), 0.0
        q, k = Norm(attention.q_norm, offset), Norm(attention.k_norm, offset)
        rows = [q.weight] * self.heads + [k.weight] * self.kv_heads
        return np.stack(rows), q.eps


NORM_NAMES = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
MLP_NAMES = ("mlp", "block_sparse_moe")
ROUTERS = ("gate", "router")  # they choose experts: small, and rounding them differently chooses others


@dataclass(slots=True)
class Seen:
    """What one layer of the original took and gave in a dry forward."""

    hidden_states: torch.Tensor
    keywords: dict[str, Any]
    output: Any
    call: LayerCall


def fuse_model(model: Any, pack: bool = True) -> int:
    """Put fused layers into a PagedModel; returns how many were replaced.

    On the CPU the LM head, experts, and unless `pack` is false the linear products of layers that stay, are packed
    where they are; on a GPU the products of experts are grouped.
    """
    if runs_triton(model.device):
        from batchrun.engine.experts_device import group_experts
        from batchrun.engine.layers_device import fuse_on_device

        group_experts(model)
        return fuse_on_device(model)
    if model.device.type != "cpu":
        return 0
    experts = pack_experts(model.module)
    layers = decoder_layers(model.module)
    replaced = replace_layers(model, fuse_layer)
    head = getattr(model.module, "lm_head", None)
    if type(head) is torch.nn.Linear and is_plain(head):
        model.module.lm_head = PackedHead([head])
    packed = _pack_linears(model, layers or []) if pack else 0
    count = len(layers or model.layers)
    log.info(
        "%d of %d layers are fused; %d sets of experts, %d other products packed", replaced, count, experts, packed
    )
    return replaced


def replace_layers(model: Any, fuse: Callable[[Any, Seen, torch.dtype], Any]) -> int:
    """Put what `fuse` makes of a layer, unless that is None, in its place; returns how many were replaced."""
    layers = decoder_layers(model.module)
    replaced = 0
    # A layer that runs twice has pages for each time; one that reads another's KV gets it from that one's original.
    if layers is not None and len(model.layers) == len(layers) and all(kv.source is None for kv in model.layers):
        seen = watch(model, layers)
        for i, layer in enumerate(layers):
            fused = fuse(layer, seen[i], model.dtype) if i in seen else None
            if fused is not None:
                layers[i] = fused
                replaced += 1
    return replaced


@torch.inference_mode()
def _pack_linears(model: Any, layers: Any) -> int:
    """Pack the linear products that are left in its layers, unless that changes what the model says."""
    places = [place for layer in layers for place in _linears(layer)]
    if not places:
        return 0
    before = dry_logits(model)
    for parent, name, child in places:
        setattr(parent, name, PackedLinear([child]))
    try:
        fits = bool((dry_logits(model) - before).norm() <= TOLERANCE[model.dtype] * before.norm())
    except (AttributeError, RuntimeError, ValueError, TypeError):
        fits = False
    if not fits:
        for parent, name, child in places:
            setattr(parent, name, child)
    return len(places) if fits else 0


def _linears(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Linear products below a module, with their parents and names, but for those that choose or weigh experts."""
    for name, child in module.named_children():
        if type(child) is torch.nn.Linear and is_plain(child) and not hasattr(module, "experts"):
            yield module, name, child
        elif name not in ROUTERS:
            yield from _linears(child)


@torch.inference_mode()
def dry_logits(model: Any, count: int = PROBE_TOKENS) -> torch.Tensor:
    """Logits float32 [count, vocabulary] of a few tokens, in a forward without pages."""
    tokens = torch.arange(count) * 7 % model.vocab_size
    with hook.forward_context(_contiguous_attention):
        logits: torch.Tensor = model.run(tokens, torch.arange(count), torch.arange(count))
    return logits.float()


@torch.inference_mode()
def fuse_layer(layer: Any, seen: Seen, dtype: torch.dtype) -> FusedLayer | None:
    """The fused form of a layer, or None if it has another shape or gives other numbers."""
    if not has_known_parts(layer) or not isinstance(seen.output, torch.Tensor):
        return None
    change = (seen.output - seen.hidden_states).float().norm()
    for mlp, offset, rotates in product(mlp_forms(mlp_of(layer)), (0.0, 1.0), (True, False)):
        try:
            fused = FusedLayer(layer, mlp, seen.call, Switches(offset, rotates))
            with hook.forward_context(plain_attention):
                output = fused(seen.hidden_states, **seen.keywords)
        except (AttributeError, RuntimeError, ValueError, TypeError, KeyError):
            return None
        if _difference(output.float(), seen.output.float(), torch.finfo(dtype).eps) <= TOLERANCE[dtype] * change:
            return fused
    return None


def _difference(x: torch.Tensor, y: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of x - y beyond the rounding of each element: a few large ones would hide what was added to the others."""
    return ((x - y).abs() - eps * y.abs()).clamp(min=0).norm()


def has_known_parts(layer: Any) -> bool:
    """Whether a decoder layer has no parts but those that the fused one has."""
    attention, mlp = getattr(layer, "self_attn", None), mlp_of(layer)
    if attention is None or mlp is None or not hasattr(attention, "head_dim"):
        return False
    known = {"self_attn", *MLP_NAMES, *NORM_NAMES}
    linears = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"}
    if not all(is_plain(child) for name, child in attention.named_children() if name in linears):
        return False
    return busy_children(layer) <= known and busy_children(attention) <= linears | {"q_norm", "k_norm"}


def mlp_of(layer: Any) -> Any:
    """The half of a decoder layer after its attention; None if it has another name."""
    return next((getattr(layer, name) for name in MLP_NAMES if hasattr(layer, name)), None)


def decoder_layers(module: Any) -> Any:
    """The list of decoder layers, the one with as many entries as the config says."""
    count = module.config.get_text_config(decoder=True).num_hidden_layers
    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return lists[0] if lists else None


@torch.inference_mode()
def watch(model: Any, layers: Any) -> dict[int, Seen]:
    """Run the original on a few tokens and note what goes in and out of each layer."""
    seen: dict[int, Seen] = {}
    calls: list[LayerCall] = []

    def note(index: int) -> Callable[..., None]:
        def after(layer: Any, arguments: Any, keywords: Any, output: Any) -> None:
            if len(arguments) == 1 and len(calls) == index + 1:
                seen[index] = Seen(arguments[0].clone(), dict(keywords), output, calls[index])

        return after

    def attend(call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, module: Any) -> torch.Tensor:
        calls.append(call)
        return plain_attention(call, q, k, v, module)

    handles = [layer.register_forward_hook(note(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        tokens = torch.arange(PROBE_TOKENS) * 7 % model.vocab_size
        # Over all positions there are: some layers scale their queries from a position on.
        limit = position_limit(model.module.config.get_text_config(decoder=True)) or PROBE_TOKENS
        places = torch.linspace(0, limit - 1, PROBE_TOKENS).long()
        with hook.forward_context(attend):
            model.run(tokens, places, torch.tensor([PROBE_TOKENS - 1]))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _contiguous_attention(call: LayerCall, *given: Any) -> torch.Tensor:
    """With the strides of a backend's: compiled layers have graphs of their own for others, of one token too."""
    return plain_attention(call, *given).clone(memory_format=torch.contiguous_format)


def plain_attention(call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> torch.Tensor:
    """Causal attention of one row over its own keys, whatever the call's other settings: both sides get the same."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale, enable_gqa=True)
    return out[0].transpose(0, 1)

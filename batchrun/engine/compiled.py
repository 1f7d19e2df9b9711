"""Fused layers that run as one compiled call each, on all cores: see batchrun_kernels/cpu/decoder.py.

A layer that is fused, in bfloat16, with packed products that our kernels read and pages of its own type, needs nothing
from Python between its products. If all layers of a model are such, the threads of a team take the place of torch's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from batchrun.engine.attention.cpu import CpuAttention, Plan
from batchrun.engine.layers import NORM_NAMES, FusedLayer, decoder_layers
from batchrun.engine.linear import PackedHead, PackedLinear
from batchrun.engine.mlp import GatedMLP
from batchrun_kernels.cpu import decoder, matrix
from batchrun_kernels.cpu.team import Team

log = logging.getLogger(__name__)

NO_NORM = np.empty(0, dtype=np.float32)


class Scratch:
    """Memory between the phases of a layer, for as many tokens as there ever were in a step."""

    def __init__(self, widths: dict[int, int]) -> None:
        self._widths = widths
        self._rows = 0
        self._buffers: dict[int, torch.Tensor] = {}

    def write(self, words: np.ndarray, tokens: int) -> None:
        """Set the addresses in `step` words."""
        if tokens > self._rows:
            self._rows = tokens
            self._buffers = {
                place: torch.empty(tokens * width, dtype=torch.bfloat16) for place, width in self._widths.items()
            }
        for place, buffer in self._buffers.items():
            words[place] = buffer.data_ptr()


class CompiledLayer:
    """Takes the place of `FusedLayer.forward` once there are pages: x [T, H] to [T, H]."""

    def __init__(
        self, layer: FusedLayer, after: PackedLinear, backend: CpuAttention, team: Team, scratch: Scratch
    ) -> None:
        pages = backend.pages(layer.call.layer)
        self._backend, self._team, self._scratch, self._index = backend, team, scratch, layer.call.layer
        self._sizes, self._width = pages.sizes, pages.shape.values[2]
        self._layer = layer  # holds the weights whose addresses follow
        self._kept = [layer.norms.get(name) for name in NORM_NAMES]
        weights = [NO_NORM if norm is None else norm.weight for norm in self._kept]
        call, mlp, shape = layer.call, layer.mlp, pages.shape
        assert isinstance(mlp, GatedMLP)
        self._sinks = NO_NORM if call.sinks is None else call.sinks.float().numpy()
        products = (layer.qkv, layer.output, mlp.gate_up, mlp.down)
        panels, pairs, lanes = shape.keys[1:4]
        addresses = [address for linear in products for address in _addresses(linear)]
        addresses += [_address(array) for array in (*weights, layer.head_norms, self._sinks)]
        self._words = np.array(
            [
                layer.output.out_features, layer.heads, layer.kv_heads, layer.head_dim, mlp.down.in_features,
                mlp.activation.kind, layer.qkv.kernel is matrix, layer.rotates, call.window or 0, *addresses,
                backend.block_size, len(pages.keys), panels, pairs, lanes, shape.values[2],
                pages.keys.ctypes.data, pages.values.ctypes.data,
                _addresses(after)[0], after.out_features, after.in_features,
            ],
            dtype=np.int64,
        )  # fmt: skip
        eps = [0.0 if norm is None else norm.eps for norm in self._kept]
        self._reals = np.array([*eps, layer.head_eps, call.scale, call.softcap or 0.0], dtype=np.float64)

    def __call__(self, x: torch.Tensor, position_embeddings: Any) -> torch.Tensor:
        plan = self._backend.plan(self._index)
        if plan.words is None:
            if len(plan.shared.spans):
                self._backend.make_state((len(x), self._layer.heads, self._width))
            plan.words = _step_words(plan, self._backend, len(x))
            self._scratch.write(plan.words, len(x))
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        turns = [part[0].contiguous() for part in position_embeddings] if self._layer.rotates else []
        cos, sin = [part.data_ptr() for part in turns] or (0, 0)
        rotary = turns[0].shape[-1] if turns else 0
        self._team.wake()  # for each layer: what lies between can take longer than followers look for work
        words = (self._words, self._reals, plan.words)
        decoder.run_layer(self._sizes, self._team.control, *words, x.data_ptr(), out.data_ptr(), cos, sin, rotary)
        return out


def can_compile(model: Any, backend: type, dtype: torch.dtype) -> bool:
    """Whether all layers of a model may run as compiled calls over the pages of a backend."""
    layers = decoder_layers(model.module)
    if backend is not CpuAttention or dtype != torch.bfloat16 or layers is None:
        return False
    if len(layers) != len(model.layers) or not all(_fits(layer) for layer in layers):
        return False
    return len({layer.heads for layer in layers}) == 1 and _same_shape(model.layers)


class TorchThreads:
    """torch's threads, which teams take for as long as there are any: both would stand in each other's way."""

    def __init__(self) -> None:
        self._teams = 0
        self._before = 1

    def take(self) -> int:
        """How many there are; torch is left with one until the last `give_back`."""
        if self._teams == 0 or torch.get_num_threads() > 1:
            self._before = torch.get_num_threads()
        self._teams += 1
        torch.set_num_threads(1)
        return self._before

    def give_back(self) -> None:
        """One team is gone."""
        self._teams -= 1
        if self._teams == 0:
            torch.set_num_threads(self._before)


torch_threads = TorchThreads()


def compile_layers(model: Any, backend: CpuAttention, threads: int | None = None) -> None:
    """Let the layers, and a packed head, run as compiled calls by a team; see `can_compile`.

    `threads` are those that torch has unless given. It has them again when the pages are gone.
    """
    layers = decoder_layers(model.module)
    sizes = backend.pages(0).sizes
    taken = torch_threads.take()
    threads = threads or taken
    team = Team(threads, partial(decoder.follow, sizes))
    weakref.finalize(backend, _end, team)
    scratch = Scratch(_widths(layers))
    head = getattr(model.module, "lm_head", None)
    if type(head) is PackedHead and head.kernel is not None:
        head.lead = partial(_lead_product, sizes, team)
    else:
        head = layers[0].qkv
    for layer, after in pairwise([*layers, None]):
        layer.compiled = CompiledLayer(layer, head if after is None else after.qkv, backend, team, scratch)
    backend.team = team
    log.info("%d layers are compiled, for %d threads", len(layers), threads)


def _end(team: Team) -> None:
    team.close()
    torch_threads.give_back()


def _fits(layer: Any) -> bool:
    if type(layer) is not FusedLayer or type(layer.mlp) is not GatedMLP:
        return False
    products = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    if any(type(linear) is not PackedLinear or linear.kernel is None for linear in products):
        return False
    gated = layer.mlp.gate_up.out_features % (2 * layer.mlp.gate_up.kernel.PANEL) == 0
    return gated and len({linear.kernel for linear in products}) == 1


def _same_shape(layers: Sequence[Any]) -> bool:
    """All layers have pages of one shape, and values as wide as keys."""
    shapes = {(layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.source) for layer in layers}
    return len(shapes) == 1 and all(layer.key_dim == layer.value_dim for layer in layers)


def _widths(layers: Any) -> dict[int, int]:
    """Elements of a token in each buffer of `Scratch`."""
    return {
        decoder.NORMED: max(layer.output.out_features for layer in layers),
        decoder.HEADS_OUT: max(layer.qkv.out_features for layer in layers),
        decoder.MIXED: max(layer.output.in_features for layer in layers),
        decoder.RESIDUAL: max(layer.output.out_features for layer in layers),
        decoder.GATED: max(layer.mlp.down.in_features for layer in layers),
    }


def _step_words(plan: Plan, backend: CpuAttention, tokens: int) -> np.ndarray:
    words = np.zeros(decoder.STEP_WORDS, dtype=np.int64)
    state = backend.state
    arrays = {
        decoder.POSITIONS: backend.positions,
        decoder.SLOT_MAPPING: plan.slot_mapping,
        decoder.TABLES: plan.tables,
        decoder.ORDER: plan.order,
        decoder.JOINED: plan.joined,
        decoder.SHARED: plan.shared.spans,
        decoder.SHARED_CUTS: plan.shared.cuts,
        decoder.OWN: plan.own.spans,
        decoder.OWN_CUTS: plan.own.cuts,
        decoder.TOPS: state[0],
        decoder.TOTALS: state[1],
        decoder.SUMS: state[2],
    }
    for place, array in arrays.items():
        words[place] = array.ctypes.data
    words[decoder.TOKENS] = tokens
    words[decoder.TABLE_ROWS], words[decoder.TABLE_COLUMNS] = plan.tables.shape
    words[decoder.ORDER_LENGTH] = len(plan.order)
    words[decoder.SHARED_PIECES], words[decoder.OWN_PIECES] = len(plan.shared.cuts) - 1, len(plan.own.cuts) - 1
    return words


def _lead_product(sizes: np.ndarray, team: Team, linear: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(len(x), linear.out_features)
    weight, bias = _addresses(linear)
    x = x.contiguous()
    tiles = linear.kernel is matrix
    team.wake()
    decoder.run_product(
        sizes,
        team.control,
        x.data_ptr(),
        len(x),
        linear.in_features,
        weight,
        bias,
        out.data_ptr(),
        linear.out_features,
        tiles,
    )
    return out


def _addresses(linear: PackedLinear) -> tuple[int, int]:
    """Of a packed weight and its bias, 0 for none."""
    bias = 0 if linear.bias is None else linear.bias.data_ptr()
    return linear.address(), bias


def _address(array: np.ndarray) -> int:
    return array.ctypes.data if array.size else 0

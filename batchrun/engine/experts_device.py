"""Experts on a GPU: the grouped products of grouped_gemm.py where torch has only a loop over the experts.

That loop copies the number of tokens of each expert to the host in every layer of every step, and waits for it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from batchrun.engine.experts import pack_experts
from batchrun.engine.layers_device import ACTIVATIONS as KERNEL_NAMES
from batchrun.engine.mlp import ACTIVATIONS
from batchrun_kernels.grouped_gemm import Tiles, down_experts, gate_up_experts, route, tiles_of

log = logging.getLogger(__name__)

FIXED_ROWS = 64  # of a tile, where it must not depend on how many tokens an expert has


class GroupedExperts(torch.nn.Module):
    """In the place of a transformers module with `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I], whose weights it
    takes as they are."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = module.gate_up_proj, module.down_proj
        self.activation = KERNEL_NAMES[ACTIVATIONS[type(module.act_fn).__name__].kind]
        self.tiles: list[Tiles | None] = [None, None]  # of both products; None: what suits the number of tokens

    def fix_tiles(self) -> None:
        """From now on the same tiles for any number of tokens."""
        experts, size = len(self.down_proj), self.down_proj.element_size()
        self.tiles = [tiles_of(FIXED_ROWS * experts, experts, size, gated=gated) for gated in (True, False)]

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], the k experts of each token [T, k] and their weights [T, k] -> [T, H].

        An index past the last expert stands for none.
        """
        routing = route(top_k_index, len(self.down_proj))
        gated = gate_up_experts(x, self.gate_up_proj, routing, self.activation, tiles=self.tiles[0])
        each = down_experts(gated, self.down_proj, routing, top_k_weights.contiguous(), tiles=self.tiles[1])
        return each.view(len(x), routing.top_k, x.shape[1]).sum(1)


def group_experts(model: Any) -> int:
    """Replace the experts of a PagedModel whose form gives the same numbers; returns how many sets of them."""
    if torch_groups(model.device, model.dtype):
        return 0
    replaced = pack_experts(model.module, GroupedExperts)
    if replaced:
        log.info("%d sets of experts are computed by grouped products", replaced)
    return replaced


def torch_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a grouped product for this: in bfloat16, on NVIDIA's compute capabilities 9 and 10."""
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)

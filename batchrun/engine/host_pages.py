"""The device's side of swap.py: pages of all layers, gathered block by block, to pinned host memory and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
import torch

from batchrun.engine.attention.base import AttentionBackend
from batchrun.engine.kv_cache import BlockPool
from batchrun.engine.staging import upload
from batchrun.engine.swap import SwapSpace, swap_pays
from batchrun.errors import ConfigError

GIB = 2**30
STAGED_BLOCKS = 8  # gathered on the device at once


class HostPages:
    """A Mover of `pages`, tensors with one entry for each block, and as many `places` of host memory.

    All copies are queued on the current stream: a block may be given to another row, and a place be written again, as
    soon as a call returns.
    """

    def __init__(self, pages: list[torch.Tensor], places: int) -> None:
        self._pages = [page.view(len(page), -1).view(torch.uint8) for page in pages]
        widths = [page.shape[1] for page in self._pages]
        device = pages[0].device
        self._host = torch.empty(places, sum(widths), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._stage = torch.empty(STAGED_BLOCKS, sum(widths), dtype=torch.uint8, device=device)
        self._parts = self._stage.split(widths, dim=1)

    def move_out(self, blocks: list[int], places: list[int]) -> None:
        """Copy blocks to places."""
        for start in range(0, len(blocks), STAGED_BLOCKS):
            (index,) = upload(self._stage.device, np.array(blocks[start : start + STAGED_BLOCKS]))
            for page, part in zip(self._pages, self._parts, strict=True):
                part[: len(index)] = page[index]
            for row, place in zip(self._stage, places[start : start + STAGED_BLOCKS], strict=False):
                self._host[place].copy_(row, non_blocking=True)

    def move_in(self, places: list[int], blocks: list[int]) -> None:
        """Copy places to blocks."""
        for start in range(0, len(blocks), STAGED_BLOCKS):
            for row, place in zip(self._stage, places[start : start + STAGED_BLOCKS], strict=False):
                row.copy_(self._host[place], non_blocking=True)
            (index,) = upload(self._stage.device, np.array(blocks[start : start + STAGED_BLOCKS]))
            for page, part in zip(self._pages, self._parts, strict=True):
                page[index] = part[: len(index)]


def check_swap(gib: float, backend: type[AttentionBackend]) -> None:
    """Raise ConfigError for pages that cannot be moved, and for more memory than is free."""
    if gib and backend.page_tensors is AttentionBackend.page_tensors:
        raise ConfigError(f"engine.swap_space={gib} is for attention on a GPU: set engine.swap_space=0")
    if gib * GIB > (free := psutil.virtual_memory().available):
        raise ConfigError(f"engine.swap_space={gib} is more than the {free / GIB:.1f} GiB of memory that are free")


def make_swap(gib: float, model: Any, pool: BlockPool) -> SwapSpace | None:
    """The swap space of a PagedModel whose backend is set; None for 0 GiB.

    Raises ConfigError for a model with sliding windows: what its rows keep of them is little.
    """
    if not gib:
        return None
    pages = model.backend.page_tensors()
    if any(group.window is not None for group in pool.groups):
        raise ConfigError(
            f"engine.swap_space={gib}: this model has layers with a sliding window, whose rows are computed again "
            "when they are preempted: set engine.swap_space=0"
        )
    block_bytes = sum(page.nbytes // len(page) for page in pages)
    parameters = active_parameters(model.module)
    places = int(gib * GIB // block_bytes)
    return SwapSpace(
        places, HostPages(pages, places), lambda tokens, blocks: swap_pays(tokens, blocks * block_bytes, parameters)
    )


def active_parameters(module: Any) -> int:
    """Parameters of the layers that a token passes through: of stacked experts [experts, ...] those of a few."""
    config = module.config.get_text_config(decoder=True)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    used = (getattr(config, "num_experts_per_tok", None) or experts) / max(experts, 1)
    numbers = (p.numel() * (used if p.dim() == 3 and len(p) == experts else 1) for p in module.parameters())
    return int(sum(numbers)) - module.get_input_embeddings().weight.numel()

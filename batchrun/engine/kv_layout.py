"""Which layers share a block table, and which share memory.

Layers that look back equally far (a window of so many positions, or none) need and free the same positions: they
form a group. All blocks come from one pool, so they must be of one size in bytes: a block is `pages_per_block` pages,
one for each of so many layers of a group, and a group of more layers has several tables. For Gemma 3 1B, four layers
without a window and 22 with one of 512 tokens, a block holds four pages; a row has one table for the former and six
for the latter, and each of these six keeps the last blocks only. (vLLM's hybrid KV cache manager cuts memory the same
way; Jenga, arXiv 2503.18292, compares it with pools for each kind of layer.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from batchrun.engine.attention.base import LayerGeometry
from batchrun.engine.kv_cache import KvGroup

MOST_PADDING = 0.1  # of a group's pages: larger blocks, and so fewer tables, are worth this much memory


@dataclass(frozen=True, slots=True)
class KvLayout:
    groups: tuple[KvGroup, ...]
    tables: tuple[int, ...]  # of each layer: which block table it uses, counted over all groups
    places: tuple[int, ...]  # of each layer: which page of a block is its own
    pages: tuple[LayerGeometry, ...]  # of each place: a layer whose shape it has

    @classmethod
    def of(cls, layers: Sequence[LayerGeometry]) -> Self:
        """The layout with the fewest tables that wastes little. Layers whose pages differ in size cannot take turns in
        the same memory: a model that mixes them gets one table, which keeps what the farthest-looking layer needs."""
        owners = [i for i, layer in enumerate(layers) if layer.source is None]
        windows = {
            i: _widest([layers[j] for j in range(len(layers)) if j == i or layers[j].source == i]) for i in owners
        }
        if len({(layers[i].num_kv_heads, layers[i].key_dim, layers[i].value_dim) for i in owners}) > 1:
            windows = dict.fromkeys(owners, _widest(layers))
        by_window: dict[int | None, list[int]] = {}
        for i in owners:
            by_window.setdefault(windows[i], []).append(i)
        kinds = sorted(by_window.items(), key=lambda kind: (kind[0] is not None, kind[0]))
        pages = _pages_per_block([len(members) for _, members in kinds])
        groups, tables, places = [], [0] * len(layers), [0] * len(layers)
        first = 0
        for window, members in kinds:
            for number, i in enumerate(members):
                tables[i], places[i] = first + number // pages, number % pages
            groups.append(KvGroup(window, -(-len(members) // pages)))
            first += groups[-1].tables
        for i, layer in enumerate(layers):
            if layer.source is not None:
                tables[i], places[i] = tables[layer.source], places[layer.source]
        shapes = {places[i]: layers[i] for i in owners}
        return cls(tuple(groups), tuple(tables), tuple(places), tuple(shapes[place] for place in range(pages)))

    @property
    def num_tables(self) -> int:
        return sum(group.tables for group in self.groups)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """KV of `block_size` positions of the layers that share a table."""
        return block_size * sum(page.bytes_per_token(dtype) for page in self.pages)


def _widest(layers: Sequence[LayerGeometry]) -> int | None:
    windows = [layer.window for layer in layers if layer.window is not None]
    return max(windows) if len(windows) == len(layers) else None


def _pages_per_block(counts: Sequence[int]) -> int:
    """The most pages, at most the layers of the smallest group, that pad no group by more than MOST_PADDING."""
    return next(
        pages
        for pages in range(min(counts), 0, -1)
        if all(-(-count // pages) * pages <= (1 + MOST_PADDING) * count for count in counts)
    )

"""Preempted rows keep their KV in host memory, where moving it takes less time than computing it again.

Which blocks are kept, and where, is decided here in block numbers alone; host_pages.py moves them. Only what a row
does not share is kept: blocks that other rows hold too are found through the prefix index when it comes back. If they
are gone by then, what was kept is of no use, and the row is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from batchrun.engine.kv_cache import BlockPool, RowBlocks
from batchrun.engine.sequence import Sequence

# Estimated, not measured: pinned memory over PCIe 4 or 5, and half of what an H100 multiplies in bfloat16.
BYTES_PER_SECOND = 25e9
FLOPS_PER_SECOND = 400e12


def swap_pays(tokens: int, num_bytes: int, parameters: int) -> bool:
    """Whether moving `num_bytes` of KV out and back takes less time than a prefill of its `tokens`, which is two
    operations for each of the `parameters` that a token passes through; attention is not counted."""
    return 2 * num_bytes / BYTES_PER_SECOND < 2 * parameters * tokens / FLOPS_PER_SECOND


class Mover(Protocol):
    """Copies KV between blocks and places in host memory, in the order of its calls and of the steps between them."""

    def move_out(self, blocks: list[int], places: list[int]) -> None: ...

    def move_in(self, places: list[int], blocks: list[int]) -> None: ...


@dataclass(slots=True)
class _Kept:
    first: int  # column of the row's block tables; those before it were shared
    places: RowBlocks  # of each table, in order of columns
    computed: int  # positions of the row whose KV there is


class SwapSpace:
    """`capacity` places in host memory, each for one block. `pays` is asked with a number of tokens and of blocks."""

    def __init__(self, capacity: int, mover: Mover, pays: Callable[[int, int], bool]) -> None:
        self.capacity = capacity
        self.num_kept = 0  # rows, so far
        self.num_restored = 0
        self._mover = mover
        self._pays = pays
        self._free = list(range(capacity - 1, -1, -1))
        self._kept: dict[Sequence, _Kept] = {}

    def keep(self, sequence: Sequence, blocks: RowBlocks, computed: int, pool: BlockPool) -> None:
        """Copy what a row alone holds of its first `computed` positions, before its blocks are released."""
        if sequence.scoring is not None:
            return  # it goes back to where its scores begin
        columns = list(zip(*blocks, strict=True))[: -(-computed // pool.block_size)]
        first = next((i for i, column in enumerate(columns) if pool.references[column[0]] == 1), len(columns))
        own = [list(table[first : len(columns)]) for table in blocks]
        count, tokens = sum(map(len, own)), computed - first * pool.block_size
        if not count or count > len(self._free) or not self._pays(tokens, count):
            return
        places = [[self._free.pop() for _ in table] for table in own]
        self._mover.move_out(_flat(own), _flat(places))
        self._kept[sequence] = _Kept(first, places, computed)
        self.num_kept += 1

    def start(self, sequence: Sequence, num_cached: int, block_size: int) -> int:
        """First position to compute of a row whose first `num_cached` blocks are in the cache. Forgets what cannot be
        used."""
        kept, start = self._kept.get(sequence), num_cached * block_size
        if kept is None:
            return start
        if num_cached < kept.first or kept.computed <= start:
            self.forget(sequence)
            return start
        return min(kept.computed, len(sequence.token_ids) - 1)

    def restore(self, sequence: Sequence, blocks: RowBlocks, num_cached: int) -> None:
        """Copy what was kept into a row's blocks, but for those found in the cache, and forget it."""
        kept = self._kept.get(sequence)
        if kept is None:
            return
        places = [table[num_cached - kept.first :] for table in kept.places]
        into = [table[num_cached : num_cached + len(own)] for table, own in zip(blocks, places, strict=True)]
        self._mover.move_in(_flat(places), _flat(into))
        self.num_restored += 1
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free the places of a row that is through; one that has none is ignored."""
        kept = self._kept.pop(sequence, None)
        if kept is not None:
            self._free += _flat(kept.places)

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Raise AssertionError unless each place is free or of one row that waits."""
        used = [place for kept in self._kept.values() for place in _flat(kept.places)]
        assert sorted([*used, *self._free]) == list(range(self.capacity)), "host places are lost or of two rows"
        assert self._kept.keys() <= set(waiting), "host places of a row that does not wait"


def _flat(blocks: RowBlocks) -> list[int]:
    return [block for table in blocks for block in table]

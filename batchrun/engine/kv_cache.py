"""Pages of the KV cache: who holds each block, and which blocks already hold a given prefix.

This module deals in block numbers only, so it needs no torch and no device. A row has a block table for each part
of the model's layers (see kv_layout.py), and layers with a sliding window give back what they will never read
again. All blocks are of one size in bytes and come from one pool, whatever table they go to, so memory never has
to be divided beforehand between layers that need all positions and layers that need the last few.

A block is either held (reference count above 0) or free. Free blocks form two queues in order of reuse: first
those that hold nothing, or the prefix of rows that are all through; then the prefixes that rows still wait for,
least recently used first. A free block keeps its content, and so its place in the prefix index, until it is
handed out.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

ROOT = b""  # parent digest of a first block
HOLE = -1  # stands in a block table for a block that was given back
DIGEST_BYTES = 16  # 128 bits: two different prefixes meet by chance once in 2**64 blocks


def root(adapter: int) -> bytes:
    """What the digests of a row begin from: KV that was computed with an adapter is of use to no other."""
    return adapter.to_bytes(4, "little") if adapter else ROOT


def block_hashes(token_ids: np.ndarray, block_size: int, parent: bytes = ROOT) -> list[bytes]:
    """Digest of each full block of `token_ids` (int32 [n]), chained: equal digests mean equal prefixes."""
    data = np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
    width = 4 * block_size
    digests = []
    for start in range(0, len(data) - width + 1, width):
        parent = hashlib.blake2b(data[start : start + width], key=parent, digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


class EverSeen:
    """What a prefix cache without a limit would find: the mark that the real one is held against."""

    LIMIT = 1_000_000  # digests remembered, about 100 MB; a prefix met first after that counts as new each time

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def count(self, digests: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that some prompt before it had, and remember all of them."""
        known = 0
        for known, digest in enumerate(digests):  # noqa: B007
            if digest not in self._digests:
                break
        else:
            known = len(digests)
        if len(self._digests) < self.LIMIT:
            self._digests.update(digests[known:])
        return known


class KvGroup(NamedTuple):
    """Layers that look back equally far, and so need and free the same positions."""

    window: int | None = None  # positions seen, the query's own included; None: all
    tables: int = 1  # block tables, each for an equal part of its layers

    def first_seen(self, computed: Any) -> Any:
        """First position that the query at position `computed` sees; int or int64 [n] alike."""
        return 0 * computed if self.window is None else np.maximum(computed - self.window + 1, 0)


@dataclass(slots=True, eq=False)
class CachedBlock:
    """What free and held blocks hold: `block_size` positions of a group's layers, at the end of a prefix."""

    group: int
    digest: bytes  # of the whole prefix
    root: bytes  # of its first block
    blocks: tuple[int, ...]  # one for each table of the group; they are found together or not at all


# The blocks of a row: a list for each table, as long as each other, with HOLE for blocks that were given back.
RowBlocks = list[list[int]]


def blocks_for(groups: Sequence[KvGroup], block_size: int, positions: Any, query_len: int = 1) -> Any:
    """Most blocks that a row of `positions` positions holds while it computes `query_len` of them at a time; int or
    int64 [n] alike."""
    columns, total = -(-positions // block_size), 0
    for group in groups:
        held = columns
        if group.window is not None:
            # What the first query sees and what all of them write: a span that can begin anywhere in a block.
            span = group.window + query_len - 1
            held = np.minimum(columns, -(-(span - 1) // block_size) + 1)
        total = total + group.tables * held
    return total


class BlockPool:
    """Reference counts, the two free queues (doubly linked lists in two arrays) and the prefix index."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        groups: tuple[KvGroup, ...] = (KvGroup(),),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.groups = groups
        self.num_tables = sum(group.tables for group in groups)
        self.num_free = num_blocks
        self.references = np.zeros(num_blocks, dtype=np.int32)
        self._cached: list[CachedBlock | None] = [None] * num_blocks
        self._index: list[dict[bytes, CachedBlock]] = [{} for _ in groups]
        indexed = list(zip(groups, self._index, strict=True))
        self._full = [index for group, index in indexed if group.window is None]
        self._windowed = [(group, index) for group, index in indexed if group.window is not None]
        self._of_root: dict[bytes, dict[CachedBlock, None]] = {}
        self._rows_of_root: Counter[bytes] = Counter()
        # Each queue is a ring through a sentinel: the next of the sentinel is its head.
        self._spent, self._wanted = num_blocks, num_blocks + 1
        self._next = [*range(1, num_blocks + 1), 0, self._wanted]
        self._prev = [num_blocks, *range(num_blocks), self._wanted]

    def blocks_for(self, positions: Any, query_len: int = 1) -> Any:
        """Most blocks that a row holds: see the function of this name."""
        return blocks_for(self.groups, self.block_size, positions, query_len)

    def longest_row(self, limit: int, query_len: int) -> int:
        """Positions of the longest row, `limit` at most, that fits alone in steps of at most `query_len` tokens."""
        columns = range(1, -(-limit // self.block_size) + 1)
        fit = bisect_right(columns, self.num_blocks, key=lambda n: self.blocks_for(n * self.block_size, query_len))
        return min(limit, fit * self.block_size)

    def match(self, digests: Sequence[bytes]) -> RowBlocks:
        """Blocks of the longest usable prefix, without holding them: all of it for a group without a window, else
        what the next position sees of it."""
        length = self._usable(digests)
        if not length:
            return [[] for _ in range(self.num_tables)]
        found: RowBlocks = []
        for group, index in zip(self.groups, self._index, strict=True):
            first = int(group.first_seen(length * self.block_size)) // self.block_size
            blocks = [index[digest].blocks for digest in digests[first:length]]
            found += [[HOLE] * first + [each[table] for each in blocks] for table in range(group.tables)]
        return found

    def count_free(self, blocks: RowBlocks) -> int:
        """How many of `blocks` are free: holding them would take that many from the queues."""
        return sum(1 for block in _held(blocks) if self.references[block] == 0) if blocks[0] else 0

    def hold(self, blocks: RowBlocks) -> None:
        """Add one reference to each block, taking free ones out of their queue."""
        for block in _held(blocks):
            if self.references[block] == 0:
                self._unlink(block)
            self.references[block] += 1

    def allocate(self, count: int) -> RowBlocks:
        """`count` blocks for each table, from the head of the queues, forgetting what they held.

        Raises RuntimeError if fewer are free: the caller preempts before it allocates.
        """
        if count * self.num_tables > self.num_free:
            raise RuntimeError(
                f"{count * self.num_tables} KV blocks wanted, {self.num_free} of {self.num_blocks} are free"
            )
        pop = self._pop
        return [[pop() for _ in range(count)] for _ in range(self.num_tables)]

    def release(self, blocks: RowBlocks, others: bool = False) -> None:
        """Drop one reference to each block of one row, given in order of position.

        The last block is queued first, so that the tail of a prefix is reused before its head. `others`: the row
        itself goes on, so its blocks are wanted only if other rows begin like it.
        """
        for column in zip(*map(reversed, blocks), strict=True):
            for block in column:
                if block == HOLE:
                    continue
                self.references[block] -= 1
                if self.references[block] == 0:
                    self._enqueue(block, least=1 if others else 0)

    def register(self, blocks: Sequence[int], digest: bytes, root: bytes) -> None:
        """Say that held blocks, one of each table, now hold the end of the prefix `digest`, whose first block is
        `root`. The first blocks to do so keep the name."""
        if not self.prefix_caching:
            return
        start = 0
        for number, group in enumerate(self.groups):
            own = tuple(blocks[start : start + group.tables])
            start += group.tables
            if digest not in self._index[number] and self._cached[own[0]] is None:
                cached = CachedBlock(number, digest, root, own)
                self._index[number][digest] = cached
                self._of_root.setdefault(root, {})[cached] = None
                for block in own:
                    self._cached[block] = cached

    def expect(self, root: bytes) -> None:
        """One more row is here, waiting or running, whose first block is `root`."""
        self._rows_of_root[root] += 1
        if self._rows_of_root[root] == 1:
            self._requeue(root)

    def leave(self, root: bytes) -> None:
        """A row that was expected is through. After the last one its prefix is the first to go."""
        self._rows_of_root[root] -= 1
        if not self._rows_of_root[root]:
            del self._rows_of_root[root]
            self._requeue(root)

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, counts and index agree; for tests and the end of a job."""
        spent, wanted = self._queue(self._spent), self._queue(self._wanted)
        free = [*spent, *wanted]
        assert len(free) == len(set(free)) == self.num_free, "free queues and free count differ"
        assert set(free) == set(np.flatnonzero(self.references == 0).tolist()), "free queues and references differ"
        assert (self.references >= 0).all(), "negative reference count"
        for block in wanted:
            cached = self._cached[block]
            assert cached is not None, f"block {block} is wanted but holds nothing"
            assert self._rows_of_root[cached.root] > 0, f"block {block} is wanted by no row"
        indexed = [cached for index in self._index for cached in index.values()]
        named = {block: cached for block, cached in enumerate(self._cached) if cached is not None}
        assert named == {block: cached for cached in indexed for block in cached.blocks}, "index is not one to one"
        assert all(self._index[c.group][c.digest] is c for c in indexed), "a prefix goes by another's name"
        assert set(indexed) == {c for same in self._of_root.values() for c in same}, "prefixes and roots differ"

    def _usable(self, digests: Sequence[bytes]) -> int:
        """Leading blocks that a new row need not compute."""
        length = len(digests)
        for index in self._full:
            for i in range(length):
                if digests[i] not in index:
                    length = i
                    break
        while self._windowed and (missing := self._missing(digests, length)) is not None:
            length = missing  # whatever is longer needs that block too
        return length

    def _missing(self, digests: Sequence[bytes], length: int) -> int | None:
        """The last block that a group with a window lacks of what it sees from position length * block size."""
        for group, index in self._windowed:
            first = int(group.first_seen(length * self.block_size)) // self.block_size
            for i in range(length - 1, first - 1, -1):
                if digests[i] not in index:
                    return i
        return None

    def _pop(self) -> int:
        block = self._next[self._spent]
        if block == self._spent:
            block = self._next[self._wanted]
        self._unlink(block)
        if self._cached[block] is not None:
            self._forget(block)
        self.references[block] = 1
        return block

    def _forget(self, block: int) -> None:
        """What was found together goes together."""
        cached = self._cached[block]
        assert cached is not None
        del self._index[cached.group][cached.digest]
        same = self._of_root[cached.root]
        del same[cached]
        if not same:
            del self._of_root[cached.root]
        for other in cached.blocks:
            self._cached[other] = None
            if other != block:
                self._unlink(other)
                self._enqueue(other)

    def _requeue(self, root: bytes) -> None:
        """Put the free blocks of a prefix where they now belong, its tail before its head."""
        for cached in reversed(self._of_root.get(root, ())):
            for block in cached.blocks:
                if self.references[block] == 0:
                    self._unlink(block)
                    self._enqueue(block)

    def _enqueue(self, block: int, least: int = 0) -> None:
        cached = self._cached[block]
        if cached is None:
            self._link(block, self._spent)
        elif self._rows_of_root[cached.root] > least:
            self._link(block, self._prev[self._wanted])
        else:
            self._link(block, self._prev[self._spent])

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block: int, before: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1

    def _queue(self, sentinel: int) -> list[int]:
        queue, block = [], self._next[sentinel]
        while block != sentinel:
            queue.append(block)
            assert self._prev[self._next[block]] == block, f"block {block}: broken link"
            block = self._next[block]
        return queue


def _held(blocks: RowBlocks) -> Iterator[int]:
    return (block for table in blocks for block in table if block != HOLE)

"""Pages of the KV cache: who holds each block, and which blocks already hold a given prefix.

A block is `block_size` token positions of all layers; this module deals in block numbers only, so it
needs no torch and no device. A block is either held (reference count above 0) or free. Free blocks
form one queue in order of reuse: blocks without reusable content first, then the least recently used
prefix. A free block keeps its content, and so its place in the prefix index, until it is handed out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

ROOT = b""  # parent digest of a first block
DIGEST_BYTES = 16  # 128 bits: two different prefixes meet by chance once in 2**64 blocks


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


class BlockPool:
    """Reference counts, the free queue (a doubly linked list in two arrays) and the prefix index."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_free = num_blocks
        self.references = np.zeros(num_blocks, dtype=np.int32)
        self._digest: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # The queue is a ring through a sentinel at index num_blocks: next of the sentinel is its head.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix, without holding them."""
        blocks: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free: holding them would take that many from the queue."""
        return sum(1 for block in blocks if self.references[block] == 0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, taking free ones out of the queue."""
        for block in blocks:
            if self.references[block] == 0:
                self._unlink(block)
            self.references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks from the head of the queue, forgetting what they held.

        Raises RuntimeError if fewer are free: the caller preempts before it allocates.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} KV blocks wanted, {self.num_free} of {self.num_blocks} are free")
        blocks = []
        for _ in range(count):
            block = self._next[self.num_blocks]
            self._unlink(block)
            self._forget(block)
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of one sequence, given in order of position.

        The last block is queued first, so that the tail of a prefix is reused before its head.
        """
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self._link(block, front=self._digest[block] is None)

    def register(self, block: int, digest: bytes) -> None:
        """Say that a held block now holds the prefix `digest`. The first block to do so keeps the name."""
        if self.prefix_caching and digest not in self._block_of and self._digest[block] is None:
            self._block_of[digest] = block
            self._digest[block] = digest

    def check_integrity(self) -> None:
        """Raise AssertionError unless queue, counts and index agree; for tests and the end of a job."""
        queue, block = [], self._next[self.num_blocks]
        while block != self.num_blocks:
            queue.append(block)
            assert self._prev[self._next[block]] == block, f"block {block}: broken link"
            block = self._next[block]
        assert len(queue) == len(set(queue)) == self.num_free, "free queue and free count differ"
        assert set(queue) == set(np.flatnonzero(self.references == 0).tolist()), "free queue and references differ"
        assert (self.references >= 0).all(), "negative reference count"
        named = {block: digest for block, digest in enumerate(self._digest) if digest is not None}
        assert named == {block: digest for digest, block in self._block_of.items()}, "prefix index is not one to one"

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            del self._block_of[digest]
            self._digest[block] = None

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block: int, front: bool) -> None:
        sentinel = self.num_blocks
        before = sentinel if front else self._prev[sentinel]
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1

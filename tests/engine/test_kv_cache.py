"""The block pool against a plain model of it: who holds what, what each block holds, who is reused next."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchrun.engine.kv_cache import ROOT, BlockPool, EverSeen, block_hashes

SIZE = 2


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a small alphabet start, sharing what is cached, fill their blocks one by one, and end."""

    @initialize(num_blocks=st.integers(1, 12), caching=st.booleans())
    def start_pool(self, num_blocks: int, caching: bool) -> None:
        self.pool = BlockPool(num_blocks, SIZE, caching)
        self.running: list[dict[str, Any]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # what the device would find: the prefix a block ends
        self.queue = list(range(num_blocks))  # free blocks in order of reuse

    @rule(tokens=st.lists(st.integers(0, 1), max_size=4 * SIZE))
    def start(self, tokens: list[int]) -> None:
        digests = block_hashes(ids(*tokens), SIZE)
        cached = self.pool.match(digests)
        for index, block in enumerate(cached):
            assert self.content[block] == tuple(tokens[: (index + 1) * SIZE])
        assert self.pool.count_free(cached) == sum(block in self.queue for block in cached)
        wanted = -(-len(tokens) // SIZE) - len(cached)
        if wanted > self.pool.num_free - self.pool.count_free(cached):
            return
        self.pool.hold(cached)
        self.queue = [block for block in self.queue if block not in cached]
        expected, self.queue = self.queue[:wanted], self.queue[wanted:]
        new = self.pool.allocate(wanted)
        assert new == expected
        for block in new:
            self.content.pop(block, None)
        self.running.append({"tokens": tokens, "digests": digests, "blocks": cached + new, "filled": len(cached)})

    @rule(data=st.data())
    def fill_a_block(self, data: st.DataObject) -> None:
        unfinished = [row for row in self.running if row["filled"] < len(row["digests"])]
        if not unfinished:
            return
        row = data.draw(st.sampled_from(unfinished))
        index = row["filled"]
        prefix = tuple(row["tokens"][: (index + 1) * SIZE])
        known = bool(self.pool.match([row["digests"][index]]))
        self.pool.register(row["blocks"][index], row["digests"][index])
        if self.pool.prefix_caching and not known:
            self.content[row["blocks"][index]] = prefix
        row["filled"] += 1

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if not self.running:
            return
        row = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(row["blocks"])
        for block in reversed(row["blocks"]):
            if not any(block in other["blocks"] for other in self.running):
                self.queue.insert(len(self.queue) if block in self.content else 0, block)

    @rule(extra=st.integers(1, 5))
    def allocate_too_many(self, extra: int) -> None:
        with pytest.raises(RuntimeError, match="are free"):
            self.pool.allocate(self.pool.num_free + extra)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.queue)
        held = [sum(block in row["blocks"] for row in self.running) for block in range(self.pool.num_blocks)]
        assert self.pool.references.tolist() == held
        # No named block is lost: what was registered and not reused is found, provided its head still is.
        for block, prefix in self.content.items():
            found = self.pool.match(block_hashes(ids(*prefix), SIZE))
            heads = [prefix[: n * SIZE] for n in range(1, len(prefix) // SIZE + 1)]
            if all(head in self.content.values() for head in heads):
                assert found[-1] == block


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def filled(pool: BlockPool, tokens: np.ndarray) -> list[int]:
    """Blocks of a sequence that was computed whole and still runs."""
    digests = block_hashes(tokens, SIZE)
    blocks = pool.allocate(-(-len(tokens) // SIZE))
    for block, digest in zip(blocks, digests, strict=False):
        pool.register(block, digest)
    return blocks


def test_tail_of_a_prefix_is_reused_before_its_head() -> None:
    pool = BlockPool(3, SIZE)
    tokens = ids(1, 2, 3, 4, 5, 6)
    head, middle, tail = filled(pool, tokens)
    pool.release([head, middle, tail])
    assert pool.allocate(1) == [tail]
    assert pool.match(block_hashes(tokens, SIZE)) == [head, middle]
    assert pool.allocate(1) == [middle]
    assert pool.match(block_hashes(tokens, SIZE)) == [head]


def test_blocks_without_a_name_are_reused_before_any_prefix() -> None:
    pool = BlockPool(3, SIZE)
    first = filled(pool, ids(1, 2))
    second = filled(pool, ids(3, 4, 5))  # its second block is not full, so it has no name
    pool.release(first)
    pool.release(second)
    assert pool.allocate(3) == [second[1], first[0], second[0]]


def test_using_a_prefix_again_makes_it_the_last_to_go() -> None:
    pool = BlockPool(2, SIZE)
    old, new = filled(pool, ids(1, 2)), filled(pool, ids(3, 4))
    pool.release(old)
    pool.release(new)
    found = pool.match(block_hashes(ids(1, 2), SIZE))
    pool.hold(found)
    pool.release(found)
    assert pool.allocate(2) == [new[0], old[0]]


def test_a_shared_block_stays_held_until_its_last_holder_ends() -> None:
    pool = BlockPool(2, SIZE)
    blocks = filled(pool, ids(1, 2))
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, SIZE, prefix_caching=False)
    pool.release(filled(pool, ids(1, 2)))
    assert pool.match(block_hashes(ids(1, 2), SIZE)) == []


def test_the_first_block_keeps_the_name() -> None:
    pool = BlockPool(2, SIZE)
    first, second = filled(pool, ids(1, 2)), filled(pool, ids(1, 2))
    assert pool.match(block_hashes(ids(1, 2), SIZE)) == first
    pool.release(second)
    pool.release(first)
    assert pool.allocate(2) == second + first


def test_integrity_check_notices_a_block_released_twice() -> None:
    pool = BlockPool(2, SIZE)
    blocks = pool.allocate(1)
    pool.release(blocks)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.check_integrity()


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 9), st.integers(0, 5))
def test_hashes_can_be_continued_from_any_block(tokens: list[int], size: int, cut: int) -> None:
    whole = block_hashes(ids(*tokens), size)
    assert len(whole) == len(tokens) // size
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else ROOT
    assert whole[:cut] + block_hashes(ids(*tokens[cut * size :]), size, parent) == whole


@given(
    st.lists(st.integers(0, 2), min_size=4, max_size=12),
    st.lists(st.integers(0, 2), min_size=4, max_size=12),
)
def test_digests_are_equal_exactly_where_prefixes_are(left: list[int], right: list[int]) -> None:
    a, b = block_hashes(ids(*left), 2), block_hashes(ids(*right), 2)
    for n in range(min(len(a), len(b))):
        assert (a[n] == b[n]) == (left[: 2 * n + 2] == right[: 2 * n + 2])
    assert len(set(a)) == len(a), "a block that repeats its neighbour's tokens has another prefix"


def test_hashes_do_not_depend_on_layout_or_integer_type() -> None:
    tokens = ids(*range(16))
    spaced = np.stack([tokens, tokens], axis=1)[:, 0]
    assert block_hashes(spaced, 4) == block_hashes(tokens.astype(np.int64), 4) == block_hashes(tokens, 4)


def test_a_boundless_cache_finds_what_any_prompt_before_had() -> None:
    seen = EverSeen()
    a, b, c, d = (bytes([i]) for i in range(4))
    assert seen.count([a, b]) == 0
    assert seen.count([a, b]) == 2
    assert seen.count([a, c]) == 1
    assert seen.count([a, c, d]) == 2
    assert seen.count([]) == 0
    assert seen.count([a, c, d, bytes(9)]) == 3

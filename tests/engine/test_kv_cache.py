"""The block pool against a plain model of it: who holds what, what each block holds, who is reused next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchrun.engine.kv_cache import HOLE, ROOT, BlockPool, EverSeen, KvGroup, block_hashes

SIZE = 2


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@dataclass(eq=False)
class Row:
    tokens: list[int]
    digests: list[bytes]
    blocks: list[list[int]]
    filled: int
    given_back: list[int]  # for each group

    def prefix(self, index: int) -> tuple[int, ...]:
        return tuple(self.tokens[: (index + 1) * SIZE])


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a small alphabet start, sharing what is cached, fill their blocks one by one, leave the first of
    them behind where a window lets them, and end. Held against plain lists: who is reused next, what is found."""

    @initialize(
        num_blocks=st.integers(1, 24),
        caching=st.booleans(),
        groups=st.lists(st.tuples(st.none() | st.integers(1, 5), st.integers(1, 2)), min_size=1, max_size=2),
    )
    def start_pool(self, num_blocks: int, caching: bool, groups: list[tuple[int | None, int]]) -> None:
        self.groups = tuple(KvGroup(*group) for group in groups)
        self.pool = BlockPool(num_blocks, SIZE, caching, self.groups)
        self.running: list[Row] = []
        self.expected: list[bytes] = []  # roots of rows that are waited for, over and over
        self.names: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []  # (group, prefix, blocks), oldest first
        self.spent, self.wanted = list(range(num_blocks)), list[int]()  # free blocks in order of reuse

    def name_of(self, block: int) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
        return next((name for name in self.names if block in name[2]), None)

    def root(self, prefix: tuple[int, ...]) -> bytes:
        return block_hashes(ids(*prefix), SIZE)[0]

    def queue(self, block: int, least: int = 0) -> None:
        name = self.name_of(block)
        if name is None:
            self.spent.insert(0, block)
        else:
            (self.wanted if self.expected.count(self.root(name[1])) > least else self.spent).append(block)

    def dequeue(self, block: int) -> None:
        (self.spent if block in self.spent else self.wanted).remove(block)

    def pop(self) -> int:
        block = (self.spent or self.wanted).pop(0)
        name = self.name_of(block)
        if name is not None:
            self.names.remove(name)
            for other in name[2]:
                if other != block:
                    self.dequeue(other)
                    self.queue(other)
        return block

    def free(self, blocks: list[list[int]], least: int = 0) -> None:
        for column in reversed(list(zip(*blocks, strict=True))):
            for block in column:
                if block != HOLE and not any(block in table for row in self.running for table in row.blocks):
                    self.queue(block, least)

    def first_seen(self, group: KvGroup, length: int) -> int:
        return 0 if group.window is None else max(0, length * SIZE - group.window + 1) // SIZE

    def findable(self, tokens: list[int], length: int) -> bool:
        known = {(group, prefix) for group, prefix, _ in self.names}
        return all(
            (number, tuple(tokens[: (index + 1) * SIZE])) in known
            for number, group in enumerate(self.groups)
            for index in range(self.first_seen(group, length), length)
        )

    @rule(tokens=st.lists(st.integers(0, 1), max_size=4 * SIZE))
    def start(self, tokens: list[int]) -> None:
        digests = block_hashes(ids(*tokens), SIZE)
        cached = self.pool.match(digests)
        length = len(cached[0])
        assert length == max(n for n in range(len(digests) + 1) if self.findable(tokens, n))
        table = 0
        for number, group in enumerate(self.groups):
            first = self.first_seen(group, length)
            for part in range(group.tables):
                assert cached[table][:first] == [HOLE] * first
                for index, block in enumerate(cached[table][first:], first):
                    assert (number, tuple(tokens[: (index + 1) * SIZE])) == self.name_of(block)[:2]  # type: ignore[index]
                    assert self.name_of(block)[2][part] == block  # type: ignore[index]
                table += 1
        free = self.spent + self.wanted
        held = [block for blocks in cached for block in blocks if block != HOLE]
        assert self.pool.count_free(cached) == sum(block in free for block in held)
        wanted = -(-len(tokens) // SIZE) - length
        if wanted * self.pool.num_tables > self.pool.num_free - self.pool.count_free(cached):
            return
        self.pool.hold(cached)
        for block in held:
            if block in free:
                self.dequeue(block)
        expected = [[self.pop() for _ in range(wanted)] for _ in cached]
        new = self.pool.allocate(wanted)
        assert new == expected
        blocks = [a + b for a, b in zip(cached, new, strict=True)]
        given_back = [self.first_seen(group, length) for group in self.groups]
        self.running.append(Row(tokens, digests, blocks, length, given_back))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE))
    def expect(self, tokens: list[int]) -> None:
        root = self.root(tuple(tokens))
        self.pool.expect(root)
        self.expected.append(root)
        if self.expected.count(root) == 1:
            self.move(root)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.expected:
            root = self.expected.pop(data.draw(st.integers(0, len(self.expected) - 1)))
            self.pool.leave(root)
            if root not in self.expected:
                self.move(root)

    def move(self, root: bytes) -> None:
        for _, prefix, blocks in reversed(self.names):
            for block in blocks if self.root(prefix) == root else ():
                if block in self.spent + self.wanted:
                    self.dequeue(block)
                    self.queue(block)

    @rule(data=st.data())
    def fill_a_block(self, data: st.DataObject) -> None:
        unfinished = [row for row in self.running if row.filled < len(row.digests)]
        if not unfinished:
            return
        row = data.draw(st.sampled_from(unfinished))
        column, prefix = [table[row.filled] for table in row.blocks], row.prefix(row.filled)
        self.pool.register(column, row.digests[row.filled], row.digests[0])
        for number, group in enumerate(self.groups):
            own, column = tuple(column[: group.tables]), column[group.tables :]
            if self.pool.prefix_caching and not any(name[:2] == (number, prefix) for name in self.names):
                self.names.append((number, prefix, own))
        row.filled += 1

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """What the next query of a row does not see."""
        if not self.running:
            return
        row = data.draw(st.sampled_from(self.running))
        table = 0
        for number, group in enumerate(self.groups):
            passed = self.first_seen(group, row.filled)
            blocks = [own[row.given_back[number] : passed] for own in row.blocks[table : table + group.tables]]
            for own in row.blocks[table : table + group.tables]:
                own[row.given_back[number] : passed] = [HOLE] * (passed - row.given_back[number])
            row.given_back[number] = passed
            self.pool.release(blocks, others=True)
            self.free(blocks, least=1)
            table += group.tables

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if not self.running:
            return
        row = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(row.blocks)
        self.free(row.blocks)

    @rule(extra=st.integers(1, 5))
    def allocate_too_many(self, extra: int) -> None:
        with pytest.raises(RuntimeError, match="are free"):
            self.pool.allocate(self.pool.num_free // self.pool.num_tables + extra)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool._queue(self.pool._spent) == self.spent
        assert self.pool._queue(self.pool._wanted) == self.wanted
        held = Counter(block for row in self.running for table in row.blocks for block in table)
        assert self.pool.references.tolist() == [held[block] for block in range(self.pool.num_blocks)]


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def filled(pool: BlockPool, tokens: np.ndarray) -> list[int]:
    """Blocks of a sequence that was computed whole and still runs, in a pool of one table."""
    digests = block_hashes(tokens, SIZE)
    (blocks,) = pool.allocate(-(-len(tokens) // SIZE))
    for block, digest in zip(blocks, digests, strict=False):
        pool.register([block], digest, digests[0])
    return blocks


def test_tail_of_a_prefix_is_reused_before_its_head() -> None:
    pool = BlockPool(3, SIZE)
    tokens = ids(1, 2, 3, 4, 5, 6)
    head, middle, tail = filled(pool, tokens)
    pool.release([[head, middle, tail]])
    assert pool.allocate(1) == [[tail]]
    assert pool.match(block_hashes(tokens, SIZE)) == [[head, middle]]
    assert pool.allocate(1) == [[middle]]
    assert pool.match(block_hashes(tokens, SIZE)) == [[head]]


def test_blocks_without_a_name_are_reused_before_any_prefix() -> None:
    pool = BlockPool(3, SIZE)
    first = filled(pool, ids(1, 2))
    second = filled(pool, ids(3, 4, 5))  # its second block is not full, so it has no name
    pool.release([first])
    pool.release([second])
    assert pool.allocate(3) == [[second[1], first[0], second[0]]]


def test_using_a_prefix_again_makes_it_the_last_to_go() -> None:
    pool = BlockPool(2, SIZE)
    old, new = filled(pool, ids(1, 2)), filled(pool, ids(3, 4))
    pool.release([old])
    pool.release([new])
    found = pool.match(block_hashes(ids(1, 2), SIZE))
    pool.hold(found)
    pool.release(found)
    assert pool.allocate(2) == [[new[0], old[0]]]


def test_prefixes_of_rows_that_are_all_through_go_first() -> None:
    pool = BlockPool(4, SIZE)
    roots = [block_hashes(ids(token, token), SIZE)[0] for token in range(3)]
    for root in roots[:2]:
        pool.expect(root)
    blocks = [filled(pool, ids(token, token))[0] for token in range(3)]
    for block in blocks:
        pool.release([[block]])
    unused, never_expected = 3, blocks[2]
    pool.leave(roots[1])
    assert pool.allocate(4) == [[unused, never_expected, blocks[1], blocks[0]]]


def test_a_prefix_is_wanted_again_when_a_row_comes_back_to_it() -> None:
    pool = BlockPool(2, SIZE)
    old, new = filled(pool, ids(1, 2)), filled(pool, ids(3, 4))
    pool.release([old])
    pool.release([new])
    pool.expect(block_hashes(ids(1, 2), SIZE)[0])
    assert pool.allocate(2) == [new + old]


def test_a_window_needs_the_end_of_a_prefix_only() -> None:
    pool = BlockPool(13, SIZE, groups=(KvGroup(), KvGroup(window=3)))
    digests = block_hashes(ids(*range(8)), SIZE)
    whole, near = pool.allocate(4)
    for index, digest in enumerate(digests):
        pool.register([whole[index], near[index]], digest, digests[0])
    pool.release([whole, near])
    assert pool.match(digests) == [whole, [HOLE] * 3 + near[3:]]  # position 8 sees 6 and 7
    assert pool.match(digests[:1]) == [whole[:1], near[:1]]
    pool.hold([whole, near[1:2]])
    pool.allocate(4)  # takes blocks 3, 2 and 0 of the second table
    assert pool.match(digests) == [whole[:2], [HOLE, near[1]]]


def test_blocks_of_a_row_stop_growing_at_its_window() -> None:
    pool = BlockPool(100, 4, groups=(KvGroup(None, 1), KvGroup(8, 3)))
    assert [pool.blocks_for(n) for n in (1, 8, 12, 13, 400)] == [4, 8, 12, 13, 109]
    assert pool.blocks_for(np.array([1, 400])).tolist() == [4, 109]
    assert pool.blocks_for(400, query_len=10) == 100 + 3 * 5
    assert pool.longest_row(1000, query_len=10) == 4 * (100 - 3 * 5)
    assert [BlockPool(100, 4).longest_row(limit, query_len=10) for limit in (399, 1000)] == [399, 400]
    only_windows = BlockPool(100, 4, groups=(KvGroup(8, 3),))
    assert only_windows.longest_row(100_000, query_len=10) == 100_000


def test_a_shared_block_stays_held_until_its_last_holder_ends() -> None:
    pool = BlockPool(2, SIZE)
    blocks = filled(pool, ids(1, 2))
    pool.hold([blocks])
    pool.release([blocks])
    assert pool.num_free == 1
    pool.release([blocks])
    assert pool.num_free == 2


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, SIZE, prefix_caching=False)
    pool.release([filled(pool, ids(1, 2))])
    assert pool.match(block_hashes(ids(1, 2), SIZE)) == [[]]


def test_the_first_block_keeps_the_name() -> None:
    pool = BlockPool(2, SIZE)
    first, second = filled(pool, ids(1, 2)), filled(pool, ids(1, 2))
    assert pool.match(block_hashes(ids(1, 2), SIZE)) == [first]
    pool.release([second])
    pool.release([first])
    assert pool.allocate(2) == [second + first]


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

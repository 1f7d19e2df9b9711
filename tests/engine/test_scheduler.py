"""The scheduler against a pretended model: the page store holds, in place of KV, a hash of the whole prefix.

The hash at a position is computed from what the store holds for the position before, read through the
row's block table, and the next token follows from the last hash. A wrong block table, a stale or shared
page, or a resume that skips a position therefore changes what a row says. Steps may run ahead: tokens are
then received when the next step has been computed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from batchrun.engine.batch import UNREAD, Batch
from batchrun.engine.bursts import NO_LOSS, Bursts, StepCosts
from batchrun.engine.kv_cache import HOLE, BlockPool, KvGroup, block_hashes, blocks_for
from batchrun.engine.params import Request, SamplingParams
from batchrun.engine.scheduler import Scheduler
from batchrun.engine.sequence import Sequence
from batchrun.engine.swap import SwapSpace
from tests.engine.families import Optimist

VOCABULARY = 11
END = 10  # the token that ends a row early
EMPTY = -1


def mix(before: int, token: int) -> int:
    """Hash of a prefix from the hash of the prefix one shorter and its last token."""
    x = (before * 6364136223846793005 + token * 1442695040888963407 + 1) & (2**62 - 1)
    return x ^ (x >> 29)


def next_token(state: int) -> int:
    return (state >> 7) % VOCABULARY


def alone(prompt: list[int], max_total: int) -> list[int]:
    """What the pretended model completes, without batches, pages or scheduler."""
    state, tokens = 0, list(prompt)
    for token in prompt:
        state = mix(state, token)
    while len(tokens) < max_total and (len(tokens) == len(prompt) or tokens[-1] != END):
        tokens.append(next_token(state))
        state = mix(state, tokens[-1])
    return tokens


@dataclass(slots=True)
class Row:
    prompt: list[int]
    max_tokens: int
    arrives: int  # step
    aborted: int | None  # step


class StoreMover:
    """Host memory beside a page store."""

    def __init__(self, store: np.ndarray, block_size: int, places: int) -> None:
        self.blocks = store.reshape(-1, block_size)
        self.host = np.full((places, block_size), EMPTY, dtype=np.int64)

    def move_out(self, blocks: list[int], places: list[int]) -> None:
        self.host[places] = self.blocks[blocks]

    def move_in(self, places: list[int], blocks: list[int]) -> None:
        self.blocks[blocks] = self.host[places]


class Simulation:
    """Drives a scheduler with the pretended model and checks every batch."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, budget: int, ahead: int = 0) -> None:
        self.pool = pool
        self.ahead = ahead  # 0: no step runs ahead of the tokens before it, 1: all, n: all but every n-th
        self.newest = np.zeros(max_num_seqs, dtype=np.int64)  # token of each slot
        self.flying: tuple[Batch, np.ndarray] | None = None
        self.scheduler = Scheduler(pool, max_num_seqs, budget)
        self.store = np.full(pool.num_blocks * pool.block_size, EMPTY, dtype=np.int64)
        self.windows = [group.window for group in pool.groups for _ in range(group.tables)]
        self.done: dict[Hashable, list[int]] = {}
        self.sequences: dict[Hashable, Sequence] = {}
        self.num_computed = 0
        self.num_batches = 0

    def give_host_memory(self, places: int) -> SwapSpace:
        """Let preempted rows keep their KV in `places` blocks of it."""
        mover = StoreMover(self.store, self.pool.block_size, places)
        self.scheduler.swap = SwapSpace(places, mover, lambda tokens, blocks: True)
        return self.scheduler.swap

    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        ids = np.array(prompt, dtype=np.int32)
        self.sequences[key] = Sequence(
            request=Request(key, ids, SamplingParams(max_tokens=max_tokens)),
            seed=0,
            token_ids=ids,
            num_prompt=len(ids),
            max_total=self.pool.longest_row(len(ids) + max_tokens, self.scheduler.max_batched_tokens),
            digests=block_hashes(ids, self.pool.block_size) if self.pool.prefix_caching else [],
            arrived_at=0.0,
        )
        self.scheduler.add(self.sequences[key])

    def abort(self, key: int) -> None:
        if key in self.sequences:
            self.scheduler.abort(self.sequences.pop(key))

    def step(self) -> Batch | None:
        slots, before = self.scheduler.slots, self.scheduler.num_preemptions
        running = [slots.sequences[slot] for slot in slots.order.tolist()]
        lengths = slots.num_tokens[slots.order].tolist()
        batch = self.scheduler.schedule()
        self.check_preempted(running, lengths)
        flying, self.flying = self.flying, None
        if batch is None:
            assert flying is not None or not self.sequences, "rows are left but nothing is scheduled"
            self.receive(flying)
            return None
        new = {slot for slot in batch.slots.tolist() if slots.sequences[slot] not in running}
        assert not (new and self.scheduler.num_preemptions > before), "admitted in a step that preempted"
        self.check_batch(batch)
        self.check_held_back(batch, new)
        tokens = self.forward(batch)
        self.scheduler.advance(batch)
        self.receive(flying)
        self.num_computed += batch.num_tokens
        self.num_batches += 1
        if self.ahead and (self.ahead == 1 or self.num_batches % self.ahead):
            self.flying = batch, tokens
        else:
            self.receive((batch, tokens))
        return batch

    def receive(self, flying: tuple[Batch, np.ndarray] | None) -> None:
        if flying is not None:
            batch, tokens = flying
            rows = batch.slots[batch.sampled][self.scheduler.receive(batch, tokens)]
            if not self.ahead:
                self.check_pages(batch)
            self.collect(rows)
        self.pool.check_integrity()
        if self.scheduler.swap is not None:
            self.scheduler.swap.check_integrity(self.scheduler.waiting)

    def check_preempted(self, running: list[Sequence | None], lengths: list[int]) -> None:
        """The youngest rows went, with all their tokens, and are the next to come back, oldest first."""
        stayed = [sequence is not None and sequence.slot >= 0 for sequence in running]
        num_stayed = sum(stayed)
        assert all(stayed[:num_stayed])
        for sequence, back, length in zip(
            running[num_stayed:], self.scheduler.waiting, lengths[num_stayed:], strict=False
        ):
            assert sequence is back
            assert len(back.token_ids) == length

    def check_batch(self, batch: Batch) -> None:
        lens = np.diff(batch.query_starts)
        assert 0 < batch.num_tokens <= self.scheduler.max_batched_tokens
        assert (lens > 0).all()
        assert (lens[: batch.num_decodes] == 1).all()
        assert (lens[batch.num_decodes :] > 1).all()
        assert len(set(batch.slots.tolist())) == len(batch.slots)
        written = batch.slot_mapping.ravel()
        assert len(set(written.tolist())) == len(written) == batch.num_tokens * len(self.windows), "one place for two"
        written = np.unique(batch.slot_mapping // self.pool.block_size)
        assert (self.pool.references[written] == 1).all(), "a page that others read is written"

    def check_held_back(self, batch: Batch, new: set[int]) -> None:
        """No admitted row computes a block of its prompt that another running row is computing."""
        if not self.pool.prefix_caching:
            return
        slots, size = self.scheduler.slots, self.pool.block_size
        for slot in new:
            end = (int(slots.num_computed[slot]) // size + 1) * size
            if end > slots.num_prompt[slot] or end >= slots.num_tokens[slot]:
                continue
            for other in slots.order[: slots.order.tolist().index(slot)]:
                computing = slots.num_computed[other] < end <= slots.num_prompt[other]
                same = (slots.token_ids[other, :end] == slots.token_ids[slot, :end]).all()
                assert not (computing and same), "two rows compute the same prefix at once"

    def forward(self, batch: Batch) -> np.ndarray:
        size, ids = self.pool.block_size, batch.token_ids
        if batch.fed is not None:
            assert ((ids == UNREAD) == (batch.fed >= 0)).all()
            ids = np.where(batch.fed >= 0, self.newest[batch.fed], ids)
        for row in range(len(batch.slots)):
            for at in range(batch.query_starts[row], batch.query_starts[row + 1]):
                position = int(batch.positions[at])
                for table, mapping in zip(batch.block_tables, batch.slot_mapping, strict=True):
                    state = 0
                    if position:
                        before = position - 1
                        state = int(self.store[table[row, before // size] * size + before % size])
                    self.store[mapping[at]] = mix(state, int(ids[at]))
        last = batch.slot_mapping[:, batch.logits_index]
        states = self.store[last]
        assert (states == states[0]).all(), "the tables of a row disagree"
        tokens = np.array([next_token(int(state)) for state in states[0]], dtype=np.int64)
        self.newest[batch.slots[batch.sampled]] = tokens
        return tokens

    def check_pages(self, batch: Batch) -> None:
        """Every position that any query of a row sees holds its own prefix in each table, and blocks that none sees
        have been given back."""
        size, slots = self.pool.block_size, self.scheduler.slots
        for row, slot in enumerate(batch.slots):
            computed, start = int(batch.seq_lens[row]), int(batch.positions[batch.query_starts[row]])
            held = -(-computed // size)
            states = list(accumulate(slots.token_ids[slot, :computed].tolist(), mix, initial=0))[1:]
            for window, table in zip(self.windows, batch.block_tables[:, row], strict=True):
                seen = 0 if window is None else max(0, start - window + 1)
                for position in range(seen, computed):
                    assert self.store[table[position // size] * size + position % size] == states[position]
                assert (table[: seen // size] == HOLE).all()
                assert (table[seen // size : held] != HOLE).all()
                if window is not None:
                    most = -(-(window + computed - start - 2) // size) + 1
                    assert held - seen // size <= most, "a row holds more than its window"

    def collect(self, rows: np.ndarray) -> None:
        slots = self.scheduler.slots
        for slot in rows.tolist():
            tokens = slots.token_ids[slot, : slots.num_tokens[slot]].tolist()
            if tokens[-1] == END or len(tokens) >= slots.max_total[slot]:
                key = self.scheduler.finish(slot).request.key
                self.done[key] = tokens
                del self.sequences[key]

    def assert_idle(self) -> None:
        self.pool.check_integrity()
        assert not self.scheduler.has_work()
        if self.scheduler.swap is not None:
            self.scheduler.swap.check_integrity([])
        assert self.pool.num_free == self.pool.num_blocks
        assert self.scheduler.slots.num_free == self.scheduler.slots.capacity
        assert not self.scheduler._computing
        assert not self.pool._rows_of_root
        assert not self.pool._queue(self.pool._wanted)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Prompts that mostly begin like one of two others, so that sharing at every depth happens."""
    heads = draw(st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=20), min_size=1, max_size=2))
    row = st.builds(
        lambda head, share, tail, max_tokens, arrives, aborted: Row(
            head[:share] + tail, max_tokens, arrives, None if aborted is None else arrives + aborted
        ),
        st.sampled_from(heads),
        st.integers(0, 20),
        st.lists(st.integers(0, 2), min_size=1, max_size=8),
        st.integers(1, 14),
        st.integers(0, 12),
        st.none() | st.none() | st.integers(1, 10),
    )
    return draw(st.lists(row, min_size=1, max_size=12))


GROUPS = [  # the pretended model looks one position back, so no window is narrower than 2
    (KvGroup(),),
    (KvGroup(None, 2),),
    (KvGroup(5),),
    (KvGroup(2, 2),),
    (KvGroup(None, 1), KvGroup(7, 2)),
    (KvGroup(None, 2), KvGroup(3, 1), KvGroup(9, 1)),
]


@settings(max_examples=300)
@given(
    rows=rows(),
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 6),
    spare_budget=st.integers(0, 12),
    caching=st.booleans(),
    optimistic=st.booleans(),
    groups=st.sampled_from(GROUPS),
    ahead=st.integers(0, 3),
    places=st.integers(0, 12),
    costs=st.builds(StepCosts, st.floats(0, 8), st.floats(0, 20)),
)
def test_every_row_says_what_it_says_alone(
    rows: list[Row],
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    spare_budget: int,
    caching: bool,
    optimistic: bool,
    groups: tuple[KvGroup, ...],
    ahead: int,
    places: int,
    costs: StepCosts,
) -> None:
    budget = max_num_seqs + spare_budget
    least = int(blocks_for(groups, block_size, max(len(row.prompt) + 1 for row in rows), budget))
    pool = BlockPool(least + spare_blocks, block_size, caching, groups)
    simulation = Simulation(pool, max_num_seqs, budget, ahead)
    simulation.scheduler.bursts = Bursts(costs, lambda: True)
    if optimistic:
        simulation.scheduler.estimate = Optimist()  # type: ignore[assignment]
    if all(group.window is None for group in groups):
        simulation.give_host_memory(places)
    last_arrival = max(row.arrives for row in rows)
    for step in range(5000):
        for key, row in enumerate(rows):
            if row.arrives == step:
                simulation.add(key, row.prompt, row.max_tokens)
            if row.aborted == step:
                simulation.abort(key)
        if simulation.step() is None and step > last_arrival and not simulation.scheduler.has_work():
            break
    simulation.assert_idle()
    for key, row in enumerate(rows):
        if row.aborted is None:
            assert key in simulation.done
        if key in simulation.done:
            assert simulation.done[key] == alone(row.prompt, pool.longest_row(len(row.prompt) + row.max_tokens, budget))


def run_all(simulation: Simulation) -> None:
    while simulation.step() is not None:
        pass
    simulation.assert_idle()


def test_a_shared_prefix_is_computed_once() -> None:
    head, size = list(range(8)) * 5, 4
    simulation = Simulation(BlockPool(100, size), max_num_seqs=8, budget=16)
    for key in range(6):
        simulation.add(key, [*head, key, 1], max_tokens=1)
    run_all(simulation)
    assert simulation.num_computed == len(head) + 6 * 2
    assert simulation.scheduler.cached_tokens == 5 * len(head)
    assert simulation.scheduler.prompt_tokens == 6 * (len(head) + 2)


def test_the_last_token_of_a_cached_prompt_is_computed_again() -> None:
    simulation = Simulation(BlockPool(10, 4), max_num_seqs=2, budget=16)
    for key in range(2):
        simulation.add(key, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
        run_all(simulation)
    assert simulation.num_computed == 8 + 4


def test_preempts_the_youngest_and_still_finishes() -> None:
    simulation = Simulation(BlockPool(6, 2), max_num_seqs=3, budget=8)
    simulation.scheduler.estimate = Optimist()  # type: ignore[assignment]
    prompts = [[0, 1], [2, 1], [3, 2]]  # none of them ends before its last token
    for key, prompt in enumerate(prompts):
        simulation.add(key, prompt, max_tokens=9)
    simulation.step()
    oldest = simulation.sequences[0]
    while (batch := simulation.step()) is not None:
        assert oldest.slot < 0 or oldest.slot in batch.slots, "the oldest row waits for younger ones"
    assert simulation.scheduler.num_preemptions > 0
    assert simulation.done == {key: alone(prompt, len(prompt) + 9) for key, prompt in enumerate(prompts)}
    simulation.assert_idle()


def test_a_preempted_row_goes_on_from_what_was_kept_of_it() -> None:
    """Each position is computed once, and again where there was no room to keep it."""
    prompts = [[0, 1], [2, 1], [3, 2]]
    most = sum(len(alone(prompt, len(prompt) + 9)) - 1 for prompt in prompts)
    for places in (100, 1):
        simulation = Simulation(BlockPool(6, 2, prefix_caching=False), max_num_seqs=3, budget=8)
        simulation.scheduler.estimate = Optimist()  # type: ignore[assignment]
        swap = simulation.give_host_memory(places)
        for key, prompt in enumerate(prompts):
            simulation.add(key, prompt, max_tokens=9)
        run_all(simulation)
        assert simulation.done == {key: alone(prompt, len(prompt) + 9) for key, prompt in enumerate(prompts)}
        kept = swap.num_kept == swap.num_restored == simulation.scheduler.num_preemptions > 0
        assert (kept, simulation.num_computed == most) == (places == 100, places == 100)


def test_expects_the_worst_before_any_row_has_finished() -> None:
    simulation = Simulation(BlockPool(6, 2), max_num_seqs=3, budget=8)
    for key in range(3):
        simulation.add(key, [1, key], max_tokens=4)  # three blocks each at most
    batch = simulation.step()
    assert batch is not None
    assert len(batch.slots) == 2
    run_all(simulation)
    assert simulation.scheduler.num_preemptions == 0


def test_decodes_come_before_prompts_when_the_budget_is_short() -> None:
    simulation = Simulation(BlockPool(100, 4), max_num_seqs=4, budget=5)
    simulation.add(0, [3, 4, 5], max_tokens=50)
    simulation.step()
    simulation.add(1, list(range(10)), max_tokens=1)
    batch = simulation.step()
    assert batch is not None
    assert np.diff(batch.query_starts).tolist() == [1, 4]
    assert batch.sampled.tolist() == [0]


def test_aborting_a_row_lets_those_that_wait_for_its_prefix_go_on() -> None:
    head = list(range(10)) * 2
    simulation = Simulation(BlockPool(100, 4), max_num_seqs=4, budget=6)
    simulation.add(0, [*head, 1], max_tokens=2)
    simulation.add(1, [*head, 2], max_tokens=2)
    batch = simulation.step()
    assert batch is not None
    assert len(batch.slots) == 1
    simulation.abort(0)
    run_all(simulation)
    assert simulation.done == {1: alone([*head, 2], len(head) + 3)}


def test_a_row_that_cannot_ever_fit_is_not_taken() -> None:
    simulation = Simulation(BlockPool(2, 2), max_num_seqs=1, budget=4)
    sequence = Sequence(Request(0, [1]), 0, np.ones(1, np.int32), 1, 5, [], 0.0)
    with pytest.raises(AssertionError):
        simulation.scheduler.add(sequence)


@dataclass(slots=True)
class Course:
    """What became of rows that came in together and ended one by one."""

    decoding: int  # steps of nothing but rows that decode
    others: int
    occupied: float  # places, on average
    order: list[Hashable]  # in which rows began


def course_of(costs: StepCosts, replays: bool, lengths: list[int], places: int = 16) -> tuple[Course, float]:
    """Of rows of so many tokens after prompts of three, and what Bursts.spared has come to."""
    simulation = Simulation(BlockPool(400, 4), max_num_seqs=places, budget=64)
    simulation.scheduler.bursts = bursts = Bursts(costs, lambda: replays)
    for key, most in enumerate(lengths):
        simulation.add(key, [key % 10, key // 10 % 10, key // 100], most)
    batches, order = [], []
    while (batch := simulation.step()) is not None:
        batches.append(batch)
        running = (simulation.scheduler.slots.sequences[slot] for slot in batch.slots)
        order += [row.request.key for row in running if row is not None and row.request.key not in order]
    simulation.assert_idle()
    decoding = sum(batch.num_tokens == len(batch.slots) for batch in batches)
    occupied = float(np.mean([len(batch.slots) for batch in batches]))
    return Course(decoding, len(batches) - decoding, occupied, order), bursts.spared


LENGTHS = np.random.default_rng(0).integers(4, 13, size=300).tolist()


def test_waiting_rows_come_in_bursts_where_decode_steps_are_replayed() -> None:
    """Most steps are then replayed, for a few places that stay empty; rows begin in the order of the queue."""
    alone, _ = course_of(NO_LOSS, True, LENGTHS)
    together, spared = course_of(StepCosts(2.0, np.inf), True, LENGTHS)
    assert alone.others > 3 * alone.decoding
    assert together.decoding > together.others
    assert 0.7 * alone.occupied < together.occupied < alone.occupied
    assert together.others * 3 + together.decoding < 0.8 * (alone.others * 3 + alone.decoding), "with E = 3 R"
    assert together.order == alone.order
    assert spared == 0


def test_no_burst_is_waited_for_where_nothing_is_gained() -> None:
    """Steps that are not replayed, and prompts that keep the device at work for as long as the host."""
    alone, _ = course_of(NO_LOSS, True, LENGTHS)
    eager, spared = course_of(StepCosts(2.0, np.inf), False, LENGTHS)
    assert eager == alone
    assert alone.others / 4 < spared < alone.others, "but it is counted what was missed"
    assert course_of(StepCosts(2.0, 1.0), True, LENGTHS)[0] == alone


def test_a_row_that_waits_is_let_in_before_the_others_end() -> None:
    """A place that is empty among rows that go on is held so many steps that a launched step would have cost less."""
    prompts = [[0, 1], [2, 2], [3, 4], [1, 1], [2, 5]]  # the first three do not end before their last token
    simulation = Simulation(BlockPool(100, 4), max_num_seqs=4, budget=64)
    simulation.scheduler.bursts = Bursts(StepCosts(2.0, np.inf), lambda: True)
    for key, prompt in enumerate(prompts):
        simulation.add(key, prompt, 22 if key < 3 else 1)
    steps = 0
    while 4 not in simulation.done:
        assert simulation.step() is not None
        steps += 1
    assert steps == 1 + 2 * 4
    assert len(simulation.sequences) == 3


def hits_between_strangers(knows_who_waits: bool) -> tuple[int, int]:
    """Rows that share a prefix come one by one, each waiting while two long rows run that share nothing. Prompt tokens
    found in the cache, and found in one that forgets nothing."""
    pool, rng = BlockPool(24, 4), np.random.default_rng(0)
    if not knows_who_waits:  # what is left is least recently used first
        pool.expect = pool.leave = lambda root: None  # type: ignore[method-assign]
    simulation = Simulation(pool, max_num_seqs=1, budget=64)
    shared, strangers = rng.integers(0, END, size=40).tolist(), iter(range(100, 200))
    simulation.add(0, [*shared, 0], max_tokens=1)
    for key in range(1, 6):
        pair = [next(strangers), next(strangers)]
        for stranger in pair:
            simulation.add(stranger, rng.integers(0, END, size=40).tolist(), max_tokens=6)
        simulation.add(key, [*shared, key], max_tokens=1)
        while simulation.sequences.keys() & set(pair):
            simulation.step()
    run_all(simulation)
    return simulation.scheduler.cached_tokens, simulation.scheduler.cachable_tokens


def test_a_prefix_that_rows_wait_for_outlives_those_of_rows_that_are_through() -> None:
    assert hits_between_strangers(knows_who_waits=True) == (5 * 40, 5 * 40)
    assert hits_between_strangers(knows_who_waits=False) == (64, 5 * 40)


def test_what_a_long_row_leaves_behind_does_not_push_out_a_prefix_that_rows_wait_for() -> None:
    pool = BlockPool(26, 4, groups=(KvGroup(6),))
    simulation = Simulation(pool, max_num_seqs=1, budget=8)
    shared = [1, 2, 3, 4] * 3
    for key, prompt in enumerate([[*shared, 0], [0, 1] * 60, [*shared, 2]]):  # the second is longer than the pool
        simulation.add(key, prompt, max_tokens=1)
        simulation.step()
    run_all(simulation)
    assert simulation.scheduler.cached_tokens == len(shared)

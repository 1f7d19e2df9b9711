"""Who runs next: admission, chunked prefill under a token budget, preemption. numpy only.

Each step computes at most `max_batched_tokens` tokens: one for every running row that decodes, the
rest for prompts, cut wherever the budget ends. A waiting row is admitted while the blocks that the
running rows are expected to need still fit (see estimate.py); when the guess was wrong the youngest
row is preempted, its blocks freed, and it is computed again later from what the cache still holds.

A step may be planned while the tokens of the one before are on the device only (`advance` has been called for it, and
`receive` not yet). The device works in order, so blocks may change hands as soon as no row here holds them; but a
block gets its name when all its tokens are known, and no row is preempted while a token of any is unread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from batchrun.engine.batch import Batch, make_batch
from batchrun.engine.bursts import NO_LOSS, Bursts
from batchrun.engine.estimate import LengthEstimate
from batchrun.engine.kv_cache import HOLE, BlockPool, EverSeen, RowBlocks, block_hashes, root
from batchrun.engine.sequence import Sequence
from batchrun.engine.slots import Slots
from batchrun.engine.swap import SwapSpace
from batchrun.engine.waiting import WaitingQueue

log = logging.getLogger(__name__)


class Scheduler:
    def __init__(self, pool: BlockPool, max_num_seqs: int, max_batched_tokens: int) -> None:
        self.pool = pool
        self.slots = Slots(max_num_seqs, pool.block_size, pool.groups)
        self.max_batched_tokens = max_batched_tokens
        self.waiting = WaitingQueue()
        self.estimate = LengthEstimate()
        self.swap: SwapSpace | None = None  # where preempted rows keep their KV
        self.bursts = Bursts(NO_LOSS, lambda: False)
        self.num_preemptions = 0
        self.prompt_tokens = 0  # of all admitted prompts
        self.cached_tokens = 0  # of these, found in the cache
        self.cachable_tokens = 0  # of these, what a cache without a limit would have found
        self._ever_seen = EverSeen()
        self._computing: Counter[bytes] = Counter()  # prefixes that a running row is about to compute

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its `max_total` tokens must fit in the pool alone."""
        step = max(self.max_batched_tokens, sequence.max_total - sequence.settled)
        assert self.pool.blocks_for(sequence.max_total, step) <= self.pool.num_blocks
        if sequence.digests:
            self.pool.expect(sequence.digests[0])
        self.waiting.append(sequence)

    def has_work(self) -> bool:
        return bool(self.waiting) or self.slots.num_running > 0

    def schedule(self) -> Batch | None:
        """The next step. None if nothing is there, or nothing can be planned before the last step is received."""
        self._give_back_passed()
        rows, query_lens = self._continue_running()
        missing = self._missing_columns(rows, query_lens)
        if self._is_short(missing) and self.slots.unread[self.slots.order].any():
            return None
        rows, query_lens = self._grow_blocks(rows, query_lens, missing)
        decodes = len(rows) > 0 and bool((query_lens == 1).all()) and not self.slots.scoring[rows].any()
        if not self._preempted and self.bursts.opens(self.slots.num_running, decodes):
            admitted = list(self._admit(self.max_batched_tokens - int(query_lens.sum())))
            rows = np.concatenate([rows, np.array([slot for slot, _ in admitted], dtype=np.int64)])
            query_lens = np.concatenate([query_lens, np.array([n for _, n in admitted], dtype=np.int64)])
        return make_batch(self.slots, rows, query_lens) if len(rows) else None

    def advance(self, batch: Batch) -> None:
        """Record a step that was launched: KV positions, full blocks, and that sampled rows have one more token."""
        slots, size = self.slots, self.pool.block_size
        before = slots.num_computed[batch.slots]
        slots.num_computed[batch.slots] = batch.seq_lens
        if self.pool.prefix_caching:
            full = np.minimum(batch.seq_lens, slots.num_tokens[batch.slots]) // size
            for i in np.flatnonzero(full > before // size):
                self._register_blocks(int(batch.slots[i]), int(before[i]) // size, int(full[i]))
        slots.unread[batch.slots[batch.sampled]] += 1

    def receive(self, batch: Batch, tokens: np.ndarray) -> np.ndarray:
        """Take the tokens (int64 [K]) of a step. Returns which of its sampled rows are still there (bool [K])."""
        slots, size = self.slots, self.pool.block_size
        sampled = batch.slots[batch.sampled]
        here = slots.tenant[sampled] == batch.tenants[batch.sampled]
        if not here.all():
            sampled, tokens = sampled[here], tokens[here]
        slots.token_ids[sampled, slots.num_tokens[sampled]] = tokens
        slots.num_tokens[sampled] += 1
        slots.unread[sampled] -= 1
        if self.pool.prefix_caching:
            # The step after this one may have filled a block with the token that is known only now.
            ahead = sampled[slots.unread[sampled] > 0]
            for slot in ahead[slots.num_tokens[ahead] % size == 0]:
                full = int(slots.num_tokens[slot]) // size
                self._register_blocks(int(slot), full - 1, full)
        return here

    def expected_steps(self) -> float:
        """Steps to replay until the rows that run and wait are through, as far as the lengths of others tell, and those
        that could have been."""
        slots, rows = self.slots, self.slots.order
        if not len(rows):
            return self.bursts.spared
        left = self.estimate.share * (slots.max_total[rows] - slots.num_tokens[rows]).mean()
        return self.bursts.spared + float(left) * (1 + len(self.waiting) / len(rows))

    def lower_budget(self, tokens: int) -> None:
        """Let steps have at most so many tokens from now on; the rows of a step that failed are in the next ones."""
        log.warning("a step found no memory: from now on steps have at most %d tokens", tokens)
        self.max_batched_tokens = tokens

    def finish(self, slot: int) -> Sequence:
        """Take a sequence out and free its blocks, which stay findable as prefixes."""
        if not self.slots.silent[slot]:
            generated = int(self.slots.num_tokens[slot] - self.slots.num_prompt[slot])
            allowed = int(self.slots.max_total[slot] - self.slots.num_prompt[slot])
            self.estimate.observe(generated, allowed)
        return self._remove(slot, ended=True)

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running."""
        if sequence.slot >= 0:
            self._remove(sequence.slot, ended=True)
        else:
            self.waiting.remove(sequence)
            self._leave(sequence)

    def _continue_running(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that go on and their query lengths: decodes first, then prompts in order of admission."""
        self._preempted = False
        rows = self.slots.order
        query_lens = self._to_compute(rows)
        turn = np.argsort(query_lens > 1, kind="stable")
        room = self.max_batched_tokens - np.cumsum(query_lens[turn]) + query_lens[turn]
        granted = np.empty_like(query_lens)
        granted[turn] = np.clip(room, 0, query_lens[turn])
        return rows[granted > 0], granted[granted > 0]

    def _to_compute(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each row that no step has computed (int64 [R]). The last that a row may have never need be."""
        slots = self.slots
        total = slots.num_tokens[rows] + slots.unread[rows]
        done = (slots.unread[rows] > 0) & (total >= slots.max_total[rows])
        return np.where(done, 0, total - slots.num_computed[rows])

    def _missing_columns(self, rows: np.ndarray, query_lens: np.ndarray) -> np.ndarray:
        """Blocks of each table that each row lacks for its query tokens (int64 [R])."""
        slots = self.slots
        columns = -(-(slots.num_computed[rows] + query_lens) // self.pool.block_size)
        return np.maximum(columns - slots.num_blocks[rows], 0)

    def _is_short(self, missing: np.ndarray) -> bool:
        return int(missing.sum()) * self.pool.num_tables > self.pool.num_free

    def _grow_blocks(
        self, rows: np.ndarray, query_lens: np.ndarray, missing: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Give each row the blocks that it lacks, preempting the youngest rows if there are too few."""
        while self._is_short(missing):
            victim = int(self.slots.order[-1])
            self._preempt(victim)
            stays = rows != victim
            rows, query_lens, missing = rows[stays], query_lens[stays], missing[stays]
        for i in np.flatnonzero(missing > 0):
            self.slots.append_blocks(int(rows[i]), self.pool.allocate(int(missing[i])))
        return rows, query_lens

    def _preempt(self, slot: int) -> None:
        if self.swap is not None and (sequence := self.slots.sequences[slot]) is not None:
            self.swap.keep(sequence, self.slots.blocks(slot), int(self.slots.num_computed[slot]), self.pool)
        self.waiting.appendleft(self._remove(slot, ended=False))
        self.estimate.raise_after_preemption()
        self.num_preemptions += 1
        self._preempted = True

    def _admit(self, budget: int) -> Iterator[tuple[int, int]]:
        """Move waiting sequences into slots; yields (slot, query length). Looks only at the queue's head,
        so the cost does not depend on how many wait."""
        expected = self._expected_blocks() if self.waiting else 0
        while self.waiting and budget > 0:
            if not self.slots.num_free:
                self.bursts.is_full(self.slots.num_running)
                break
            sequence = self.waiting.head()
            cached = self._cached_blocks(sequence)
            num_cached = len(cached[0])
            if self._is_being_computed(sequence, num_cached):
                break  # one step later the prefix can be shared instead of computed twice
            total = self._blocks_for(len(sequence.token_ids), sequence.num_prompt, sequence.max_total)
            free = self.pool.num_free - self.pool.count_free(cached)
            start = num_cached * self.pool.block_size
            if self.swap is not None:
                start = self.swap.start(sequence, num_cached, self.pool.block_size)
            query_len = min(budget, len(sequence.token_ids) - start)
            columns = -(-(start + query_len) // self.pool.block_size) - num_cached
            now = columns * self.pool.num_tables
            # A long prompt may hold more now than at its end, where a window has left most of it behind.
            own = max(total - sum(len(table) - table.count(HOLE) for table in cached), now)
            # Alone in the engine a sequence always starts: add() made sure that it fits.
            if expected + own > free and (self.slots.num_running or now > free):
                self.bursts.is_full(self.slots.num_running)
                break
            self.waiting.popleft()
            self.pool.hold(cached)
            new = self.pool.allocate(columns)
            slot = self.slots.put(sequence, [a + b for a, b in zip(cached, new, strict=True)], start)
            if self.swap is not None and start > num_cached * self.pool.block_size:
                self.swap.restore(sequence, self.slots.blocks(slot), num_cached)
                self._register_blocks(slot, num_cached, start // self.pool.block_size)
            self._note_admission(sequence, start)
            self.bursts.let_in(query_len)
            expected += own - now
            budget -= query_len
            yield slot, query_len

    def _note_admission(self, sequence: Sequence, start: int) -> None:
        sequence.pending = sequence.digests[start // self.pool.block_size :] if self.pool.prefix_caching else []
        self._computing.update(sequence.pending)
        if sequence.cached_tokens < 0:
            sequence.admitted_at = time.perf_counter()
            sequence.cached_tokens = min(start, sequence.num_prompt)
            self.cached_tokens += sequence.cached_tokens
            self.prompt_tokens += sequence.num_prompt
            usable = sequence.digests[: (sequence.num_prompt - 1) // self.pool.block_size]
            self.cachable_tokens += self._ever_seen.count(usable) * self.pool.block_size

    def _cached_blocks(self, sequence: Sequence) -> RowBlocks:
        """Blocks that already hold the head of the sequence, short of its last token, which must be computed."""
        return self.pool.match(sequence.digests[: sequence.reusable // self.pool.block_size])

    def _is_being_computed(self, sequence: Sequence, num_cached: int) -> bool:
        usable = sequence.reusable // self.pool.block_size
        return num_cached < min(usable, len(sequence.digests)) and sequence.digests[num_cached] in self._computing

    def _expected_blocks(self) -> int:
        """Blocks that the running rows are still expected to ask for."""
        slots = self.slots
        rows = slots.order
        total = self._blocks_for(slots.num_tokens[rows], slots.num_prompt[rows], slots.max_total[rows])
        held = self.pool.num_tables * slots.num_blocks[rows]
        for group, given_back in zip(self.pool.groups, slots.num_given_back, strict=True):
            if group.window is not None:
                held = held - group.tables * given_back[rows]
        return int(np.maximum(total - held, 0).sum())

    def _blocks_for(self, num_tokens: Any, num_prompt: Any, max_total: Any) -> Any:
        """Blocks at the expected end of a sequence; int or int64 [n] alike. The last token is never written."""
        expected = num_prompt + np.ceil(self.estimate.share * (max_total - num_prompt)).astype(np.int64)
        return self.pool.blocks_for(np.maximum(num_tokens, expected - 1))

    def _register_blocks(self, slot: int, first: int, last: int) -> None:
        """Name the blocks [first, last) of a row, which this step has filled."""
        sequence = self.slots.sequences[slot]
        assert sequence is not None
        size, digests = self.pool.block_size, sequence.digests
        last = min(last, sequence.lasting // size)
        if len(digests) < last:
            tail = self.slots.token_ids[slot, len(digests) * size : last * size]
            start = root(sequence.adapter)
            if not digests:
                self.pool.expect(block_hashes(tail[:size], size, start)[0])
            digests += block_hashes(tail, size, digests[-1] if digests else start)
        for index in range(first, last):
            self.pool.register(self.slots.block_tables[:, slot, index].tolist(), digests[index], digests[0])
        self._settle(sequence, max(0, last - first))

    def _settle(self, sequence: Sequence, count: int) -> None:
        """The next `count` pending prefixes of the sequence are computed, or never will be."""
        for digest in sequence.pending[:count]:
            self._computing[digest] -= 1
            if not self._computing[digest]:
                del self._computing[digest]
        del sequence.pending[:count]

    def _give_back_passed(self) -> None:
        """Free the blocks of which no query to come sees anything."""
        rows = self.slots.order
        for number, group in enumerate(self.pool.groups):
            if group.window is None:
                continue
            settled = np.minimum(self.slots.num_computed[rows], self.slots.settled[rows])
            passed = group.first_seen(settled) // self.pool.block_size
            for i in np.flatnonzero(passed > self.slots.num_given_back[number, rows]):
                self.pool.release(self.slots.give_back(int(rows[i]), number, int(passed[i])), others=True)

    def _remove(self, slot: int, ended: bool) -> Sequence:
        sequence, blocks = self.slots.take(slot)
        self._settle(sequence, len(sequence.pending))
        if ended:
            self._leave(sequence)
        self.pool.release(blocks)
        return sequence

    def _leave(self, sequence: Sequence) -> None:
        if self.swap is not None:
            self.swap.forget(sequence)
        if sequence.digests:
            self.pool.leave(sequence.digests[0])

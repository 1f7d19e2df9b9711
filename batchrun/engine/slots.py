"""State of the running sequences, in numpy arrays that live from step to step.

A slot is a row of every array. Nothing here is per waiting request, and in the steady state (every
row decodes one token inside its last block) a step touches these arrays with vector operations only.
"""

from __future__ import annotations

import numpy as np

from batchrun.engine.kv_cache import HOLE, KvGroup, RowBlocks
from batchrun.engine.repetition import RepetitionWatch
from batchrun.engine.sequence import Sequence


class Slots:
    """`capacity` slots; `order` lists the used ones, oldest admission first."""

    def __init__(self, capacity: int, block_size: int, groups: tuple[KvGroup, ...] = (KvGroup(),)) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self._windowed = [number for number, group in enumerate(groups) if group.window is not None]
        self._first_table = np.cumsum([0, *(group.tables for group in groups)]).tolist()  # of each group
        self.sequences: list[Sequence | None] = [None] * capacity
        self.order = np.empty(0, dtype=np.int64)
        self._free = list(range(capacity - 1, -1, -1))
        self.token_ids = np.zeros((capacity, 4 * block_size), dtype=np.int32)
        self.block_tables = np.zeros((self._first_table[-1], capacity, 4), dtype=np.int32)
        self.num_tokens = np.zeros(capacity, dtype=np.int64)  # whose ids are known here
        self.unread = np.zeros(capacity, dtype=np.int64)  # sampled after these by steps that were launched
        self.tenant = np.zeros(capacity, dtype=np.int64)  # number of the slot's admission; 0: nobody is in it
        self.num_computed = np.zeros(capacity, dtype=np.int64)  # positions whose KV is in the cache, or on its way
        self.num_blocks = np.zeros(capacity, dtype=np.int64)  # in each table, with those given back
        self.num_given_back = np.zeros((len(groups), capacity), dtype=np.int64)  # of these, in a table of each group
        self.num_prompt = np.zeros(capacity, dtype=np.int64)
        self.max_total = np.zeros(capacity, dtype=np.int64)
        self.settled = np.zeros(capacity, dtype=np.int64)  # positions that, once computed, are never computed again
        self.temperature = np.zeros(capacity, dtype=np.float32)
        self.top_p = np.ones(capacity, dtype=np.float32)
        self.top_k = np.zeros(capacity, dtype=np.int64)
        self.min_p = np.zeros(capacity, dtype=np.float32)
        self.seed = np.zeros(capacity, dtype=np.int64)
        self.repetition_penalty = np.ones(capacity, dtype=np.float32)
        self.presence_penalty = np.zeros(capacity, dtype=np.float32)
        self.frequency_penalty = np.zeros(capacity, dtype=np.float32)
        self.min_tokens = np.zeros(capacity, dtype=np.int64)
        self.edited = np.zeros(capacity, dtype=bool)  # has penalties or token rules: see logits.py
        self.penalised = np.zeros(capacity, dtype=bool)  # of these, has penalties
        self.rules = np.zeros(capacity, dtype=np.int64)  # number of its token rules; 0: none
        self.looks_back = np.zeros(capacity, dtype=bool)  # of these, has rules that depend on the tokens so far
        self.counts_apart = False  # the device counts tokens: penalties need none from here
        self.num_logprobs = np.full(capacity, -1, dtype=np.int64)  # -1: none, 0: of the generated tokens alone
        self.ignore_eos = np.zeros(capacity, dtype=bool)
        self.watched = np.zeros(capacity, dtype=bool)  # has stop strings or stop token ids of its own, or thinks
        self.thinks = np.zeros(capacity, dtype=bool)  # is not known to be through with its thinking
        self.constrained = np.zeros(capacity, dtype=bool)  # its text must have a form
        self.untouched = np.zeros(capacity, dtype=bool)  # no token of it has been sampled yet
        self.scoring = np.zeros(capacity, dtype=bool)  # has given tokens that are still to be scored
        self.silent = np.zeros(capacity, dtype=bool)  # generates nothing
        self.adapter = np.zeros(capacity, dtype=np.int64)  # number of the row's adapter; 0: none
        self.repetition = RepetitionWatch(capacity)
        self._num_put = 0

    @property
    def num_running(self) -> int:
        return len(self.order)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def need_host(self, rows: np.ndarray) -> bool:
        """Whether any of the slots `rows` must have its last token read before its next step can be planned."""
        needs = self.constrained[rows] | self.thinks[rows] | self.looks_back[rows] | self.scoring[rows]
        if not self.counts_apart:
            needs |= self.penalised[rows]
        return bool(needs.any())

    def put(self, sequence: Sequence, blocks: RowBlocks, num_computed: int) -> int:
        """Start `sequence` in a free slot, with KV blocks that hold its first `num_computed` positions."""
        slot = self._free.pop()
        self._widen(sequence.max_total)
        params = sequence.request.params
        count = len(sequence.token_ids)
        self.sequences[slot], sequence.slot = sequence, slot
        self.order = np.append(self.order, slot)
        self._num_put += 1
        self.tenant[slot], self.unread[slot] = self._num_put, 0
        self.token_ids[slot, :count] = sequence.token_ids
        self.block_tables[:, slot, : len(blocks[0])] = blocks
        self.num_tokens[slot], self.num_computed[slot], self.num_blocks[slot] = count, num_computed, len(blocks[0])
        for group in self._windowed:
            self.num_given_back[group, slot] = blocks[self._first_table[group]].count(HOLE)
        self.num_prompt[slot], self.max_total[slot] = sequence.num_prompt, sequence.max_total
        self.settled[slot] = sequence.settled
        self.temperature[slot], self.top_p[slot], self.top_k[slot] = params.temperature, params.top_p, params.top_k
        self.min_p[slot], self.min_tokens[slot] = params.min_p, params.min_tokens
        self.seed[slot] = sequence.seed
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        self.penalised[slot] = bool(penalised)
        rules = sequence.rules
        self.edited[slot] = bool(penalised) or (rules is not None and rules.lasting)
        self.rules[slot] = 0 if rules is None else rules.number
        self.looks_back[slot] = rules is not None and len(rules.lasts) > 0
        self.num_logprobs[slot] = -1 if sequence.logprobs is None else sequence.logprobs.count
        thinks = sequence.thinking is not None and not sequence.thinking.over
        self.thinks[slot] = thinks
        self.watched[slot] = bool(params.stop or params.stop_token_ids or thinks)
        self.constrained[slot] = sequence.constraint is not None and not thinks
        self.ignore_eos[slot] = params.ignore_eos and sequence.constraint is None
        self.untouched[slot] = not sequence.first_token_at
        self.scoring[slot] = sequence.scoring is not None
        self.adapter[slot] = sequence.adapter
        self.silent[slot] = bool(sequence.request.continuations) or params.max_tokens == 0
        self.repetition.put(slot, params, sequence.token_ids[sequence.num_prompt :])
        return slot

    def take(self, slot: int) -> tuple[Sequence, RowBlocks]:
        """Empty a slot: its sequence, with token ids brought up to date, and its blocks. Unread tokens are lost."""
        sequence = self.sequences[slot]
        assert sequence is not None
        blocks = self.blocks(slot)
        sequence.token_ids = self.token_ids[slot, : self.num_tokens[slot]].copy()
        sequence.slot, self.sequences[slot] = -1, None
        self.tenant[slot] = 0
        self.order = self.order[self.order != slot]
        self._free.append(slot)
        return sequence, blocks

    def append(self, slot: int, tokens: list[int]) -> None:
        """Give a row tokens that no step has sampled; one of the next steps computes them."""
        start = self.num_tokens[slot]
        self.token_ids[slot, start : start + len(tokens)] = tokens
        self.num_tokens[slot] += len(tokens)
        sequence = self.sequences[slot]
        if tokens and sequence is not None and self.repetition.max_pattern[slot]:
            generated = self.token_ids[slot, sequence.num_prompt : self.num_tokens[slot]]
            self.repetition.put(slot, sequence.request.params, generated)

    def sequence(self, slot: int) -> Sequence:
        """Of a slot that is used."""
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def blocks(self, slot: int) -> RowBlocks:
        blocks: RowBlocks = self.block_tables[:, slot, : self.num_blocks[slot]].tolist()
        return blocks

    def drop_last(self, slot: int) -> None:
        """Take back the token that was sampled last; the next step computes the one before it again."""
        self.num_tokens[slot] -= 1
        self.num_computed[slot] -= 1

    def append_blocks(self, slot: int, blocks: RowBlocks) -> None:
        held, count = self.num_blocks[slot], len(blocks[0])
        self.block_tables[:, slot, held : held + count] = blocks
        self.num_blocks[slot] += count

    def give_back(self, slot: int, group: int, count: int) -> RowBlocks:
        """The first `count` blocks of the group's tables, less those given back before; holes take their place."""
        tables = self.block_tables[self._first_table[group] : self._first_table[group + 1], slot]
        due = slice(self.num_given_back[group, slot], count)
        blocks: RowBlocks = tables[:, due].tolist()
        tables[:, due] = HOLE
        self.num_given_back[group, slot] = count
        return blocks

    def rewind(self, slot: int, length: int, tokens: np.ndarray) -> None:
        """Put `tokens` (int32 [n]) in place of all that follows the first `length` tokens, whose KV stays."""
        self.token_ids[slot, length : length + len(tokens)] = tokens
        self.num_tokens[slot], self.num_computed[slot] = length + len(tokens), length

    def _widen(self, tokens: int) -> None:
        """Grow the token and block columns to hold `tokens` positions. They start narrow because
        capacity times the longest possible sequence can be far more memory than a job ever uses."""
        if tokens > self.token_ids.shape[1]:
            width = max(tokens, 2 * self.token_ids.shape[1])
            self.token_ids = _columns(self.token_ids, width)
            self.block_tables = _columns(self.block_tables, -(-width // self.block_size))


def _columns(array: np.ndarray, width: int) -> np.ndarray:
    wider = np.zeros((*array.shape[:-1], width), dtype=array.dtype)
    wider[..., : array.shape[-1]] = array
    return wider

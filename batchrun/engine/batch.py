"""What one step computes, as flat numpy arrays: the whole contract between policy and device code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchrun.engine.slots import Slots

UNREAD = -1  # in place of a token that the host has not read


@dataclass(slots=True)
class Batch:
    """R rows (sequences) with T query tokens in all. Rows with one query token come first. There are G block tables,
    one for each part of the model's layers (see kv_layout.py)."""

    slots: np.ndarray  # int64 [R]
    tenants: np.ndarray  # int64 [R]: admissions of these rows, as a slot may have another row when the step is read
    token_ids: np.ndarray  # int64 [T], UNREAD where `fed` says whose token it is
    positions: np.ndarray  # int64 [T]
    slot_mapping: np.ndarray  # int64 [G, T]: block * block_size + offset, where the KV of the token goes
    query_starts: np.ndarray  # int64 [R + 1]
    seq_lens: np.ndarray  # int64 [R]: positions in the cache once this step is done
    block_tables: np.ndarray  # int32 [G, R, B], HOLE for blocks that were given back
    num_decodes: int  # rows with a single query token
    sampled: np.ndarray  # int64 [K]: rows whose last query token needs logits
    fed: np.ndarray | None = None  # int64 [T]: slot whose newest token, which only the device has, comes here; -1: none
    adapters: np.ndarray | None = None  # int64 [T]: number of each token's adapter, 0 for none; None: no row has one

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def logits_index(self) -> np.ndarray:
        """int64 [K]: places in the flattened batch whose logits are needed."""
        return self.query_starts[self.sampled + 1] - 1


def make_batch(slots: Slots, rows: np.ndarray, query_lens: np.ndarray) -> Batch:
    """Gather the next `query_lens[i]` uncomputed tokens of slot `rows[i]` (both int64 [R])."""
    by_length = np.argsort(query_lens > 1, kind="stable")
    rows, query_lens = rows[by_length], query_lens[by_length]
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=starts[1:])
    computed = slots.num_computed[rows]
    owner = np.repeat(rows, query_lens)
    positions = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], query_lens)
    size = slots.block_size
    seq_lens = computed + query_lens
    token_ids, fed, unread = slots.token_ids[owner, positions].astype(np.int64), None, slots.unread[rows]
    if unread.any():
        fed = np.where(positions >= slots.num_tokens[owner], owner, -1)
        token_ids[fed >= 0] = UNREAD
    return Batch(
        slots=rows,
        tenants=slots.tenant[rows],
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots.block_tables[:, owner, positions // size].astype(np.int64) * size + positions % size,
        query_starts=starts,
        seq_lens=seq_lens,
        block_tables=slots.block_tables[:, rows, : -(-int(seq_lens.max()) // size)],
        num_decodes=int((query_lens == 1).sum()),
        sampled=np.flatnonzero((seq_lens == slots.num_tokens[rows] + unread) & ~slots.silent[rows]),
        fed=fed,
        adapters=slots.adapter[owner] if slots.adapter[rows].any() else None,
    )

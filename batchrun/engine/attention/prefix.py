"""Which rows of a batch begin with the same KV pages, so that the pages can be read once for all of them.

numpy only. Sharing is physical here: two rows share a prefix where their block tables name the same blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from batchrun.engine.batch import Batch
from batchrun.engine.kv_cache import HOLE


@dataclass(slots=True)
class PrefixGroup:
    """Rows (int64 [n]) whose first `depth` blocks are `blocks` (int64 [depth]), all computed before this step."""

    rows: np.ndarray
    blocks: np.ndarray

    @property
    def depth(self) -> int:
        return len(self.blocks)


class Sharing(NamedTuple):
    """G groups of a step as flat arrays, all int64: what kernels read, and what plans are made from.

    Group g has the queries `tokens` [N], which stand at `positions` [N], from `token_starts[g]` on, of [G + 1].
    """

    first_keys: np.ndarray  # [R]: positions that its group reads for a row
    leaders: np.ndarray  # [G]: a row of each
    shared_lens: np.ndarray  # [G]: positions that are shared
    token_starts: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray

    @property
    def token_counts(self) -> np.ndarray:
        return np.diff(self.token_starts)

    @classmethod
    def none(cls) -> Self:
        """Of no rows."""
        return cls.of([], 1, *(np.empty(0, dtype=np.int64) for _ in range(3)))

    @classmethod
    def of(
        cls,
        groups: list[PrefixGroup],
        block_size: int,
        query_starts: np.ndarray,
        query_lens: np.ndarray,
        positions: np.ndarray,
    ) -> Self:
        """Of rows whose queries are at `query_starts` and so many (both int64 [R]) among `positions` int64 [T]."""
        rows = np.concatenate([np.empty(0, dtype=np.int64), *(group.rows for group in groups)])
        shared = np.array([group.depth * block_size for group in groups], dtype=np.int64)
        sizes = np.array([len(group.rows) for group in groups], dtype=np.int64)
        counts = query_lens[rows]
        ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        tokens = np.repeat(query_starts[rows] - ends[:-1], counts) + np.arange(ends[-1])
        first_keys = np.zeros_like(query_lens)
        first_keys[rows] = np.repeat(shared, sizes)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        return cls(first_keys, rows[starts[:-1]], shared, ends[starts], tokens, positions[tokens])


def prefix_groups(
    batch: Batch, tables: np.ndarray, block_size: int, min_rows: int, min_saved: int
) -> list[PrefixGroup]:
    """`shared_prefixes` of a whole batch, of which `tables` int32 [R, B] is one of the block tables."""
    computed = batch.seq_lens - np.diff(batch.query_starts)
    return shared_prefixes(computed, tables, block_size, min_rows, min_saved)


def shared_prefixes(
    computed: np.ndarray, tables: np.ndarray, block_size: int, min_rows: int, min_saved: int
) -> list[PrefixGroup]:
    """Disjoint groups of at least `min_rows` rows that save at least `min_saved` block reads each.

    `computed` int64 [R] are positions that were there before the step: pages are shared up to the last of them, since
    own queries see all of these. `tables` int32 [R, B] are the rows' block tables. Each group takes the depth that
    saves most: (rows that share so deep - 1) x depth. Rows that have given back their first block read the little that
    is left alone.
    """
    limit = computed // block_size
    left = np.flatnonzero((limit > 0) & (tables[:, 0] != HOLE))
    order = left[np.argsort(tables[left, 0], kind="stable")]
    _, starts, counts = np.unique(tables[order, 0], return_index=True, return_counts=True)
    groups: list[PrefixGroup] = []
    for start, count in zip(starts[counts >= min_rows], counts[counts >= min_rows], strict=True):
        members = order[start : start + count]
        while len(members) >= min_rows:
            group = _best_group(tables, members, limit, min_rows)
            members = members[~np.isin(members, group.rows)]
            if (len(group.rows) - 1) * group.depth >= min_saved:
                groups.append(group)
    return groups


def _best_group(tables: np.ndarray, members: np.ndarray, limit: np.ndarray, min_rows: int) -> PrefixGroup:
    """The group that saves most along the most common path through the members' tables, which begin alike."""
    best = PrefixGroup(members, tables[members[0], :1].astype(np.int64))
    depth, saved = 0, 0
    while len(members) >= min_rows:
        blocks = tables[members, depth : int(limit[members].min())]
        differ = (blocks != blocks[0]).any(axis=0)
        depth += int(differ.argmax()) if differ.any() else len(differ)
        if (len(members) - 1) * depth > saved:
            saved = (len(members) - 1) * depth
            best = PrefixGroup(members, tables[members[0], :depth].astype(np.int64))
        members = members[limit[members] > depth]
        if len(members) >= min_rows:
            values, counts = np.unique(tables[members, depth], return_counts=True)
            members = members[tables[members, depth] == values[counts.argmax()]]
    return best

"""Which rows and keys each program of prefix_group takes: planned from the groups and the number of multiprocessors.

A plan is made on the host and lies in device memory, counts included, so that a CUDA graph can be replayed with
another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchrun_kernels.paged import KvPages, Upload, head_dim_of, upload_to
from batchrun_kernels.paged_prefill import block_m_of

MIN_CHUNK = 512  # keys: below, writing and reading partial results costs too much beside them
PROGRAMS_PER_SM = 2


class PrefixPlan(NamedTuple):
    """The list of work, and the memory for what comes of it: attention of each query over each chunk of its keys."""

    counts: Tensor
    units: Tensor
    run_starts: Tensor
    runs: Tensor
    run_lse: Tensor
    block_m: int  # rows of a tile


class PrefixSizes(NamedTuple):
    """Of the launches of a layer: what does not depend on the groups."""

    group: int  # query heads of a key-value head
    kv_heads: int
    block_m: int
    programs: int  # that are worth having

    def most_units(self, groups: int, tokens: int) -> int:
        """cut_prefixes makes no more of so many groups and queries."""
        return groups + tokens * self.group // self.block_m + -(-self.programs // self.kv_heads)

    def most_runs(self, tokens: int) -> int:
        """Nor more runs."""
        return tokens + -(-self.programs * self.block_m // (self.kv_heads * self.group))


class PrefixWork(NamedTuple):
    """As the kernel reads it."""

    counts: np.ndarray  # [2]: units of work, keys of a chunk
    units: np.ndarray  # [U, 3]: group, place among its tiles of rows, place among its chunks of keys
    run_starts: np.ndarray  # [N + 1]: each query's first run, one for each chunk


def prefix_sizes(most_tokens: int, heads: int, pages: KvPages, itemsize: int, num_sms: int) -> PrefixSizes:
    """For groups of at most so many queries, whose elements have `itemsize` bytes."""
    kv_heads = pages.keys.shape[2]
    group = heads // kv_heads
    block_m = min(block_m_of(head_dim_of(pages), itemsize), 128 if most_tokens * group > 64 else 64)
    return PrefixSizes(group, kv_heads, block_m, num_sms * PROGRAMS_PER_SM)


def cut_prefixes(
    shared_lens: Sequence[int] | np.ndarray,
    token_counts: Sequence[int] | np.ndarray,
    sizes: PrefixSizes,
    chunk: int | None = None,
) -> PrefixWork:
    """The work for groups of so many shared positions and queries (both [G]): chunks of about as many keys as give each
    program one, MIN_CHUNK at least; or of `chunk`, a multiple of 64, which makes a row's result independent of the
    other groups."""
    lengths, counts = np.asarray(shared_lens, dtype=np.int64), np.asarray(token_counts, dtype=np.int64)
    tiles = -(-counts * sizes.group // sizes.block_m)
    if chunk is None:
        work = int((tiles * lengths).sum()) * sizes.kv_heads
        chunk = max(MIN_CHUNK, -(-work // (sizes.programs * 64)) * 64)
    chunks = np.maximum(1, -(-lengths // chunk))
    each = tiles * chunks
    group = np.repeat(np.arange(len(lengths)), each)
    place = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    return PrefixWork(
        counts=np.array([len(group), chunk]),
        units=np.stack([group, place % tiles[group], place // tiles[group]], axis=1),
        run_starts=np.concatenate([[0], np.cumsum(np.repeat(chunks, counts))]),
    )


def plan_prefix(
    shared_lens: Sequence[int] | np.ndarray,
    token_counts: Sequence[int] | np.ndarray,
    heads: int,
    pages: KvPages,
    itemsize: int,
    *,
    num_sms: int,
    chunk: int | None = None,
    upload: Upload | None = None,
) -> PrefixPlan:
    """The plan for groups of so many shared positions and queries, on the device of `pages`, where `upload` brings it
    (None: copies). `itemsize` is that of the queries, and `chunk` as for cut_prefixes."""
    sizes = prefix_sizes(int(np.max(token_counts, initial=0)), heads, pages, itemsize, num_sms)
    work = cut_prefixes(shared_lens, token_counts, sizes, chunk)
    upload = upload or upload_to(pages.keys.device)
    shape = (int(work.run_starts[-1]), heads, pages.values.shape[3])
    runs = torch.empty(shape, device=pages.keys.device)
    return PrefixPlan(
        counts=upload(work.counts),
        units=upload(work.units),
        run_starts=upload(work.run_starts),
        runs=runs,
        run_lse=runs.new_empty(shape[:2]),
        block_m=sizes.block_m,
    )

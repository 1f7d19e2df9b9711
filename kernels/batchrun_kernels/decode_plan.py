"""Who attends to which keys in paged_decode: chunks of sequences, planned from lengths and the number of
multiprocessors.

A plan is made on the host and lies in device memory, so that a CUDA graph can be replayed with another one. It stays
valid for sequences that have grown since: the last chunk of each takes what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchrun_kernels.paged import KvPages, Upload, attention_shape, head_dim_of, padded, tile_of, upload_to
from batchrun_kernels.tuned import tuned

MAX_QUERIES = 8  # per sequence; longer ones are paged_prefill's
MAX_ROWS = 64  # query heads within queries per program; more take several programs
PROGRAMS_PER_SM = 2
MIN_CHUNK = 256  # keys: below, writing and reading partial results costs too much beside them


class DecodePlan(NamedTuple):
    """The list of work, and the memory that a launch needs beside its output. Launches may use it one after another."""

    counts: Tensor
    unit_sequences: Tensor
    chunk_starts: Tensor
    arrived: Tensor
    runs: Tensor
    run_lse: Tensor
    programs: int


class DecodeSizes(NamedTuple):
    """Of the launches of a layer: what does not depend on the sequences."""

    parts: int  # programs' shares of a chunk: kv heads times tiles of rows
    rows: int  # of a share: query heads within queries
    tile: int  # keys
    programs: int  # at most

    def most_units(self, sequences: int) -> int:
        """cut_decode makes no more of so many sequences."""
        return sequences + -(-2 * self.programs // self.parts)


class DecodeWork(NamedTuple):
    """As the kernel reads it."""

    counts: np.ndarray  # [2]: units of work, tiles of a chunk
    unit_sequences: np.ndarray  # [U]
    chunk_starts: np.ndarray  # [B + 1]: each sequence's first unit


def decode_sizes(most_queries: int, heads: int, pages: KvPages, itemsize: int, num_sms: int) -> DecodeSizes:
    """For sequences of at most so many queries, whose elements have `itemsize` bytes. Raises ValueError for more than
    MAX_QUERIES."""
    if most_queries > MAX_QUERIES:
        raise ValueError(f"{most_queries} queries of a sequence are more than {MAX_QUERIES}: use paged_prefill")
    kv_heads, head_dim = pages.values.shape[2], head_dim_of(pages)
    needed = most_queries * heads // kv_heads
    rows = min(MAX_ROWS if head_dim <= 128 else MAX_ROWS // 2, padded(needed))
    shape = attention_shape(pages, itemsize)
    each = tuned("paged_decode", shape, pages.keys.device, programs_per_sm=PROGRAMS_PER_SM)["programs_per_sm"]
    return DecodeSizes(kv_heads * -(-needed // rows), rows, tile_of(head_dim, itemsize), num_sms * each)


def cut_decode(
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    sizes: DecodeSizes,
    first_keys: np.ndarray | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> DecodeWork:
    """The work for sequences of these lengths (all int64 [B]): chunks of about as many keys as give each program two,
    MIN_CHUNK at least; or of `chunk` keys, which makes a sequence's result independent of the others."""
    low = np.zeros_like(seq_lens) if first_keys is None else first_keys
    if window is not None:
        low = np.maximum(low, seq_lens - query_lens - window + 1)
    tiles = -(-seq_lens // sizes.tile) - np.maximum(low, 0) // sizes.tile
    if chunk is None:
        each = -(-int(tiles.sum()) * sizes.parts // (2 * sizes.programs))
        chunk = max(MIN_CHUNK, each * sizes.tile)
    chunk_tiles = -(-chunk // sizes.tile)
    chunks = np.maximum(1, -(-tiles // chunk_tiles))
    return DecodeWork(
        counts=np.array([chunks.sum(), chunk_tiles]),
        unit_sequences=np.repeat(np.arange(len(chunks)), chunks),
        chunk_starts=np.concatenate([[0], np.cumsum(chunks)]),
    )


def plan_decode(
    seq_lens: Sequence[int] | np.ndarray,
    query_lens: Sequence[int] | np.ndarray,
    heads: int,
    pages: KvPages,
    itemsize: int,
    *,
    num_sms: int,
    first_keys: Sequence[int] | np.ndarray | None = None,
    window: int | None = None,
    chunk: int | None = None,
    upload: Upload | None = None,
) -> DecodePlan:
    """The plan for sequences of these lengths, on the device of `pages`, where `upload` brings it (None: copies).

    `itemsize` is that of the queries, `chunk` as for cut_decode. Raises ValueError for more than MAX_QUERIES queries.
    """
    lengths, counts = np.asarray(seq_lens, dtype=np.int64), np.asarray(query_lens, dtype=np.int64)
    firsts = None if first_keys is None else np.asarray(first_keys, dtype=np.int64)
    sizes = decode_sizes(int(counts.max(initial=1)), heads, pages, itemsize, num_sms)
    work = cut_decode(lengths, counts, sizes, firsts, window, chunk)
    units, device = len(work.unit_sequences), pages.keys.device
    shape = (units if units > len(lengths) else 0, sizes.parts, sizes.rows, pages.values.shape[3])
    runs = torch.empty(shape, device=device)
    upload = upload or upload_to(device)
    return DecodePlan(
        counts=upload(work.counts),
        unit_sequences=upload(work.unit_sequences),
        chunk_starts=upload(work.chunk_starts),
        arrived=upload(np.zeros(len(lengths) * sizes.parts, dtype=np.int64)),
        runs=runs,
        run_lse=runs.new_empty(shape[:3]),
        programs=max(1, min(sizes.programs, units * sizes.parts)),
    )

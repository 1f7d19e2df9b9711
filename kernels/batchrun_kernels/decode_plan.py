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

    Chunks are of about as many keys as give each of PROGRAMS_PER_SM programs on `num_sms` multiprocessors two of them,
    MIN_CHUNK at least; or of `chunk` keys, which makes a sequence's result independent of the others. `itemsize` is
    that of the queries. Raises ValueError for more than MAX_QUERIES queries.
    """
    lengths, counts = np.asarray(seq_lens, dtype=np.int64), np.asarray(query_lens, dtype=np.int64)
    most = int(counts.max(initial=1))
    if most > MAX_QUERIES:
        raise ValueError(f"{most} queries of a sequence are more than {MAX_QUERIES}: use paged_prefill")
    kv_heads, dv = pages.values.shape[2:]
    head_dim, needed = head_dim_of(pages), most * heads // kv_heads
    rows = min(MAX_ROWS if head_dim <= 128 else MAX_ROWS // 2, padded(needed))
    parts = kv_heads * -(-needed // rows)
    tile = tile_of(head_dim, itemsize)
    low = np.zeros_like(lengths) if first_keys is None else np.asarray(first_keys, dtype=np.int64)
    if window is not None:
        low = np.maximum(low, lengths - counts - window + 1)
    tiles = -(-lengths // tile) - np.maximum(low, 0) // tile
    shape = attention_shape(pages, itemsize)
    each = tuned("paged_decode", shape, pages.keys.device, programs_per_sm=PROGRAMS_PER_SM)["programs_per_sm"]
    programs = num_sms * each
    if chunk is None:
        chunk = max(MIN_CHUNK, -(-int(tiles.sum()) * parts // (2 * programs)) * tile)
    chunk_tiles = -(-chunk // tile)
    chunks = np.maximum(1, -(-tiles // chunk_tiles))
    units = int(chunks.sum())
    runs = torch.empty(units if units > len(chunks) else 0, parts, rows, dv, device=pages.keys.device)
    upload = upload or upload_to(pages.keys.device)
    return DecodePlan(
        counts=upload(np.array([units, chunk_tiles])),
        unit_sequences=upload(np.repeat(np.arange(len(chunks)), chunks)),
        chunk_starts=upload(np.concatenate([[0], np.cumsum(chunks)])),
        arrived=upload(np.zeros(len(chunks) * parts, dtype=np.int64)),
        runs=runs,
        run_lse=runs.new_empty(runs.shape[:3]),
        programs=max(1, min(programs, units * parts)),
    )

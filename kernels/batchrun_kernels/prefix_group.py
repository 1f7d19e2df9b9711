"""Attention of all queries of a prefix group over the pages that its sequences share, as one dense product.

Sequences that begin with the same pages read them once together instead of once each (Hydragen, Juravsky et al., 2024;
FlashInfer's cascades, Ye et al., 2025). Their queries, with all heads of a key-value head, are the rows of one product
over the shared keys, which all lie before every query. The result is merged with attention over each sequence's own
keys by merge_runs. A group with few rows cuts its keys into chunks, so that more programs than rows can work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost
from batchrun_kernels.paged import (
    KvPages,
    Scoring,
    attend_keys,
    attend_torch,
    attention_shape,
    check,
    head_dim_of,
    normalised,
    page_shape,
    read_pages,
    scales,
    tile_of,
)
from batchrun_kernels.precision import product_precision
from batchrun_kernels.prefix_plan import PrefixPlan
from batchrun_kernels.tuned import tuned


@triton.jit
def _prefix_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    leaders_ptr,
    shared_lens_ptr,
    token_starts_ptr,
    tokens_ptr,
    positions_ptr,
    counts_ptr,  # int32 [2]: units of work, keys of a chunk
    units_ptr,  # int32 [U, 3]: group, place among its tiles of rows, place among its chunks of keys
    run_starts_ptr,  # int32 [N + 1]: each query's first run
    runs_ptr,  # fp32 [R, HEADS, DV]
    run_lse_ptr,  # fp32 [R, HEADS]
    scale,
    value_scale,
    softcap,
    window,
    q_stride,
    q_head_stride,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    v_block_stride,
    v_token_stride,
    v_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    unit = tl.program_id(0)
    kv_head = tl.program_id(1)
    if unit >= tl.load(counts_ptr):
        return
    chunk = tl.load(counts_ptr + 1)
    group = tl.load(units_ptr + 3 * unit).to(tl.int64)
    tile = tl.load(units_ptr + 3 * unit + 1)
    split = tl.load(units_ptr + 3 * unit + 2)
    start = tl.load(token_starts_ptr + group)
    count = tl.load(token_starts_ptr + group + 1) - start
    length = tl.load(shared_lens_ptr + group)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < count * GROUP
    place = (start + tl.minimum(row // GROUP, count - 1)).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    token = tl.load(tokens_ptr + place).to(tl.int64)
    at = tl.load(positions_ptr + place)
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    q_place = q_ptr + (token * q_stride + head * q_head_stride)[:, None] + dk[None, :]
    q = tl.load(q_place, mask=is_row[:, None] & (dk[None, :] < DK), other=0.0)

    low = tl.maximum(tl.min(at, 0) - window + 1, 0) if HAS_WINDOW else 0
    begin = split * chunk
    end = tl.minimum(begin + chunk, length)
    begin = tl.maximum(begin, low // TILE * TILE)
    edge = begin if HAS_WINDOW else end // TILE * TILE  # before it all rows see whole tiles

    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, DV_PAD], 0.0, tl.float32)
    table = block_tables_ptr + tl.load(leaders_ptr + group).to(tl.int64) * table_stride
    k_head_ptr = k_ptr + kv_head * k_head_stride
    v_head_ptr = v_ptr + kv_head * v_head_stride
    if not HAS_WINDOW:
        peak, total, acc = attend_keys(
            q, at, peak, total, acc, begin, edge, low, end, window, scale, softcap, table, k_head_ptr, v_head_ptr,
            k_block_stride, k_token_stride, v_block_stride, v_token_stride,
            False, HAS_WINDOW, HAS_SOFTCAP, BLOCK_SIZE, TILE, DK, DV, DK_PAD, DV_PAD, PRECISION,
        )  # fmt: skip
    peak, total, acc = attend_keys(
        q, at, peak, total, acc, edge, end, low, end, window, scale, softcap, table, k_head_ptr, v_head_ptr,
        k_block_stride, k_token_stride, v_block_stride, v_token_stride,
        True, HAS_WINDOW, HAS_SOFTCAP, BLOCK_SIZE, TILE, DK, DV, DK_PAD, DV_PAD, PRECISION,
    )  # fmt: skip
    values, lse = normalised(peak, total, acc)
    run = (tl.load(run_starts_ptr + place) + split).to(tl.int64) * HEADS + head
    mask = (is_row & (lse != -float("inf")))[:, None] & (dv[None, :] < DV)
    tl.store(runs_ptr + run[:, None] * DV + dv[None, :], values * value_scale, mask=mask)
    tl.store(run_lse_ptr + run, lse, mask=is_row)


class Groups(NamedTuple):
    """G groups of sequences that share their first positions; all int32.

    `tokens` [N] are the places in q of the queries, group after group, and `positions` [N] where they stand; group g
    has those from `token_starts[g]` on, of [G + 1]. Row `leaders[g]` of `block_tables` [B, M] names the shared pages,
    and `shared_lens` [G] is how many positions are shared, which all come before every query of the group.
    """

    block_tables: Tensor
    leaders: Tensor
    shared_lens: Tensor
    token_starts: Tensor
    tokens: Tensor
    positions: Tensor


def prefix_group(q: Tensor, pages: KvPages, groups: Groups, scoring: Scoring, plan: PrefixPlan) -> None:
    """Attends with the queries of `groups` in `q` [T, Hq, Dk] to the shared positions.

    Writes attention over each chunk of a query's keys to the plan's `runs`, and its natural log-sum-exp to `run_lse`:
    minus infinity where a query sees no key of a chunk, and the run is not set there. `plan` is plan_prefix's, for
    these groups; more than it counts may have room in it, and in `groups`. Sinks are left to attention over the
    sequences' own keys: raises ValueError for them, and on shapes, layouts or limits that the kernel cannot take.
    """
    check(q, pages, groups.block_tables, {}, scoring)
    if scoring.sinks is not None:
        raise ValueError("sinks must be None: they join the softmax once, with the sequences' own keys")
    _check_groups(groups, plan)
    if len(plan.units) == 0:
        return
    heads, kv_heads = q.shape[1], pages.values.shape[2]
    scale, value_scale = scales(pages, scoring)
    _prefix_kernel[(len(plan.units), kv_heads)](
        q,
        *pages[:2],
        *groups,
        *plan[:5],
        scale,
        value_scale,
        1.0 if scoring.softcap is None else scoring.softcap,
        scoring.window or 0,
        *q.stride()[:2],
        *pages.keys.stride()[:3],
        *pages.values.stride()[:3],
        groups.block_tables.stride(0),
        GROUP=heads // kv_heads,
        HEADS=heads,
        BLOCK_M=plan.block_m,
        HAS_WINDOW=scoring.window is not None,
        HAS_SOFTCAP=scoring.softcap is not None,
        TILE=tile_of(head_dim_of(pages), q.element_size()),
        **page_shape(pages),
        PRECISION=product_precision(q.dtype),
        **_options(q, pages, plan.block_m),
        enable_fp_fusion=True,
    )


def _check_groups(groups: Groups, plan: PrefixPlan) -> None:
    count, tokens = len(groups.leaders), len(groups.tokens)
    expected = {
        "shared_lens": (groups.shared_lens, count),
        "token_starts": (groups.token_starts, count + 1),
        "positions": (groups.positions, tokens),
        "run_starts": (plan.run_starts, tokens + 1),
    }
    for name, (tensor, length) in expected.items():
        if tensor.shape != (length,) or not tensor.is_contiguous():
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} must be a contiguous [{length}]")


def _options(q: Tensor, pages: KvPages, block_m: int) -> dict[str, int]:
    shape = f"{attention_shape(pages, q.element_size())}x{block_m}"
    warps = 4 if block_m == 64 and head_dim_of(pages) <= 128 else 8
    stages = 2 if torch.version.hip is None else 1  # tiles that are fetched ahead spill registers on AMD's gfx942
    return tuned("prefix_group", shape, q.device, num_warps=warps, num_stages=stages)


def prefix_group_torch(q: Tensor, pages: KvPages, groups: Groups, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """The reference of `prefix_group`, all keys in one run: out [N, Hq, Dv] and lse [N, Hq], fp32 inside, fp64 for
    fp64 input."""
    wide = torch.promote_types(q.dtype, torch.float32)
    outs, lses = [], []
    bounds = groups.token_starts.tolist()
    for g, length in enumerate(groups.shared_lens.tolist()):
        members = slice(bounds[g], bounds[g + 1])
        keys, values = read_pages(pages, groups.block_tables[groups.leaders[g]], 0, length, wide)
        position = torch.arange(length, device=q.device)
        distance = groups.positions[members, None] - position
        visible = distance < (scoring.window or distance.max() + 1)
        out, lse = attend_torch(q[groups.tokens[members].long()].to(wide), keys, values, visible, scoring)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def prefix_group_cost(
    shared_lens: Sequence[int],
    token_counts: Sequence[int],
    heads: int,
    kv_heads: int,
    dk: int,
    dv: int,
    itemsize: int,
    *,
    splits: int = 1,
) -> Cost:
    """Each shared key and value once per group, each query once, and `splits` fp32 results per query."""
    pairs = sum(length * count for length, count in zip(shared_lens, token_counts, strict=True))
    rows = sum(token_counts) * heads
    moved = sum(shared_lens) * kv_heads * (dk + dv) * itemsize + rows * (dk * itemsize + 4 * splits * (dv + 1))
    return Cost(moved, 2 * pairs * heads * (dk + dv))

"""Next tokens from logits: greedy, or temperature, top-k, top-p and min-p with counter-based noise, without a sort.

A sampled token is argmax(logits / temperature + Gumbel noise) over the tokens that the filters leave, a draw from their
softmax. The noise is a hash of (row seed, position, token): SplitMix64 (Steele, Lea, Flood 2014), which
takes a tenth of the operations of Philox, and gives the same bits wherever it is computed.

A filter keeps the tokens that lie at most so far below the largest. Distances are not negative, so their bits are
ordered like numbers, and the bound is found four bits at a time: each pass over the row sums the count (top-k) or the
probability (top-p) below sixteen candidates. Noise is needed exactly, in fp64, only where an upper bound of it in fp32
could still win. One program takes one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
BITS = tl.constexpr(52)  # of noise: with 53 the largest number would be 1, whose noise is infinite
MASK = tl.constexpr(2**52 - 1)
UNIT = tl.constexpr(2.0**-52)
TINY = tl.constexpr(1.1754943508222875e-38)
SLACK = tl.constexpr(0.01)  # far more than fp32 can be off in the bound of a score
DIGIT = tl.constexpr(4)  # bits of the bound found in a pass
CANDIDATES = tl.constexpr(16)
TILE = 1024  # logits at once


@triton.jit
def _mix(x):
    x ^= x >> 30
    x *= MIX_1
    x ^= x >> 27
    x *= MIX_2
    return x ^ (x >> 31)


@triton.jit
def _distances(row, start, top, heat, vocabulary, TILE: tl.constexpr):
    """How far logits lie below the largest, over the temperature; infinite beyond the vocabulary."""
    token = start + tl.arange(0, TILE)
    x = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    return token, tl.div_rn(top - x, heat)


@triton.jit
def _bound(row, top, heat, vocabulary, limit, need, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """The smallest distance, as bits, up to which tokens within `limit` (bits) count or weigh `need`; and what those
    nearer than it weigh."""
    base = 0
    below = 0.0
    digit = tl.arange(0, CANDIDATES)
    for step in range(8):
        shift = 28 - DIGIT * step
        candidates = base + ((digit + 1) << shift) - 1
        candidates = tl.where(candidates < 0, 0x7FFFFFFF, candidates)  # 16 << 28 is past the largest int32
        sums = tl.zeros((CANDIDATES,), tl.float32)
        for start in range(0, vocabulary, TILE):
            token, distance = _distances(row, start, top, heat, vocabulary, TILE)
            bits = distance.to(tl.int32, bitcast=True)
            weight = tl.exp(-distance) if BY_MASS else tl.full((TILE,), 1.0, tl.float32)
            weight = tl.where((token < vocabulary) & (bits <= limit), weight, 0.0)
            inside = bits[:, None] <= candidates[None, :]
            sums += tl.sum(tl.where(inside, weight[:, None], 0.0), 0)
        chosen = tl.minimum(tl.sum((sums < need).to(tl.int32), 0), CANDIDATES - 1)
        below = tl.where(chosen > 0, tl.sum(tl.where(digit == chosen - 1, sums, 0.0), 0), below)
        base += chosen << shift
    return base, below


@triton.jit
def _mass(row, top, heat, vocabulary, limit, TILE: tl.constexpr):
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocabulary, TILE):
        _, distance = _distances(row, start, top, heat, vocabulary, TILE)
        total += tl.where(distance.to(tl.int32, bitcast=True) <= limit, tl.exp(-distance), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _largest(row, vocabulary, TILE: tl.constexpr):
    """The largest logit of a row and the first token that has it."""
    best = tl.full((TILE,), float("-inf"), tl.float32)
    where = tl.zeros((TILE,), tl.int32)
    for start in range(0, vocabulary, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        where = tl.where(x > best, token, where)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, where, 0x7FFFFFFF), 0)


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    tokens_ptr,
    vocabulary,
    stride,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    row = logits_ptr + index.to(tl.int64) * stride
    top, chosen = _largest(row, vocabulary, TILE)
    heat = tl.load(temperature_ptr + index).to(tl.float32)
    if (heat > 0) & (top > float("-inf")):
        heat = tl.maximum(heat, TINY)
        top_k = tl.load(top_k_ptr + index).to(tl.int32)
        top_p = tl.load(top_p_ptr + index).to(tl.float32)
        limit = 0x7FFFFFFF
        ties = vocabulary  # tokens kept of those that lie at the limit
        if (top_k > 0) & (top_k < vocabulary):
            limit, _ = _bound(row, top, heat, vocabulary, limit, top_k.to(tl.float32), False, TILE)
        if top_p < 1:
            need = tl.maximum(top_p, TINY) * _mass(row, top, heat, vocabulary, limit, TILE)
            nucleus, below = _bound(row, top, heat, vocabulary, limit, need, True, TILE)
            weight = tl.exp(-nucleus.to(tl.float32, bitcast=True))
            if (nucleus <= limit) & (weight > 0):
                limit = nucleus
                ties = tl.maximum(tl.ceil(tl.minimum((need - below) / weight, 1.0e9)), 1.0).to(tl.int32)
        min_p = tl.load(min_p_ptr + index).to(tl.float32)
        farthest = tl.where(min_p > 0, -tl.log(tl.maximum(min_p, TINY)), float("inf"))
        key = tl.load(seeds_ptr + index).to(tl.uint64) + tl.load(positions_ptr + index).to(tl.uint64) * GOLDEN
        key = _mix(key)
        best = tl.full((), float("-inf"), tl.float64)
        tied = 0
        for start in range(0, vocabulary, TILE):
            token, distance = _distances(row, start, top, heat, vocabulary, TILE)
            bits = distance.to(tl.int32, bitcast=True)
            kept = (token < vocabulary) & (bits <= limit) & (distance <= farthest)
            if top_p < 1:
                at_limit = ((token < vocabulary) & (bits == limit)).to(tl.int32)
                kept &= (at_limit == 0) | (tied + tl.cumsum(at_limit, 0) <= ties)
                tied += tl.sum(at_limit, 0)
            noise = _mix(key + token.to(tl.uint64) * GOLDEN) >> (64 - BITS)
            # -log(u) >= 1 - u, so noise -log(-log(u)) is at most -log(1 - u).
            rest = ((noise ^ MASK).to(tl.float32) + 0.5) * UNIT
            bound = tl.where(kept, -distance - tl.log(rest), float("-inf"))
            if tl.max(bound, 0) + SLACK > best.to(tl.float32):
                uniform = (noise.to(tl.float64) + 0.5) * UNIT
                score = -distance.to(tl.float64) - tl.log(-tl.log(uniform))
                score = tl.where(kept, score, float("-inf"))
                largest = tl.max(score, 0)
                if largest > best:
                    best = largest
                    chosen = tl.min(tl.where(score == largest, token, 0x7FFFFFFF), 0)
    tl.store(tokens_ptr + index, chosen.to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Tokens int64 [K] of `logits` [K, V] (fp32, bf16 or fp16, any row stride), one value of each parameter per row.

    temperature fp32: 0 takes the first largest. top_k int64: keeps the k largest and ties of the last; 0 keeps all.
    top_p fp32: of what that leaves, the smallest set of likeliest tokens whose probability reaches it, of equal ones
    those with smaller ids; 1 keeps all. min_p fp32: those at least that many times as likely as the likeliest. seeds,
    positions int64. A row whose logits are all -inf gets token 0. Raises ValueError on shapes that do not fit.
    """
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or vocabulary < 1:
        raise ValueError(f"logits of shape {tuple(logits.shape)} with strides {logits.stride()} need contiguous rows")
    for values in (temperature, top_k, top_p, min_p, seeds, positions):
        if values.shape != (rows,) or not values.is_contiguous():
            raise ValueError(f"parameter of shape {tuple(values.shape)} must be a contiguous [{rows}]")
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if rows:
        _sample_kernel[(rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            positions,
            out,
            vocabulary,
            logits.stride(0),
            TILE=TILE,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return out


def sample_torch(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """The reference of `sample`, by a sort of each row."""
    logits = logits.float()
    greedy = logits.argmax(-1)
    heat = torch.where(temperature > 0, temperature, 1.0).clamp_min(TINY.value)[:, None]
    scaled, order = ((logits - logits.amax(-1, keepdim=True)) / heat).sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k.clamp(max=logits.shape[1]), logits.shape[1])
    kept = scaled >= scaled.gather(1, k[:, None] - 1)
    probability = torch.where(kept, scaled, -torch.inf).softmax(-1)
    before = probability.cumsum(-1) - probability
    kept &= (before < top_p.clamp_min(TINY.value)[:, None]) | (top_p >= 1)[:, None]
    kept &= scaled >= min_p.log()[:, None]
    score = scaled.double() + gumbel_torch(seeds, positions, order)
    drawn = order.gather(1, score.masked_fill(~kept, -torch.inf).argmax(-1, keepdim=True))[:, 0]
    return torch.where((temperature > 0) & (logits.amax(-1) > -torch.inf), drawn, greedy)


def gumbel_torch(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """float64 [K, C] noise of rows (int64 [K]) for token ids (int64 [K, C])."""

    def mix(x: Tensor) -> Tensor:
        for shift, factor in ((30, MIX_1), (27, MIX_2), (31, None)):
            x = x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
            x = x if factor is None else x * signed(factor)
        return x

    def signed(constant: tl.constexpr) -> int:
        return int(constant.value) - (1 << 64)

    keys = mix(seeds + positions * signed(GOLDEN))
    bits = mix(keys[:, None] + tokens * signed(GOLDEN)) >> (64 - BITS.value) & ((1 << BITS.value) - 1)
    return -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-BITS.value))


def sample_cost(rows: int, vocabulary: int, itemsize: int, *, filters: int = 0) -> Cost:
    """Reads each logit once for the largest and once to draw, and nine times for each filter of `filters`; a mass, a
    noise and sixteen sums of each."""
    passes = 2 + 9 * filters
    return Cost(rows * vocabulary * passes * itemsize, rows * vocabulary * (20 + 9 * 40 * filters))

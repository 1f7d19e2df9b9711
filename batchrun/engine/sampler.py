"""Next tokens from logits: greedy, or temperature, top-k, top-p and min-p with counter-based noise.

A sampled token is argmax(logits / temperature + Gumbel noise) over the tokens that the filters leave,
which is a draw from their softmax (Gumbel-max). The noise of a token is a hash of (row seed, position,
token id), so a row's sample does not depend on its neighbours, on the order of rows, or on a resume.

Filters work in this order, as in transformers and vLLM: temperature, top-k, top-p, min-p, each on what the
one before has left. They look at a row's likeliest tokens only, and at more where those do not settle it; noise
is computed for the tokens that are left. How far a row is looked through depends on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from batchrun.engine.device import runs_triton
from batchrun.engine.staging import upload
from batchrun_kernels.cpu.layer import argmax_rows
from batchrun_kernels.cpu.scalar import elements

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
BITS = (
    52  # of noise: with 53 the half would be rounded away, and the largest number would be 1, whose noise is infinite
)
TINY = torch.finfo(torch.float32).tiny
NEVER = float("-inf")
WIDTHS = (128, 2048)  # likeliest tokens that are looked at first, and then; after that, all
CPU_LOGITS = 2**19  # at a time: what their rows need stays in the processor's cache


class Draw(NamedTuple):
    """What R rows ask for: float32 or int64 [R], and logits / temperature, the largest of each row 0."""

    scaled: torch.Tensor  # float32 [R, V]
    top_k: torch.Tensor  # int64, 0: all
    top_p: torch.Tensor
    min_p: torch.Tensor
    keys: torch.Tensor  # int64, of the noise

    def rows(self, chosen: torch.Tensor) -> Draw:
        return Draw(*(values[chosen] for values in self))


def sample(
    logits: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
) -> torch.Tensor:
    """logits [K, V] of any float type and one value per row of each parameter ([K]) -> int64 token ids [K], there too.

    Rows with temperature 0 take the most likely token and cost nothing more.
    """
    if runs_triton(logits.device):
        return _sample_on_device(logits, temperature, top_k, top_p, min_p, seeds, positions)
    tokens = most_likely(logits)
    rows = np.flatnonzero(temperature > 0)
    step = max(1, CPU_LOGITS // logits.shape[-1] if logits.device.type == "cpu" else len(rows))
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        index = torch.from_numpy(some).to(logits.device)
        chosen = logits[index].float()
        heat = torch.from_numpy(temperature[some]).to(chosen).clamp_min(TINY)
        # Below zero a division by the smallest temperature overflows to -inf, which is a probability of 0.
        scaled = (chosen - chosen.amax(dim=-1, keepdim=True)) / heat[:, None]
        k = np.where(top_k[some] < logits.shape[-1], top_k[some], 0)
        filters = [torch.from_numpy(values).to(chosen.device) for values in (k, top_p[some], min_p[some])]
        keys = noise_keys(seeds[some], positions[some], chosen.device)
        tokens[index] = _draw(Draw(scaled, filters[0], filters[1], filters[2], keys))
    return tokens


def _sample_on_device(logits: torch.Tensor, *values: np.ndarray) -> torch.Tensor:
    """The same in one kernel, with the same noise."""
    from batchrun_kernels.sample import sample as sample_rows

    return sample_rows(logits, *upload(logits.device, *values))


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """int64 [K]: the first largest of each row of [K, V]."""
    if logits.device.type != "cpu" or logits.dtype == torch.float32:
        return logits.argmax(dim=-1)
    # torch takes the argmax of half-precision rows at a tenth of the speed.
    tokens = torch.empty(len(logits), dtype=torch.int64)
    argmax_rows(elements(logits), tokens.numpy())
    return tokens


def noise_keys(seeds: np.ndarray, positions: np.ndarray, device: torch.device) -> torch.Tensor:
    """int64 [R]: what the noise of rows at these positions (int64 [R], tokens before the drawn one) follows from."""
    return _mix(torch.from_numpy(seeds + positions * np.int64(GOLDEN))).to(device)


def gumbel_noise(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float64 [R, C] standard Gumbel noise of rows with `keys` (int64 [R]) for token ids (int64 [R, C] or [C])."""
    return _gumbel(_bits(keys, tokens))


def _draw(draw: Draw) -> torch.Tensor:
    """int64 [R]: one token of what the filters leave of each row."""
    tokens = torch.empty_like(draw.keys)
    left = torch.arange(len(tokens), device=tokens.device)
    vocabulary = draw.scaled.shape[-1]
    for width in (*(width for width in WIDTHS if width < vocabulary), vocabulary):
        values, ids = _likeliest(draw.scaled, width)
        kept, settled = _filter(draw, values, ids)
        score, best = (values.double().masked_fill_(~kept, NEVER) + gumbel_noise(draw.keys, ids)).max(dim=-1)
        found = ids.gather(1, best[:, None])[:, 0]
        free = (draw.top_k == 0) & (draw.top_p >= 1) & (draw.min_p <= 0)
        if width < vocabulary and free.any():
            found[free] = _beat(draw.rows(free), values[free, -1], score[free], found[free])
            settled |= free
        tokens[left[settled]] = found[settled]
        if settled.all():
            break
        left, draw = left[~settled], draw.rows(~settled)
    return tokens


def _likeliest(scaled: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row, the largest first and of equal ones that with the smallest id, and their ids."""
    if width == scaled.shape[-1]:
        ranked = scaled.sort(dim=-1, descending=True, stable=True)
        return ranked.values, ranked.indices
    ids = scaled.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _filter(draw: Draw, values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the likeliest tokens the filters keep (bool [R, C]), and whether that is all they keep (bool [R]).

    top-k keeps the k largest and ties of the last; top-p the smallest set of likeliest tokens whose probability
    reaches it; min-p the tokens at least that many times as likely as the likeliest.
    """
    width = values.shape[-1]
    last = values[:, -1:]
    has_k, has_p = draw.top_k > 0, draw.top_p < 1
    kept = torch.ones_like(values, dtype=torch.bool)
    settled = torch.full_like(has_k, width == draw.scaled.shape[-1])
    least = torch.full_like(last, NEVER)
    if has_k.any():
        least = torch.where(has_k[:, None], values.gather(1, (draw.top_k - 1).clamp(0, width - 1)[:, None]), NEVER)
        kept &= values >= least
        settled |= has_k & (draw.top_k <= width) & (last < least)[:, 0]
    if has_p.any():
        probability = torch.where(kept, values, NEVER).softmax(dim=-1)
        open_ones = (has_p & ~has_k).nonzero()[:, 0]
        if len(open_ones):
            probability[open_ones] = draw.scaled[open_ones].softmax(dim=-1).gather(1, ids[open_ones])
        before = probability.cumsum(dim=-1) - probability
        inside = (before < draw.top_p.clamp_min(TINY)[:, None]) | ~has_p[:, None]
        kept &= inside
        # Tokens that tie with the last one looked at may have smaller ids, and come before it.
        settled |= ~has_k & ~(inside & (values == last)).any(dim=-1)
    floor = draw.min_p.log()[:, None]
    kept &= values >= floor
    # Of a top-k that is larger than what is looked at the probabilities are not known.
    settled |= (last < floor)[:, 0] & ~(has_k & has_p)
    return kept, settled


def _beat(draw: Draw, largest: torch.Tensor, score: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The best of all tokens of rows without a filter, of which `tokens` are the best so far, with `score` (float64).

    All logits that were not looked at are at most `largest` (float32 [R]), so their noise must be above
    score - largest: a comparison of its bits, before it is computed, leaves few.
    """
    bits = _bits(draw.keys, torch.arange(draw.scaled.shape[-1], device=tokens.device))
    need = torch.exp(-torch.exp(largest.double() - score)) * 2.0**BITS
    row, token = (bits > (need.long() - 16)[:, None]).nonzero(as_tuple=True)  # 16: far more than rounding can shift it
    scores = draw.scaled[row, token].double() + _gumbel(bits[row, token])
    best = score.scatter_reduce(0, row, scores, "amax")
    wins = scores > score[row]
    wins &= scores == best[row]
    return tokens.index_put((row[wins],), token[wins])


def _bits(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """int64 below 2**BITS: a hash of each row's key and token."""
    return _shift_right(_mix(keys[:, None] + tokens * GOLDEN), 64 - BITS)


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    uniform = bits.double().add_(0.5).mul_(2.0**-BITS)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014, section 3) on int64, arithmetic modulo 2**64; in place."""
    for bits, factor in ((30, MIX_1), (27, MIX_2)):
        x ^= _shift_right(x, bits)
        x *= factor
    x ^= _shift_right(x, 31)
    return x


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own is arithmetic on signed integers."""
    shifted = x >> bits
    shifted &= (1 << (64 - bits)) - 1
    return shifted

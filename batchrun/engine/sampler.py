"""Next tokens from logits: greedy, or temperature, top-k and top-p with counter-based noise.

A sampled token is argmax(logits / temperature + Gumbel noise) over the tokens that the filters leave,
which is a draw from their softmax (Gumbel-max). The noise of a token is a hash of (row seed, position,
token id), so a row's sample does not depend on its neighbours, on the order of rows, or on a resume.
"""

from __future__ import annotations

import numpy as np
import torch

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
TINY = torch.finfo(torch.float32).tiny


def sample(
    logits: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    """logits [K, V] of any float type and one value per row of each parameter ([K]) -> int64 token ids [K].

    Rows with temperature 0 take the most likely token and cost nothing more.
    """
    # In float32 even for half-precision logits, whose argmax torch computes at a tenth of the speed.
    tokens = logits.float().argmax(dim=-1)
    rows = np.flatnonzero(temperature > 0)
    if len(rows):
        index = torch.from_numpy(rows).to(logits.device)
        chosen = logits[index].float()
        heat = torch.from_numpy(temperature[rows]).to(chosen).clamp_min(TINY)
        # Below zero a division by the smallest temperature overflows to -inf, which is a probability of 0.
        scaled = (chosen - chosen.amax(dim=-1, keepdim=True)) / heat[:, None]
        scaled = _keep_top_k(scaled, top_k[rows])
        scaled = _keep_top_p(scaled, top_p[rows])
        tokens[index] = (scaled.double() + gumbel_noise(seeds[rows], positions[rows], scaled)).argmax(dim=-1)
    return tokens.cpu().numpy()


def gumbel_noise(seeds: np.ndarray, positions: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """float64 [K, V] standard Gumbel noise keyed by (seed, position, token id)."""
    key = _mix(torch.from_numpy(seeds + positions * np.int64(GOLDEN)))
    tokens = torch.arange(like.shape[-1], device=like.device) * GOLDEN
    bits = _mix(key.to(like.device)[:, None] + tokens)
    # 52 bits: with 53 the half would be rounded away, and the largest number would be 1, whose noise is infinite.
    uniform = ((bits >> 12) & (2**52 - 1)).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014, section 3) on int64, arithmetic modulo 2**64."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own is arithmetic on signed integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _keep_top_k(logits: torch.Tensor, top_k: np.ndarray) -> torch.Tensor:
    """Set all but each row's k largest logits (and ties of the last) to -inf; k = 0 keeps all."""
    rows = np.flatnonzero((top_k > 0) & (top_k < logits.shape[-1]))
    if not len(rows):
        return logits
    index = torch.from_numpy(rows).to(logits.device)
    largest = logits[index].topk(int(top_k[rows].max()), dim=-1).values
    least = largest.gather(1, torch.from_numpy(top_k[rows] - 1).to(logits.device)[:, None])
    logits[index] = logits[index].masked_fill(logits[index] < least, float("-inf"))
    return logits


def _keep_top_p(logits: torch.Tensor, top_p: np.ndarray) -> torch.Tensor:
    """Keep each row's smallest set of most likely tokens whose probability reaches top_p."""
    rows = np.flatnonzero(top_p < 1)
    if not len(rows):
        return logits
    index = torch.from_numpy(rows).to(logits.device)
    ranked, order = logits[index].sort(dim=-1, descending=True, stable=True)
    probability = ranked.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    limit = torch.from_numpy(top_p[rows]).to(logits).clamp_min(TINY)[:, None]
    ranked = ranked.masked_fill(before >= limit, float("-inf"))
    logits[index] = torch.empty_like(ranked).scatter_(1, order, ranked)
    return logits

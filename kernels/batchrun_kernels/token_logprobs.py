"""Log-probabilities of given tokens, in one pass over their logits.

The log-sum-exp is kept as a largest value and a sum for each lane (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018), so the log-softmax of the other tokens is never written. Arithmetic is fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost

TILE = 1024  # logits at once


@triton.jit
def _token_logprobs_kernel(logits_ptr, tokens_ptr, out_ptr, vocabulary, stride, TILE: tl.constexpr):
    index = tl.program_id(0)
    row = logits_ptr + index.to(tl.int64) * stride
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocabulary, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(top, x)
        anchor = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(top - anchor) + tl.exp(x - anchor)
        top = larger
    best = tl.max(top, 0)
    anchor = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(total * tl.exp(top - anchor), 0)
    chosen = tl.load(row + tl.load(tokens_ptr + index)).to(tl.float32)
    tl.store(out_ptr + index, chosen - best - tl.log(total))


def token_logprobs(logits: Tensor, tokens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """fp32 [K]: log-softmax of `logits` [K, V] (fp32, bf16 or fp16, any row stride) at `tokens` int64 [K].

    Each row needs a logit above -inf. Raises ValueError on shapes that do not fit.
    """
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or tokens.shape != (rows,) or not tokens.is_contiguous():
        shapes = f"logits of shape {tuple(logits.shape)} and tokens of shape {tuple(tokens.shape)}"
        raise ValueError(f"{shapes} must be [K, V] and [K] with rows contiguous")
    out = torch.empty(rows, dtype=torch.float32, device=logits.device) if out is None else out
    if rows:
        _token_logprobs_kernel[(rows,)](
            logits, tokens, out, vocabulary, logits.stride(0), TILE=TILE, num_warps=4, enable_fp_fusion=True
        )
    return out


def token_logprobs_torch(logits: Tensor, tokens: Tensor) -> Tensor:
    """The reference of `token_logprobs`, in fp64 for fp64 input."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def token_logprobs_cost(rows: int, vocabulary: int, itemsize: int) -> Cost:
    """Reads each logit once; two exponentials and four operations of each."""
    return Cost(rows * (vocabulary * itemsize + 12), 6 * rows * vocabulary)

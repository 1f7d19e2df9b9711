"""Repetition, frequency and presence penalties from a table of how often each row has each token.

Repetition: the logits of tokens of the prompt and the completion, divided by the penalty if above 0, else multiplied
(Keskar et al., "CTRL", 2019, section 4.1, with the sign rule of transformers). Frequency and presence, of generated
tokens only, as OpenAI's API reference defines them. `counts` int32 [S, V] holds for each slot how often a token was
generated, plus IN_PROMPT if the prompt has it; it is filled when a row begins and kept by `note_tokens`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost

IN_PROMPT = 1 << 30
TILE = 1024  # logits, or tokens of a row, per program


@triton.jit
def _penalise_kernel(
    logits_ptr,
    counts_ptr,
    slots_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    vocabulary,
    stride,
    IN_PROMPT: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = token < vocabulary
    counts = counts_ptr + tl.load(slots_ptr + row) * vocabulary
    count = tl.load(counts + token, mask=mask, other=0)
    logits = logits_ptr + row.to(tl.int64) * stride
    x = tl.load(logits + token, mask=mask, other=0.0).to(tl.float32)
    repetition = tl.load(repetition_ptr + row).to(tl.float32)
    penalised = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(count > 0, penalised, x)
    times = count & (IN_PROMPT - 1)
    # In fp64, rounded once: the sum is then the same wherever it is computed.
    less = tl.load(presence_ptr + row).to(tl.float64) + tl.load(frequency_ptr + row).to(tl.float64) * times.to(
        tl.float64
    )
    x -= tl.where(times > 0, less.to(tl.float32), 0.0)
    tl.store(logits + token, x.to(logits_ptr.dtype.element_ty), mask=mask & (count > 0))


@triton.jit
def _count_kernel(
    token_ids_ptr, slots_ptr, num_prompt_ptr, num_tokens_ptr, counts_ptr, vocabulary, stride,
    IN_PROMPT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots_ptr + tl.program_id(0))
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = position < tl.load(num_tokens_ptr + slot)
    in_prompt = position < tl.load(num_prompt_ptr + slot)
    token = tl.load(token_ids_ptr + slot * stride + position, mask=mask, other=0)
    count = counts_ptr + slot * vocabulary + token
    tl.atomic_or(count, IN_PROMPT, mask=mask & in_prompt)
    tl.atomic_add(count, 1, mask=mask & (in_prompt == 0))


def count_tokens(token_ids: Tensor, slots: Tensor, num_prompt: Tensor, num_tokens: Tensor, counts: Tensor) -> None:
    """Fills the rows of `counts` [S, V] at `slots` [K] int64, for rows that begin.

    token_ids int32 [S, L]; num_prompt, num_tokens int64 [S]. Raises ValueError on shapes that do not fit.
    """
    if not counts.is_contiguous() or counts.shape[0] != token_ids.shape[0] or token_ids.stride(1) != 1:
        shapes = f"token_ids of shape {tuple(token_ids.shape)} and counts of shape {tuple(counts.shape)}"
        raise ValueError(f"{shapes} must be [S, L] and [S, V] with one S and rows contiguous")
    if not len(slots):
        return
    counts[slots] = 0
    _count_kernel[(len(slots), triton.cdiv(token_ids.shape[1], TILE))](
        token_ids,
        slots,
        num_prompt,
        num_tokens,
        counts,
        counts.shape[1],
        token_ids.stride(0),
        IN_PROMPT=IN_PROMPT,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=True,
    )


def penalise(
    logits: Tensor, counts: Tensor, slots: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Changes `logits` [K, V] (fp32, bf16 or fp16, any row stride) of the rows in `slots` [K] int64, in place.

    The penalties are fp32 [K]: 1, 0 and 0 change nothing. Raises ValueError on shapes that do not fit.
    """
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or counts.shape[1] != vocabulary or not counts.is_contiguous():
        shapes = f"logits of shape {tuple(logits.shape)} and counts of shape {tuple(counts.shape)}"
        raise ValueError(f"{shapes} must be [K, V] and [S, V] with rows contiguous")
    for values in (slots, repetition, frequency, presence):
        if values.shape != (rows,) or not values.is_contiguous():
            raise ValueError(f"parameter of shape {tuple(values.shape)} must be a contiguous [{rows}]")
    if not rows:
        return
    _penalise_kernel[(rows, triton.cdiv(vocabulary, TILE))](
        logits,
        counts,
        slots,
        repetition,
        frequency,
        presence,
        vocabulary,
        logits.stride(0),
        IN_PROMPT=IN_PROMPT,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=True,
    )


def penalise_torch(
    logits: Tensor, counts: Tensor, slots: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """The reference of `penalise`: the changed logits."""
    count = counts[slots]
    x = logits.float()
    penalised = torch.where(x > 0, x / repetition[:, None], x * repetition[:, None])
    x = torch.where(count > 0, penalised, x)
    times = count & (IN_PROMPT - 1)
    less = presence.double()[:, None] + frequency.double()[:, None] * times
    return torch.where(times > 0, x - less.float(), x).to(logits.dtype)


def penalise_cost(rows: int, vocabulary: int, itemsize: int) -> Cost:
    """Reads each logit and its count and writes the logit; about five operations."""
    return Cost(rows * vocabulary * (2 * itemsize + 4), 5 * rows * vocabulary)

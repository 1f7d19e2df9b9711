"""What links two steps on the device: hidden states of the tokens that sample, and their tokens into the next step.

The host plans a step before it knows the tokens of the last one. It names the slot whose newest token goes to each
place of the next step's input, and the device puts it there; so no step waits for the host to read a token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.cost import Cost

TILE = 2048  # elements of a hidden state per program
ROWS = 256  # tokens per program of the feedback


@triton.jit
def _gather_kernel(hidden_ptr, index_ptr, out_ptr, width, stride, out_stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    source = tl.load(index_ptr + row)
    values = tl.load(hidden_ptr + source * stride + col, mask=col < width)
    tl.store(out_ptr + row * out_stride + col, values, mask=col < width)


@triton.jit
def _feed_kernel(token_ids_ptr, sources_ptr, newest_ptr, count, ROWS: tl.constexpr):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(sources_ptr + place, mask=place < count, other=-1)
    token = tl.load(newest_ptr + slot, mask=slot >= 0)
    tl.store(token_ids_ptr + place, token.to(token_ids_ptr.dtype.element_ty), mask=slot >= 0)


@triton.jit
def _note_kernel(tokens_ptr, slots_ptr, newest_ptr, counts_ptr, count, vocabulary, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < count
    token = tl.load(tokens_ptr + row, mask=mask, other=0)
    slot = tl.load(slots_ptr + row, mask=mask, other=0)
    tl.store(newest_ptr + slot, token.to(newest_ptr.dtype.element_ty), mask=mask)
    if counts_ptr is not None:
        tl.atomic_add(counts_ptr + slot * vocabulary + token, 1, mask=mask)


def gather_last(hidden: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows `index` int64 [K] of `hidden` [T, H] (any row stride), as `out` [K, H] of the same type.

    Raises ValueError on shapes that do not fit.
    """
    rows, width = len(index), hidden.shape[1]
    out = hidden.new_empty(rows, width) if out is None else out
    if hidden.stride(1) != 1 or out.shape != (rows, width) or out.stride(1) != 1 or out.dtype != hidden.dtype:
        shapes = f"hidden of shape {tuple(hidden.shape)} and out of shape {tuple(out.shape)}"
        raise ValueError(f"{shapes} must be [T, H] and [{rows}, H] of one type with rows contiguous")
    if rows:
        tile = min(TILE, triton.next_power_of_2(width))
        _gather_kernel[(rows, triton.cdiv(width, tile))](
            hidden, index, out, width, hidden.stride(0), out.stride(0), TILE=tile, num_warps=4, enable_fp_fusion=True
        )
    return out


def feed_tokens(token_ids: Tensor, sources: Tensor, newest: Tensor) -> None:
    """token_ids[t] = newest[sources[t]] where sources[t] is not negative, in place: int64 [T], int64 [T], int64 [S]."""
    if token_ids.shape != sources.shape or not token_ids.is_contiguous() or not sources.is_contiguous():
        shapes = f"token_ids of shape {tuple(token_ids.shape)} and sources of shape {tuple(sources.shape)}"
        raise ValueError(f"{shapes} must be contiguous [T]")
    if len(sources):
        _feed_kernel[(triton.cdiv(len(sources), ROWS),)](
            token_ids, sources, newest, len(sources), ROWS=ROWS, num_warps=4, enable_fp_fusion=True
        )


def note_tokens(tokens: Tensor, slots: Tensor, newest: Tensor, counts: Tensor | None = None) -> None:
    """newest[slots[k]] = tokens[k], and one more in `counts` [S, V] of penalise.py: int64 [K], int64 [K], int64 [S].

    Slots are distinct. Raises ValueError on shapes that do not fit.
    """
    if tokens.shape != slots.shape or not tokens.is_contiguous() or not slots.is_contiguous():
        shapes = f"tokens of shape {tuple(tokens.shape)} and slots of shape {tuple(slots.shape)}"
        raise ValueError(f"{shapes} must be contiguous [K]")
    if len(tokens):
        vocabulary = 0 if counts is None else counts.shape[1]
        _note_kernel[(triton.cdiv(len(tokens), ROWS),)](
            tokens, slots, newest, counts, len(tokens), vocabulary, ROWS=ROWS, num_warps=4, enable_fp_fusion=True
        )


def gather_last_torch(hidden: Tensor, index: Tensor) -> Tensor:
    """The reference of `gather_last`."""
    return hidden[index]


def feed_tokens_torch(token_ids: Tensor, sources: Tensor, newest: Tensor) -> None:
    """The reference of `feed_tokens`."""
    fed = sources >= 0
    token_ids[fed] = newest[sources[fed]].to(token_ids.dtype)


def note_tokens_torch(tokens: Tensor, slots: Tensor, newest: Tensor, counts: Tensor | None = None) -> None:
    """The reference of `note_tokens`."""
    newest[slots] = tokens.to(newest.dtype)
    if counts is not None:
        counts[slots, tokens] += 1


def gather_last_cost(rows: int, width: int, itemsize: int) -> Cost:
    """Reads and writes each hidden state once, plus 8 bytes of its index."""
    return Cost(rows * (2 * width * itemsize + 8), 0)

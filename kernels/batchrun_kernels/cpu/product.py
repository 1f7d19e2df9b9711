"""Matrix products of bfloat16 activations with packed weights, on processors with AVX512-BF16.

For few rows a product is bound by reading its weights, and a library call by its own overhead: this kernel reads the
weights at memory speed up to about eight rows, and computes at the processor's peak from about 16 on. What follows
a product elementwise (bias, residual, gated activation) is done while its results are in the cache.

The weights are as oneDNN lays them out for its own kernels, so one copy serves both: W [N, K] in panels of 64 output
features, each panel [K / 2, 64, 2], so that one instruction (VDPBF16PS) multiplies a pair of K for 16 features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from batchrun_kernels.cpu.emit import (
    BYTE,
    FLOAT,
    FLOATS,
    I16,
    LANES,
    LINE,
    prefetch,
    processor_has,
    store,
    word,
)
from batchrun_kernels.cpu.layer import gated_gelu_tanh, gated_silu
from batchrun_kernels.cpu.scalar import narrow, widen
from batchrun_kernels.cpu.tile import PANEL_LANES, ROWS, element_steps, inner_products

PANEL = LANES * PANEL_LANES  # output features whose sums stay in registers, for ROWS rows
ALIGN_K = 32  # K is padded to a multiple of this in the packed layout
NONE, SILU, GELU_TANH = 0, 1, 2  # what follows the product


def has_bfloat16_products() -> bool:
    """Whether this processor has AVX512-BF16."""
    return processor_has("avx512bf16")


def can_read(dtype: torch.dtype, features: int, depth: int) -> bool:
    """Whether `product` may take a packed weight [features, depth]: its shape has no padding, and the processor can."""
    return dtype == torch.bfloat16 and features % PANEL == 0 and depth % ALIGN_K == 0 and has_bfloat16_products()


@intrinsic(prefer_literal=True)
def multiply(context, x, x_stride, w, pairs, out, ahead, rows, lines):
    """float32 out [rows, 64] = x [rows, 2 pairs] times a panel at `w`, for constant `rows` and `lines`.

    All others are addresses, x_stride counts elements. Meanwhile `lines` cache lines per pair are fetched from `ahead`.
    """
    count, fetched = rows.literal_value, lines.literal_value
    columns = range(PANEL // LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, w, pairs, out, ahead = arguments[:6]

        def start(row: int, column: int) -> Any:
            return ir.Constant(FLOATS, [0.0] * LANES)

        def x_at(row: int, index: Any) -> Any:
            return builder.add(builder.mul(x_stride, word(row)), builder.mul(index, word(2)))

        def w_at(column: int, index: Any) -> Any:
            return builder.add(builder.mul(index, word(2 * PANEL)), word(2 * LANES * column))

        def meanwhile(index: Any) -> None:
            coming = builder.add(ahead, builder.mul(index, word(LINE * fetched)))
            prefetch(builder, builder.inttoptr(coming, BYTE.as_pointer()), LINE * fetched)

        base, weights = (builder.inttoptr(address, I16.as_pointer()) for address in (x, w))
        step = element_steps(builder, types.uint16, types.uint16)
        sums = inner_products(
            builder, pairs, range(count), columns, start, (base, x_at), (weights, w_at), step, meanwhile
        )
        target = builder.inttoptr(out, FLOAT.as_pointer())
        for (row, column), total in sums.items():
            store(builder, target, word(PANEL * row + LANES * column), total)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, rows, lines), generate


@intrinsic
def elements_at(context, address):
    """A pointer to half-precision elements."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], I16.as_pointer())

    return types.CPointer(types.uint16)(types.int64), generate


@njit(nogil=True)
def _choose_rows(rows, x, x_stride, w, pairs, out, ahead, fetched):
    if rows == 6:
        multiply(x, x_stride, w, pairs, out, ahead, 6, fetched)
    elif rows == 5:
        multiply(x, x_stride, w, pairs, out, ahead, 5, fetched)
    elif rows == 4:
        multiply(x, x_stride, w, pairs, out, ahead, 4, fetched)
    elif rows == 3:
        multiply(x, x_stride, w, pairs, out, ahead, 3, fetched)
    elif rows == 2:
        multiply(x, x_stride, w, pairs, out, ahead, 2, fetched)
    else:
        multiply(x, x_stride, w, pairs, out, ahead, 1, fetched)


@njit(nogil=True)
def _multiply_rows(rows, x, x_stride, w, pairs, out, ahead, fetched):
    """`multiply` for 1 to 6 rows; 0, 1 or 2 lines fetched per pair."""
    if fetched == 2:
        _choose_rows(rows, x, x_stride, w, pairs, out, ahead, 2)
    elif fetched == 1:
        _choose_rows(rows, x, x_stride, w, pairs, out, ahead, 1)
    else:
        _choose_rows(rows, x, x_stride, w, pairs, out, ahead, 0)


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def product(x, x_stride, rows, depth, w, bias, add, out, features, kind, first, last, coming):
    """out [rows, features] = x [rows, depth] W^T + bias + add, all bfloat16 at addresses, x_stride in elements.

    W [features, depth] is packed; features must be a multiple of 64 and depth of 32. bias and add may be 0 for none.
    With `kind` SILU or GELU_TANH, W is [2 features, depth], gates first, and out = act(gates) * ups. Sums are float32,
    rounded once. Only panels [first, last) of `out` are computed; with the last, what is at `coming` is fetched.
    FLOPs: 2 rows x depth x rows of W; bytes: W once, x once for each panel from the cache.
    """
    sums = np.empty((2 * ROWS, PANEL), dtype=np.float32)
    at, half = sums.ctypes.data, sums[ROWS:]
    results = carray(elements_at(out), (rows, features))
    addends = carray(elements_at(add), (rows, features))
    offsets = carray(elements_at(bias), (2 * features,))
    tiles, panel_bytes = (rows + ROWS - 1) // ROWS, depth * PANEL * 2
    # One tile streams as fast as the processor fetches by itself; with many there is time enough without help.
    fetched = 2 if 1 < tiles <= 3 else (1 if 3 < tiles <= 8 else 0)
    for panel in range(first, last):
        place, start, column = w + panel * panel_bytes, 0, panel * PANEL
        up = place + features // PANEL * panel_bytes
        following, second = place + panel_bytes, up + panel_bytes
        if panel + 1 == last:
            following, second = coming, coming + panel_bytes
        for tile in range(tiles):
            count, some = (rows - start) // (tiles - tile), tile * (panel_bytes // tiles)
            row = x + 2 * start * x_stride
            _multiply_rows(count, row, x_stride, place, depth // 2, at, following + some, fetched)
            if bias:
                _add_bias(sums, offsets[column : column + PANEL], count)
            if kind != NONE:
                half_at = at + ROWS * PANEL * 4
                _multiply_rows(count, row, x_stride, up, depth // 2, half_at, second + some, fetched)
                if bias:
                    _add_bias(half, offsets[features + column : features + column + PANEL], count)
                _gate(sums, half, count, kind)
            for i in range(count):
                values, target = sums[i], results[start + i, column : column + PANEL]
                if add:
                    other = addends[start + i, column : column + PANEL]
                    for j in range(PANEL):
                        values[j] += widen(other[j])
                for j in range(PANEL):
                    target[j] = narrow(values[j], target[j])
            start += count


@njit(inline="always", fastmath=True)
def _add_bias(sums, bias, count):
    for i in range(count):
        row = sums[i]
        for j in range(PANEL):
            row[j] += widen(bias[j])


@njit(inline="always", fastmath=True, error_model="numpy")
def _gate(gates, ups, count, kind):
    for i in range(count):
        gate, up = gates[i], ups[i]
        if kind == SILU:
            for j in range(PANEL):
                gate[j] = gated_silu(gate[j], up[j])
        else:
            for j in range(PANEL):
                gate[j] = gated_gelu_tanh(gate[j], up[j])

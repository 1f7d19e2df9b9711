"""Matrix products of bfloat16 activations with packed weights, by AVX512-BF16 (VDPBF16PS).

One instruction multiplies a pair of K for 16 features, which is the fastest that vectors can do on some processors
(emit.py tells which); wide.py is for the others. Weights are as product.py says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from batchrun_kernels.cpu.after import NONE, finish
from batchrun_kernels.cpu.emit import BYTE, FLOAT, FLOATS, I16, LANES, LINE, prefetch, store, word
from batchrun_kernels.cpu.tile import PANEL, element_steps, inner_products

ROWS = 6  # 6 x 4 vectors of sums leave 8 of 32 registers for the operands


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
        step = element_steps(builder, types.uint16, types.uint16, 2)
        sums = inner_products(
            builder, pairs, range(count), columns, start, (base, x_at), (weights, w_at), step, meanwhile
        )
        target = builder.inttoptr(out, FLOAT.as_pointer())
        for (row, column), total in sums.items():
            store(builder, target, word(PANEL * row + LANES * column), total)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, rows, lines), generate


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

    See product.py.
    """
    sums = np.empty(2 * ROWS * PANEL, dtype=np.float32)
    gates, ups = sums[: ROWS * PANEL], sums[ROWS * PANEL :]
    at, up_at = gates.ctypes.data, ups.ctypes.data
    tiles, panel_bytes, width = (rows + ROWS - 1) // ROWS, depth * PANEL * 2, 2 * features
    # One tile streams as fast as the processor fetches by itself; with many there is time enough without help.
    fetched = 2 if 1 < tiles <= 3 else (1 if 3 < tiles <= 8 else 0)
    for panel in range(first, last):
        place, start, column = w + panel * panel_bytes, 0, 2 * panel * PANEL
        up = place + features // PANEL * panel_bytes
        following, second = place + panel_bytes, up + panel_bytes
        if panel + 1 == last:
            following, second = coming, coming + panel_bytes
        for tile in range(tiles):
            count, some = (rows - start) // (tiles - tile), tile * (panel_bytes // tiles)
            row = x + 2 * start * x_stride
            _multiply_rows(count, row, x_stride, place, depth // 2, at, following + some, fetched)
            if kind != NONE:
                _multiply_rows(count, row, x_stride, up, depth // 2, up_at, second + some, fetched)
            skip = start * width + column
            addends, offsets = add + skip if add else 0, bias + column if bias else 0
            finish(gates, ups, count, PANEL, kind, offsets, bias + width + column, addends, out + skip, width)
            start += count

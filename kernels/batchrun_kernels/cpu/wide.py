"""Matrix products of bfloat16 activations with packed weights, by float32 units.

Intel's server processors have two units that multiply and add float32, and take two cycles for a product of bfloat16
pairs: widening the weights in registers, for as many rows at once as registers hold sums of, is nearly twice as fast.
A bfloat16 is the upper half of a float32, so a word that holds a pair gives both in one instruction each; products are
exact, and sums rounded as float32. Weights are as product.py says.

With AVX2 a vector of 16 floats takes two registers of 16, so that fewer rows and features are taken at once; those that
are, lie side by side, and are read in their order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from batchrun_kernels.cpu.after import NONE, finish
from batchrun_kernels.cpu.emit import (
    BYTE,
    FLOAT,
    FLOATS,
    I16,
    LANES,
    LINE,
    few_registers,
    pointer_to,
    prefetch,
    store,
    word,
)
from batchrun_kernels.cpu.scalar import widen
from batchrun_kernels.cpu.tile import PANEL, element_steps, inner_products

# 12 x 2 vectors of sums leave 8 of 32 registers for the operands; 6 x 1 leave 4 of 16 that are half as large.
ROWS = 6 if few_registers() else 12
FEW = 6 if few_registers() else 4  # up to so many rows there is code for each number
SIDE = LANES if few_registers() else PANEL  # features of a panel that lie side by side
BLOCK_ROWS = 8 * ROWS  # which stay in the second level of the cache as float32
SLOW_TILES = 2  # of rows, in which there is only just time to fetch the coming panel

halves_at = pointer_to(types.uint16)


@intrinsic(prefer_literal=True)
def multiply(context, x, w, pairs, out, ahead, rows, columns, lines):
    """float32 out [rows, 64] = x [pairs, rows, 2] times a panel at `w`, its first 16 `columns` features only.

    x float32. rows, columns and lines are constants, all others are addresses and a number of pairs. Meanwhile `lines`
    cache lines per pair are fetched from `ahead`.
    """
    count, fetched = rows.literal_value, lines.literal_value
    vectors = range(columns.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, w, pairs, out, ahead = arguments[:5]

        def start(row: int, column: int) -> Any:
            return ir.Constant(FLOATS, [0.0] * LANES)

        def x_at(row: int, index: Any) -> Any:
            return builder.add(builder.mul(index, word(2 * count)), word(2 * row))

        def w_at(column: int, index: Any) -> Any:
            part, place = divmod(column * LANES, SIDE)
            row = builder.add(builder.mul(pairs, word(part)), index) if part else index
            return builder.add(builder.mul(row, word(2 * SIDE)), word(2 * place))

        def meanwhile(index: Any) -> None:
            coming = builder.add(ahead, builder.mul(index, word(LINE * fetched)))
            prefetch(builder, builder.inttoptr(coming, BYTE.as_pointer()), LINE * fetched)

        base, weights = builder.inttoptr(x, FLOAT.as_pointer()), builder.inttoptr(w, I16.as_pointer())
        step = element_steps(builder, types.float32, types.uint16, 2)
        sums = inner_products(
            builder, pairs, range(count), vectors, start, (base, x_at), (weights, w_at), step, meanwhile
        )
        target = builder.inttoptr(out, FLOAT.as_pointer())
        for (row, column), total in sums.items():
            store(builder, target, word(PANEL * row + LANES * column), total)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, rows, columns, lines), generate


@njit(inline="always")
def _both_halves(x, w, pairs, out, ahead, rows, lines):
    """A panel in two passes of two vectors of features."""
    multiply(x, w, pairs, out, ahead, rows, 2, lines)
    half = 2 * LANES
    skip = half * pairs if SIDE == LANES else half
    multiply(x, w + 4 * skip, pairs, out + 4 * half, ahead + LINE * lines * pairs, rows, 2, lines)


@njit(nogil=True)
def _multiply_few(rows, x, w, pairs, out, ahead):
    if rows == 4:
        multiply(x, w, pairs, out, ahead, 4, 4, 4)
    elif rows == 3:
        multiply(x, w, pairs, out, ahead, 3, 4, 4)
    elif rows == 2:
        multiply(x, w, pairs, out, ahead, 2, 4, 4)
    else:
        multiply(x, w, pairs, out, ahead, 1, 4, 4)


@njit(nogil=True)
def _multiply_many(rows, x, w, pairs, out, ahead, lines):
    if rows == 12:
        _both_halves(x, w, pairs, out, ahead, 12, lines)
    elif rows == 10:
        _both_halves(x, w, pairs, out, ahead, 10, lines)
    elif rows == 8:
        _both_halves(x, w, pairs, out, ahead, 8, lines)
    else:
        _both_halves(x, w, pairs, out, ahead, 6, lines)


@njit(inline="always")
def _quarters(x, w, pairs, out, ahead, rows):
    """A panel in four passes of one vector of features."""
    for part in range(PANEL // LANES):
        skip = 4 * LANES * part
        multiply(x, w + skip * pairs, pairs, out + skip, ahead + LINE * part * pairs, rows, 1, 1)


@njit(nogil=True)
def _multiply_in_16_registers(rows, x, w, pairs, out, ahead, lines):
    """`multiply` for 1 to 6 rows, all 64 features; the whole coming panel is fetched."""
    if rows == 6:
        _quarters(x, w, pairs, out, ahead, 6)
    elif rows == 5:
        _quarters(x, w, pairs, out, ahead, 5)
    elif rows == 4:
        _quarters(x, w, pairs, out, ahead, 4)
    elif rows == 3:
        _quarters(x, w, pairs, out, ahead, 3)
    elif rows == 2:
        _both_halves(x, w, pairs, out, ahead, 2, 2)
    else:
        _both_halves(x, w, pairs, out, ahead, 1, 2)


@njit(nogil=True)
def _multiply_in_32_registers(rows, x, w, pairs, out, ahead, lines):
    """`multiply` for as many rows as `_held` gives, all 64 features; 1 or 2 lines fetched per pair and pass."""
    if rows <= FEW:
        _multiply_few(rows, x, w, pairs, out, ahead)
    elif lines == 1:
        _multiply_many(rows, x, w, pairs, out, ahead, 1)
    else:
        _multiply_many(rows, x, w, pairs, out, ahead, 2)


_multiply_rows = _multiply_in_16_registers if few_registers() else _multiply_in_32_registers


@njit(inline="always")
def _held(rows):
    """The rows of a tile for so many: there is code for few numbers only."""
    return rows if rows <= FEW else (rows + 1) // 2 * 2


@njit(inline="always")
def _held_rows(rows):
    """The same for all rows: those of whole tiles, and of the rest."""
    return rows // ROWS * ROWS + _held(rows % ROWS)


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def pack(x, x_stride, rows, depth, tiles):
    """x [rows, depth], bfloat16 at an address, to float32 tiles [pairs, rows held, 2] of up to 12 rows."""
    for start in range(0, rows, ROWS):
        some = min(ROWS, rows - start)
        held = _held(some)
        tile = tiles[start * depth : (start + held) * depth].reshape(depth // 2, held, 2)
        tile[:, some:] = np.float32(0.0)
        for r in range(some):
            row = carray(halves_at(x + 2 * (start + r) * x_stride), (depth // 2, 2))
            for i in range(depth // 2):
                tile[i, r, 0], tile[i, r, 1] = widen(row[i, 0]), widen(row[i, 1])


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def product(x, x_stride, rows, depth, w, bias, add, out, features, kind, first, last, coming):
    """out [rows, features] = x [rows, depth] W^T + bias + add, all bfloat16 at addresses, x_stride in elements.

    See product.py.
    """
    sums = np.empty(2 * ROWS * PANEL, dtype=np.float32)
    room = np.empty(_held_rows(min(rows, BLOCK_ROWS)) * depth, dtype=np.float32)
    for start in range(0, rows, BLOCK_ROWS):
        some, skip = min(BLOCK_ROWS, rows - start), 2 * start * features
        pack(x + 2 * start * x_stride, x_stride, some, depth, room)
        addends = add + skip if add else 0
        _block(room, some, depth, w, bias, addends, out + skip, features, kind, first, last, coming, sums)


@njit(nogil=True, fastmath=True, error_model="numpy")
def _block(room, rows, depth, w, bias, add, out, features, kind, first, last, coming, sums):
    """The product of packed rows; `sums` float32 [2 x 12 x 64] is room."""
    gates, ups = sums[: ROWS * PANEL], sums[ROWS * PANEL :]
    at, up_at, packed = gates.ctypes.data, ups.ctypes.data, room.ctypes.data
    tiles, panel_bytes, width = (rows + ROWS - 1) // ROWS, depth * PANEL * 2, 2 * features
    lines = 2 if tiles <= SLOW_TILES else 1
    for panel in range(first, last):
        place, column = w + panel * panel_bytes, 2 * panel * PANEL
        up = place + features // PANEL * panel_bytes
        following, second = place + panel_bytes, up + panel_bytes
        if panel + 1 == last:
            following, second = coming, coming + panel_bytes
        for tile in range(tiles):
            start, some = tile * ROWS, tile * (panel_bytes // tiles)
            count, source = min(ROWS, rows - start), packed + 4 * start * depth
            held = _held(count)
            _multiply_rows(held, source, place, depth // 2, at, following + some, lines)
            if kind != NONE:
                _multiply_rows(held, source, up, depth // 2, up_at, second + some, lines)
            skip = start * width + column
            addends, offsets = add + skip if add else 0, bias + column if bias else 0
            finish(gates, ups, count, PANEL, kind, offsets, bias + width + column, addends, out + skip, width)

"""Matrix products of bfloat16 activations with packed weights, on processors with AMX.

For up to some 16 rows a product is bound by reading its weights, and a library call by its own overhead. What follows a
product elementwise (bias, residual, gated activation) is done while its results are in the cache.

The weights are as oneDNN lays them out for the same unit, so one copy serves both: W [N, K] in panels of 32 output
features, each panel [K / 2, 32, 2].
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from batchrun_kernels.cpu.after import NONE, finish
from batchrun_kernels.cpu.amx import (
    COLUMNS,
    LINE,
    ROWS,
    STEP,
    TILE,
    has_matrix_unit,
    multiply,
    release_tiles,
    set_shapes,
)

PANEL = COLUMNS  # output features whose sums are in tiles at once
PANEL_BYTES = 4 * PANEL  # of a row of sums
# Lines of the coming panel to fetch in a step: with one tile of rows all of it, with many there is time enough.
WHOLE, SOME = 2 * TILE, 4


def can_read(dtype: torch.dtype, features: int, depth: int) -> bool:
    """Whether `product` may take a packed weight [features, depth]: its shape has no padding, and the processor can."""
    return dtype == torch.bfloat16 and features % PANEL == 0 and depth % STEP == 0 and has_matrix_unit()


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def product(x, x_stride, rows, depth, w, bias, add, out, features, kind, first, last, coming):
    """out [rows, features] = x [rows, depth] W^T + bias + add, all bfloat16 at addresses, x_stride in elements.

    W [features, depth] is packed; features and depth must be multiples of 32. bias and add may be 0 for none. With
    `kind` SILU or GELU_TANH, W is [2 features, depth], gates first, and out = act(gates) * ups. Sums are float32,
    rounded once. Only panels [first, last) of `out` are computed; with the last, what is at `coming` is fetched.
    FLOPs: 2 rows x depth x rows of W; bytes: W once, x once for each panel from the cache.
    """
    if rows == 0:
        return
    room = np.empty(2 * ROWS * PANEL + LINE // 4, dtype=np.float32)
    room = room[-(room.ctypes.data // 4) % (LINE // 4) :]  # tiles are stored in whole cache lines
    gates, ups = room[: ROWS * PANEL], room[ROWS * PANEL : 2 * ROWS * PANEL]
    blocks = (rows + ROWS - 1) // ROWS
    count = (rows + blocks - 1) // blocks  # of rows in each block: the last may take some of the one before again
    upper = count if count <= TILE else (count + 1) // 2
    set_shapes(upper, count - upper)
    panel_bytes, width = 2 * depth * PANEL, 2 * features
    for panel in range(first, last):
        place, column = w + panel * panel_bytes, 2 * panel * PANEL
        up = place + features // PANEL * panel_bytes
        following, second = place + panel_bytes, up + panel_bytes
        if panel + 1 == last:
            following, second = coming, coming + panel_bytes
        for block in range(blocks):
            start, some = min(block * count, rows - count), block * (panel_bytes // blocks)
            row = x + 2 * start * x_stride
            _multiply(row, x_stride, place, depth, gates, upper, count, following + some)
            if kind != NONE:
                _multiply(row, x_stride, up, depth, ups, upper, count, second + some)
            skip = start * width + column
            addends, offsets = add + skip if add else 0, bias + column if bias else 0
            finish(gates, ups, count, PANEL, kind, offsets, bias + width + column, addends, out + skip, width)
    release_tiles()


@njit(inline="always")
def _multiply(x, x_stride, w, depth, sums, upper, count, ahead):
    """Sums of `count` rows, the first `upper` of them in the first tile; what comes next lies at `ahead`."""
    at, stride = sums.ctypes.data, 2 * x_stride
    strides = (stride, 4 * PANEL, PANEL_BYTES)
    lower, lower_at = x + upper * stride, at + upper * PANEL_BYTES
    if count > upper:
        multiply(x, lower, w, at, lower_at, strides, depth // STEP, ahead, SOME, 2)
    else:
        multiply(x, lower, w, at, lower_at, strides, depth // STEP, ahead, WHOLE, 1)

"""Products of int8 weights with activations that are rounded to 8 bits row by row (Jacob et al. 2018, without zero
points on the weights).

`quantize_rows` and `scale_rows` go around any integer product; `multiply` is a whole product of its own for
processors with AVX512-VNNI, where the sums never leave the registers as integers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from batchrun_kernels.cpu.emit import processor_has
from batchrun_kernels.cpu.scalar import larger, narrow, widen

Array = np.ndarray

ZERO = 128  # activations are unsigned bytes around this
OUTPUTS = 64  # outputs of a weight tile: four vectors of 16 sums
DEPTH = 4  # inputs that one instruction multiplies and adds
ROWS = 6  # rows at once: 24 vectors of sums stay in the 32 registers


def has_vnni() -> bool:
    """Whether the processor has 512-bit vectors with the instruction that `multiply` is made of."""
    return processor_has("avx512vnni")


def has_matrix_unit() -> bool:
    """Whether the processor has AMX for int8, which is far faster than vectors from some rows on."""
    return processor_has("amx-int8")


def pack(weight: Array, multiple: int = DEPTH) -> Array:
    """int8 [N, K] as tiles [ceil(N / 64), K' / 4, 64, 4], filled up with zeros; K' is K rounded up to a multiple."""
    outputs, inputs = weight.shape
    padded = np.zeros((-(-outputs // OUTPUTS) * OUTPUTS, -(-inputs // multiple) * multiple), dtype=np.int8)
    padded[:outputs, :inputs] = weight
    tiles = padded.reshape(-1, OUTPUTS, padded.shape[1] // DEPTH, DEPTH)
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3))


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def quantize_rows(x: Array, out: Array, scales: Array) -> None:
    """out uint8 [M, K'] = 128 + round(x / scale) for x [M, K]; scales float32 [M] bring a row's largest |x| to 127.

    Columns of `out` beyond K are left as they are.
    """
    for m in range(x.shape[0]):
        row, target = x[m], out[m, : x.shape[1]]
        largest = np.float32(0.0)
        for i in range(row.shape[0]):
            largest = larger(largest, abs(widen(row[i])))
        scales[m] = largest / np.float32(127.0)
        inverse = np.float32(127.0) / larger(largest, np.float32(1e-30))
        for i in range(row.shape[0]):
            target[i] = np.uint8(np.int32(np.floor(widen(row[i]) * inverse + np.float32(128.5))))


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def scale_rows(y: Array, scales: Array, bias: Array, add: Array, out: Array) -> None:
    """out [M, N] = y * scales[:, None] + bias + add for y float32 [M, N], which is spoilt.

    bias float32 [N] or [0] for none, add [M, N] or [0, N] for none.
    """
    for m in range(y.shape[0]):
        row, target, scale = y[m], out[m], scales[m]
        for i in range(row.shape[0]):
            row[i] *= scale
        if bias.shape[0]:
            for i in range(row.shape[0]):
                row[i] += bias[i]
        if add.shape[0]:
            more = add[m]
            for i in range(row.shape[0]):
                row[i] += widen(more[i])
        for i in range(row.shape[0]):
            target[i] = narrow(row[i], target[i])


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def multiply(
    x: Array,
    x_scales: Array,
    tiles: Array,
    scales: Array,
    offsets: Array,
    bias: Array,
    add: Array,
    out: Array,
    begin: int,
    end: int,
) -> None:
    """out [M, N] = (x - 128) @ W^T with both sides' scales, + bias + add, rounded once; tiles [begin, end) of it.

    x uint8 [M, K'] and x_scales float32 [M] as quantize_rows gives them, tiles as `pack` gives them, scales float32
    [N], offsets int32 [N] = 128 * sum of the row of W; bias and add as in scale_rows.
    """
    rows, outputs = out.shape
    depth = tiles.shape[1]
    sums = np.empty((ROWS, OUTPUTS), dtype=np.int32)
    line = np.empty(OUTPUTS, dtype=np.float32)
    for tile in range(begin, end):
        first = tile * OUTPUTS
        count = min(OUTPUTS, outputs - first)
        for start in range(0, rows, ROWS):
            height = min(ROWS, rows - start)
            if height == 6:
                dot_6(x, start, tiles, tile, depth, sums)
            elif height == 5:
                dot_5(x, start, tiles, tile, depth, sums)
            elif height == 4:
                dot_4(x, start, tiles, tile, depth, sums)
            elif height == 3:
                dot_3(x, start, tiles, tile, depth, sums)
            elif height == 2:
                dot_2(x, start, tiles, tile, depth, sums)
            else:
                dot_1(x, start, tiles, tile, depth, sums)
            for r in range(height):
                m = start + r
                for i in range(count):
                    line[i] = np.float32(sums[r, i] - offsets[first + i]) * (scales[first + i] * x_scales[m])
                if bias.shape[0]:
                    for i in range(count):
                        line[i] += bias[first + i]
                if add.shape[0]:
                    for i in range(count):
                        line[i] += widen(add[m, first + i])
                target = out[m, first : first + count]
                for i in range(count):
                    target[i] = narrow(line[i], target[i])


@lru_cache
def _dot(height: int) -> Any:
    """f(x, start, tiles, tile, depth, sums): sums[r, n] = sum over k of x[start + r, k] * W[64 * tile + n, k]."""

    @intrinsic
    def dot(context, x, start, tiles, tile, depth, sums):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data, weights, result = (
                context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 2, 5)
            )
            start, tile, depth = (arguments[i] for i in (1, 3, 4))
            wide, vector = ir.IntType(32), ir.VectorType(ir.IntType(32), 16)
            kind = ir.FunctionType(vector, [vector] * 3)
            instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
            size = start.type
            in_bytes = builder.mul(depth, ir.Constant(size, DEPTH))
            inputs = [
                builder.gep(data, [builder.mul(builder.add(start, ir.Constant(size, r)), in_bytes)])
                for r in range(height)
            ]
            weights = builder.gep(weights, [builder.mul(tile, builder.mul(depth, ir.Constant(size, OUTPUTS * DEPTH)))])
            zero = ir.Constant(vector, [0] * 16)
            slots = [[cgutils.alloca_once_value(builder, zero) for _ in range(4)] for _ in range(height)]
            with cgutils.for_range(builder, depth, intp=size) as loop:
                place = builder.mul(loop.index, ir.Constant(size, OUTPUTS * DEPTH))
                lines = []
                for part in range(4):
                    at = builder.gep(weights, [builder.add(place, ir.Constant(size, 64 * part))])
                    lines.append(builder.load(builder.bitcast(at, vector.as_pointer()), align=1))
                at = builder.mul(loop.index, ir.Constant(size, DEPTH))
                for r in range(height):
                    four = builder.load(builder.bitcast(builder.gep(inputs[r], [at]), wide.as_pointer()), align=1)
                    single = builder.insert_element(ir.Constant(vector, ir.Undefined), four, ir.Constant(wide, 0))
                    spread = builder.shuffle_vector(single, single, zero)
                    for part in range(4):
                        slot = slots[r][part]
                        builder.store(builder.call(instruction, [builder.load(slot), spread, lines[part]]), slot)
            for r in range(height):
                for part in range(4):
                    at = builder.gep(result, [ir.Constant(size, r * OUTPUTS + 16 * part)])
                    builder.store(builder.load(slots[r][part]), builder.bitcast(at, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        intp = types.intp
        return types.void(x, intp, tiles, intp, intp, sums), generate

    return dot


dot_1, dot_2, dot_3, dot_4, dot_5, dot_6 = (_dot(height) for height in range(1, 7))

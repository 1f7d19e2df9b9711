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
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from batchrun_kernels.cpu.layer import gated_gelu_tanh, gated_silu
from batchrun_kernels.cpu.scalar import narrow, widen
from batchrun_kernels.cpu.team import JOB, lead
from batchrun_kernels.cpu.tile import PAIRS, processor_has

PANEL = 64  # output features whose sums stay in registers
TILE = 6  # rows of such sums: 24 of the 32 vector registers
ALIGN_K = 32  # K is padded to a multiple of this in the packed layout
NONE, SILU, GELU_TANH = 0, 1, 2  # what follows the product
JOB_WORDS = 11
PIECES_PER_THREAD = 4  # so that a thread that is late leaves more of them to the others

FLOAT, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
SUMS, WORDS = ir.VectorType(FLOAT, 16), ir.VectorType(I32, 16)


def has_bfloat16_products() -> bool:
    """Whether this processor has AVX512-BF16."""
    return processor_has("avx512bf16")


def can_read(dtype: torch.dtype, features: int, depth: int) -> bool:
    """Whether `product` may take a packed weight [features, depth]: its shape has no padding, and the processor can."""
    return dtype == torch.bfloat16 and features % PANEL == 0 and depth % ALIGN_K == 0 and has_bfloat16_products()


def has_matrix_unit() -> bool:
    """Whether this processor has AMX for bfloat16, which is far faster than vectors from some rows on."""
    return processor_has("amx-bf16")


@intrinsic(prefer_literal=True)
def multiply(context, x, x_stride, w, pairs, out, ahead, rows, lines):
    """float32 out [rows, 64] = x [rows, 2 pairs] times a panel at `w`, for constant `rows` and `lines`.

    All others are addresses, x_stride is in bytes. Meanwhile `lines` cache lines per pair are fetched from `ahead` on.
    """
    count, fetched = rows.literal_value, lines.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, w, pairs, out, ahead = arguments[:6]
        dot = _declare(builder, SUMS, [SUMS, PAIRS, PAIRS], "llvm.x86.avx512bf16.dpbf16ps.512")
        fetch = _declare(builder, ir.VoidType(), [ir.IntType(8).as_pointer(), I32, I32, I32], "llvm.prefetch.p0")
        before, loop, after = builder.block, builder.append_basic_block("pairs"), builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(I64)
        index.add_incoming(_word(0), before)
        sums = [builder.phi(SUMS) for _ in range(4 * count)]
        for total in sums:
            total.add_incoming(ir.Constant(SUMS, [0.0] * 16), before)
        line = builder.add(w, builder.mul(index, _word(4 * PANEL)))
        weights = [
            builder.bitcast(builder.load(_pointer(builder, line, 64 * c, WORDS), align=64), PAIRS) for c in range(4)
        ]
        coming = builder.add(ahead, builder.mul(index, _word(64 * fetched)))
        for i in range(fetched):
            place = _pointer(builder, coming, 64 * i, ir.IntType(8))
            builder.call(fetch, [place, ir.Constant(I32, 0), ir.Constant(I32, 2), ir.Constant(I32, 1)])
        results = []
        for r in range(count):
            row = builder.add(builder.add(x, builder.mul(x_stride, _word(r))), builder.mul(index, _word(4)))
            pair = _splat(builder, builder.load(_pointer(builder, row, 0, I32), align=2))
            results += [builder.call(dot, [sums[4 * r + c], pair, weights[c]]) for c in range(4)]
        following = builder.add(index, _word(1))
        index.add_incoming(following, loop)
        for total, result in zip(sums, results, strict=True):
            total.add_incoming(result, loop)
        builder.cbranch(builder.icmp_signed("<", following, pairs), loop, after)
        builder.position_at_end(after)
        for i, result in enumerate(results):
            builder.store(result, _pointer(builder, out, 64 * i, SUMS), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, rows, lines), generate


@intrinsic
def elements_at(context, address):
    """A pointer to half-precision elements."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(16).as_pointer())

    return types.CPointer(types.uint16)(types.int64), generate


def _word(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _declare(builder: Any, result: Any, arguments: list[Any], name: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _pointer(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, _word(offset)), kind.as_pointer())


def _splat(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(WORDS, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.bitcast(builder.shuffle_vector(single, single, ir.Constant(WORDS, [0] * 16)), PAIRS)


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


@njit(nogil=True)
def _panels(job, first, last):
    """Panels [first, last) of a job: see `product`."""
    x, x_stride, rows, depth, w, bias, add, out, features, kind = (
        job[0], job[1], job[2], job[3], job[4], job[5], job[6], job[7], job[8], job[9]
    )  # fmt: skip
    sums = np.empty((2 * TILE, PANEL), dtype=np.float32)
    at, half = sums.ctypes.data, sums[TILE:]
    results = carray(elements_at(out), (rows, features))
    addends = carray(elements_at(add), (rows, features))
    offsets = carray(elements_at(bias), (2 * features,))
    tiles, panel_bytes = (rows + TILE - 1) // TILE, depth * PANEL * 2
    # One tile streams as fast as the processor fetches by itself; with many there is time enough without help.
    fetched = 2 if 1 < tiles <= 3 else (1 if 3 < tiles <= 8 else 0)
    for panel in range(first, last):
        place, start, column = w + panel * panel_bytes, 0, panel * PANEL
        for tile in range(tiles):
            count = (rows - start) // (tiles - tile)
            row, ahead = x + start * x_stride, place + panel_bytes + tile * (panel_bytes // tiles)
            _multiply_rows(count, row, x_stride, place, depth // 2, at, ahead, fetched)
            if bias:
                _add_bias(sums, offsets[column : column + PANEL], count)
            if kind != NONE:
                up = place + features // PANEL * panel_bytes
                ahead += up - place
                _multiply_rows(count, row, x_stride, up, depth // 2, at + TILE * PANEL * 4, ahead, fetched)
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


@cfunc(types.void(types.CPointer(types.int64), types.int64), nogil=True, cache=True)
def _piece(job, piece):
    words = carray(job, (JOB_WORDS,))
    each = words[10]
    panels = words[8] // PANEL
    _panels(words, piece * each, min(panels, (piece + 1) * each))


@njit(nogil=True, cache=True)
def product(control, threads, address, x, x_stride, rows, depth, w, bias, add, out, features, kind):
    """out [rows, features] = x [rows, depth] W^T + bias + add, all bfloat16 at addresses, x_stride in bytes.

    W [features, depth] is packed; features must be a multiple of 64 and depth of 32. bias and add may be 0 for none.
    With `kind` SILU or GELU_TANH, W is [2 features, depth], gates first, and out = act(gates) * ups. Sums are float32,
    rounded once. FLOPs: 2 rows x depth x rows of W; bytes: W once, x once for each panel from the cache.
    `control` and `threads` are a Team's, `address` is PIECE.
    """
    job = control[JOB:]
    job[0], job[1], job[2], job[3], job[4], job[5] = x, x_stride, rows, depth, w, bias
    job[6], job[7], job[8], job[9] = add, out, features, kind
    panels = features // PANEL
    each = panels if threads == 1 else max(1, panels // (PIECES_PER_THREAD * threads))
    job[10] = each
    lead(control, address, (panels + each - 1) // each)


PIECE = _piece.address

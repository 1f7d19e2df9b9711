"""Products of a few rows with a packed panel, whose sums stay in registers: the inner loops of paged attention and of
the products with packed weights.

A panel [pairs, columns, P] holds P elements of the inner dimension side by side: 2 in half precision, 1 in float32, so
that one broadcast of P elements of a row meets 16 columns at once. Where that is the fastest (emit.py tells), a pair of
bfloat16 is one instruction; elsewhere, and in float16, rows come as float32, and both elements of a panel's words are
widened and added in turn. A panel of int8 is widened to the type of the rows as it is loaded, which is exact; what one
stands for is a factor of the whole sum, left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from batchrun_kernels.cpu import amx
from batchrun_kernels.cpu.emit import (
    FLOATS,
    I16,
    I32,
    I64,
    LANES,
    WORDS,
    BFloat,
    few_registers,
    fma,
    load,
    pointers,
    prefetch,
    splat,
    store,
    word,
)

# Numbers of rows that there is code for, each with the vectors of columns that are taken at once. The most sums take 24
# of 32 registers; of 16 half as large ones, 12.
if few_registers():
    COLUMNS = {1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1}
else:
    COLUMNS = {1: 4, 2: 4, 3: 4, 4: 4, 6: 2, 8: 2, 10: 2, 12: 2}
ROWS = max(COLUMNS)
PANEL_LANES = 4
PANEL = LANES * PANEL_LANES  # features of a packed weight that lie side by side

PAIRS = ir.VectorType(BFloat(), 2 * LANES)
Steps = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def sizes(**named: int) -> np.ndarray:
    """Numbers that are compiled into the kernel which takes them: an empty array whose type has a field of each size.

    Code that a factory generates for its arguments would be compiled anew in each process, since numba's cache
    knows a function by its module and the types of its arguments.
    """
    return np.empty(0, dtype=[(name, f"S{value}") for name, value in named.items()])


def size_of(kind: Any, name: str) -> int:
    """The number that `sizes` has under a name, from the array's type."""
    return int(kind.dtype.fields[name].type.count)


@njit(inline="always")
def use_tiles(sizes):
    """Before the first `score_rows` of a kernel."""
    if has_tiles(sizes):
        amx.set_shapes(amx.TILE, amx.TILE)


@njit(inline="always")
def drop_tiles(sizes):
    """After its last `add_values`."""
    if has_tiles(sizes):
        amx.release_tiles()


@intrinsic
def has_tiles(context, sizes):
    """Whether the kernel multiplies with AMX: a constant."""
    return types.boolean(sizes), lambda *_: ir.Constant(ir.IntType(1), int(_has_tiles(sizes)))


def operands(sizes, q):
    """An empty array of the type that rows must have for `score_rows` and `add_values`, for queries of q's type."""
    raise NotImplementedError("for compiled code")


@overload(operands, inline="always")
def _operands(sizes, q):
    if size_of(sizes, "operand") == 4:
        return lambda sizes, q: np.empty(0, dtype=np.float32)
    return lambda sizes, q: np.empty(0, dtype=q.dtype)


@intrinsic
def rows_at_once(context, sizes):
    """Query rows that `score_rows` and `add_values` take at most: a constant."""
    return types.int64(sizes), lambda *_: word(size_of(sizes, "rows"))


@intrinsic
def score_rows(context, sizes, q, k, k_at, out, out_at, out_stride, rows, ahead):
    """out[r, :lanes] = q[r, :] . k[:, lane] for `rows` of q [.., P pairs], and k a panel [pairs, lanes, P].

    sizes: pairs, lanes. out float32; k elements like those of q, or int8; `_at` and `_stride` count elements. Meanwhile
    as many bytes as the panel has are fetched from place `ahead` of k.
    """
    pairs, lanes, inner = (size_of(sizes, name) for name in ("pairs", "lanes", "inner"))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, query, keys, k_at, target, o_at, o_stride, rows, ahead = pointers(context, builder, signature, arguments)
        limit, step = ir.Constant(I64, pairs), element_steps(builder, q.dtype, k.dtype, inner)
        line_bytes = lanes * inner * (k.dtype.bitwidth // 8)

        def meanwhile(index: Any) -> None:
            prefetch(
                builder, builder.gep(keys, [builder.add(ahead, builder.mul(index, word(lanes * inner)))]), line_bytes
            )

        def some(count: int) -> None:
            for columns in _columns(count, lanes):

                def start(row: int, column: int) -> Any:
                    return ir.Constant(FLOATS, [0.0] * LANES)

                def x_at(row: int, index: Any) -> Any:
                    return _plus(builder, builder.mul(index, word(inner)), row * pairs * inner)

                def w_at(column: int, index: Any) -> Any:
                    place = builder.add(k_at, builder.mul(index, word(lanes * inner)))
                    return _plus(builder, place, column * LANES * inner)

                rest = meanwhile if columns[0] == 0 else None
                sums = inner_products(
                    builder, limit, range(count), columns, start, (query, x_at), (keys, w_at), step, rest
                )
                for (row, column), total in sums.items():
                    place = builder.add(o_at, builder.mul(o_stride, word(row)))
                    store(builder, target, _plus(builder, place, column * LANES), total)

        if _has_tiles(sizes):
            a = _address(builder, query, word(0))
            c, c_stride = _address(builder, target, o_at), builder.mul(o_stride, word(4))
            strides = (word(4 * pairs), word(4 * lanes), c_stride)
            b, coming = _address(builder, keys, k_at), _address(builder, keys, ahead)
            amx.panel_products(builder, rows, a, b, c, strides, lanes, pairs // amx.TILE, False, coming)
        else:
            _for_each_count(builder, rows, some)
        return context.get_dummy_value()

    places = [types.intp] * 4
    return types.void(sizes, q, k, types.intp, out, *places), generate


@intrinsic
def add_values(context, sizes, p, p_at, p_stride, v, v_at, out, rows, ahead):
    """out[r, :] += p[r, :] . v for `rows`, and v a block [slots / P, width, P].

    sizes: slots, width. out float32 [.., width]; v elements like those of p, or int8. Meanwhile as many bytes as the
    block has are fetched from place `ahead` of v.
    """
    slots, width, inner = (size_of(sizes, name) for name in ("slots", "width", "inner"))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, weights, p_at, p_stride, values, v_at, target, rows, ahead = pointers(context, builder, signature, arguments)
        limit, step = ir.Constant(I64, slots // inner), element_steps(builder, p.dtype, v.dtype, inner)
        line_bytes = width * inner * (v.dtype.bitwidth // 8)

        def meanwhile(index: Any) -> None:
            prefetch(
                builder, builder.gep(values, [builder.add(ahead, builder.mul(index, word(width * inner)))]), line_bytes
            )

        def some(count: int) -> None:
            for columns in _columns(count, width):

                def start(row: int, column: int) -> Any:
                    return load(builder, target, word(row * width + column * LANES), FLOATS)

                def x_at(row: int, index: Any) -> Any:
                    place = builder.add(p_at, builder.mul(p_stride, word(row)))
                    return builder.add(place, builder.mul(index, word(inner)))

                def w_at(column: int, index: Any) -> Any:
                    place = builder.add(v_at, builder.mul(index, word(width * inner)))
                    return _plus(builder, place, column * LANES * inner)

                rest = meanwhile if columns[0] == 0 else None
                sums = inner_products(
                    builder, limit, range(count), columns, start, (weights, x_at), (values, w_at), step, rest
                )
                for (row, column), total in sums.items():
                    store(builder, target, word(row * width + column * LANES), total)

        if _has_tiles(sizes):
            a, c = _address(builder, weights, p_at), _address(builder, target, word(0))
            strides = (builder.mul(p_stride, word(2)), word(4 * width), word(4 * width))
            b, coming = _address(builder, values, v_at), _address(builder, values, ahead)
            amx.panel_products(builder, rows, a, b, c, strides, width, slots // amx.STEP, True, coming)
        else:
            _for_each_count(builder, rows, some)
        return context.get_dummy_value()

    places = [types.intp] * 3
    return types.void(sizes, p, types.intp, types.intp, v, types.intp, out, *places[:2]), generate


def _columns(count: int, width: int) -> list[range]:
    """The vectors of `width` columns that are taken at once with so many rows."""
    vectors, most = width // LANES, COLUMNS[count]
    return [range(first, min(first + most, vectors)) for first in range(0, vectors, most)]


def _for_each_count(builder: Any, rows: Any, emit: Callable[[int], None]) -> None:
    """Emit a kernel for some numbers of rows, and the choice of the least that is enough."""
    end = builder.append_basic_block("end")
    choice = builder.switch(rows, end)
    for before, count in pairwise((0, *COLUMNS)):
        block = builder.append_basic_block(f"rows{count}")
        for number in range(before + 1, count + 1):
            choice.add_case(word(number), block)
        builder.position_at_end(block)
        emit(count)
        builder.branch(end)
    builder.position_at_end(end)


def _has_tiles(sizes: Any) -> bool:
    return bool(size_of(sizes, "rows") == amx.ROWS)


def inner_products(
    builder: Any,
    limit: Any,
    rows: range,
    columns: range,
    start: Callable[[int, int], Any],
    x: tuple[Any, Callable[[int, Any], Any]],
    w: tuple[Any, Callable[[int, Any], Any]],
    step: Steps,
    meanwhile: Callable[[Any], None] | None = None,
) -> dict[tuple[int, int], Any]:
    """sums[row, column] over index < limit of x[row, index] * w[index, column], from `start` on.

    `meanwhile` emits what else is done at each index.
    """
    load_x, load_w, add = step
    firsts = {(row, column): start(row, column) for row in rows for column in columns}
    before, loop, after = builder.block, builder.append_basic_block("inner"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    index.add_incoming(word(0), before)
    sums = {place: builder.phi(FLOATS) for place in firsts}
    for place, total in sums.items():
        total.add_incoming(firsts[place], before)
    lines = {column: load_w(w[0], w[1](column, index)) for column in columns}
    if meanwhile is not None:
        meanwhile(index)
    results = {}
    for row in rows:
        value = load_x(x[0], x[1](row, index))
        for column in columns:
            results[row, column] = add(sums[row, column], value, lines[column])
    following = builder.add(index, word(1))
    index.add_incoming(following, loop)
    for place, total in sums.items():
        total.add_incoming(results[place], loop)
    builder.cbranch(builder.icmp_signed("<", following, limit), loop, after)
    builder.position_at_end(after)
    return results


def element_steps(
    builder: Any, element: Any, panel: Any, inner: int
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(broadcast of a row's elements, load of a panel's, sum + product) for the element types of rows and panel."""
    small = panel == types.int8
    if element == types.float32 and inner == 1:
        return (
            lambda base, at: splat(builder, builder.load(builder.gep(base, [at])), FLOATS),
            lambda base, at: _bytes(builder, base, at, 1)[0] if small else load(builder, base, at, FLOATS),
            lambda total, a, b: fma(builder, a, b, total),
        )
    if element == types.float32:

        def floats(base: Any, at: Any) -> Any:
            places = (at, builder.add(at, word(1)))
            return tuple(splat(builder, builder.load(builder.gep(base, [x])), FLOATS) for x in places)

        return (
            floats,
            lambda base, at: (
                _bytes(builder, base, at, 2) if small else _halves(builder, load(builder, base, at, WORDS), panel)
            ),
            lambda total, a, b: fma(builder, a[1], b[1], fma(builder, a[0], b[0], total)),
        )

    kind = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
    dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")

    def both(base: Any, at: Any) -> Any:
        pointer = builder.bitcast(builder.gep(base, [at]), I32.as_pointer())
        return builder.bitcast(splat(builder, builder.load(pointer, align=2), WORDS), PAIRS)

    def pairs(base: Any, at: Any) -> Any:
        if not small:
            return builder.bitcast(load(builder, base, at, WORDS), PAIRS)
        # Whole numbers below 256 have nothing in the half of a float that bfloat16 drops.
        first, second = (builder.bitcast(x, WORDS) for x in _bytes(builder, base, at, 2))
        low = builder.lshr(first, ir.Constant(WORDS, [16] * LANES))
        return builder.bitcast(builder.or_(low, second), PAIRS)

    return both, pairs, lambda total, a, b: builder.call(dot, [total, a, b])


def _halves(builder: Any, words: Any, element: Any) -> tuple[Any, Any]:
    """The first and the second element of each word, as floats."""
    sixteen = ir.Constant(WORDS, [16] * LANES)
    if element == types.uint16:
        high = builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES))
        return builder.bitcast(builder.shl(words, sixteen), FLOATS), builder.bitcast(high, FLOATS)
    halves, shorts = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(I16, LANES)
    first, second = builder.trunc(words, shorts), builder.trunc(builder.lshr(words, sixteen), shorts)
    return tuple(builder.fpext(builder.bitcast(x, halves), FLOATS) for x in (first, second))


def _bytes(builder: Any, base: Any, at: Any, inner: int) -> tuple[Any, ...]:
    """The first and the second of `inner` int8 that lie side by side in each lane, as floats."""
    line = load(builder, base, at, ir.VectorType(ir.IntType(8 * inner), LANES))
    words = builder.sext(line, WORDS)
    if inner == 1:
        return (builder.sitofp(words, FLOATS),)
    shift = ir.Constant(WORDS, [24] * LANES)
    first = builder.ashr(builder.shl(words, shift), shift)
    second = builder.ashr(words, ir.Constant(WORDS, [8] * LANES))
    return builder.sitofp(first, FLOATS), builder.sitofp(second, FLOATS)


def _address(builder: Any, base: Any, at: Any) -> Any:
    return builder.ptrtoint(builder.gep(base, [at]), I64)


def _plus(builder: Any, value: Any, offset: int) -> Any:
    return builder.add(value, word(offset)) if offset else value

"""Products of a few rows with a packed panel, whose sums stay in registers: the inner loops of paged attention and of
the products with packed weights.

A panel [pairs, columns, P] holds P elements of the inner dimension side by side: 2 in half precision, 1 in float32, so
that one broadcast of P elements of a row meets 16 columns at once. On processors with AVX512-BF16 a pair of bfloat16
is one instruction; elsewhere, and in float16, both are widened and added in turn. A panel of int8 is widened to the
type of the rows as it is loaded, which is exact; what one stands for is a factor of the whole sum, left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

LANES = 16
ROWS = 6  # 6 x 4 vectors of sums leave 8 of 32 registers for the operands
PANEL_LANES = 4

I16, I32, I64, FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


PAIRS = ir.VectorType(BFloat(), 2 * LANES)
Steps = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def processor_has(feature: str) -> bool:
    """Whether code may be compiled for a feature of this processor, in LLVM's name for it."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES
    return bool(binding.get_host_cpu_features().get(feature, False))


def sizes(**named: int) -> np.ndarray:
    """Numbers that are compiled into the kernel which takes them: an empty array whose type has a field of each size.

    Code that a factory generates for its arguments would be compiled anew in each process, since numba's cache
    knows a function by its module and the types of its arguments.
    """
    return np.empty(0, dtype=[(name, f"S{value}") for name, value in named.items()])


def size_of(kind: Any, name: str) -> int:
    """The number that `sizes` has under a name, from the array's type."""
    return int(kind.dtype.fields[name].type.count)


@intrinsic(prefer_literal=True)
def score_rows(context, sizes, q, q_at, k, k_at, out, out_at, out_stride, rows):
    """out[r, :lanes] = q[r, :] . k[:, lane] for constant `rows` of q [rows, P pairs], and k a panel [pairs, lanes, P].

    sizes: pairs, lanes. out float32; k elements like those of q, or int8; `_at` and `_stride` count elements.
    """
    pairs, lanes, count = size_of(sizes, "pairs"), size_of(sizes, "lanes"), rows.literal_value
    inner = _inner(q.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, query, q_at, keys, k_at, target, o_at, o_stride, _ = _pointers(context, builder, signature, arguments)
        limit = ir.Constant(I64, pairs)
        step = element_steps(builder, q.dtype, k.dtype)
        for first in range(0, lanes // LANES, PANEL_LANES):
            columns = range(first, min(first + PANEL_LANES, lanes // LANES))

            def start(row: int, column: int) -> Any:
                return ir.Constant(FLOATS, [0.0] * LANES)

            def x_at(row: int, index: Any) -> Any:
                return _plus(builder, builder.add(q_at, builder.mul(index, word(inner))), row * pairs * inner)

            def w_at(column: int, index: Any) -> Any:
                place = builder.add(k_at, builder.mul(index, word(lanes * inner)))
                return _plus(builder, place, column * LANES * inner)

            sums = inner_products(builder, limit, range(count), columns, start, (query, x_at), (keys, w_at), step)
            for (row, column), total in sums.items():
                place = builder.add(o_at, builder.mul(o_stride, word(row)))
                store(builder, target, _plus(builder, place, column * LANES), total)
        return context.get_dummy_value()

    return types.void(sizes, q, types.intp, k, types.intp, out, types.intp, types.intp, rows), generate


@intrinsic(prefer_literal=True)
def add_values(context, sizes, p, p_at, p_stride, v, v_at, out, shrink, rows):
    """out[r, :] = shrink[r] * out[r, :] + p[r, :] . v for constant `rows`, and v a block [slots / P, width, P].

    sizes: slots, width. out float32 [ROWS, width], shrink float32 [ROWS]; v elements like those of p, or int8.
    """
    slots, width, count = size_of(sizes, "slots"), size_of(sizes, "width"), rows.literal_value
    inner = _inner(p.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, weights, p_at, p_stride, values, v_at, target, factor, _ = _pointers(context, builder, signature, arguments)
        limit = ir.Constant(I64, slots // inner)
        step = element_steps(builder, p.dtype, v.dtype)
        for first in range(0, width // LANES, PANEL_LANES):
            columns = range(first, min(first + PANEL_LANES, width // LANES))

            def start(row: int, column: int) -> Any:
                by = _splat(builder, builder.load(builder.gep(factor, [word(row)])), FLOATS)
                return builder.fmul(_load(builder, target, word(row * width + column * LANES), FLOATS), by)

            def x_at(row: int, index: Any) -> Any:
                place = builder.add(p_at, builder.mul(p_stride, word(row)))
                return builder.add(place, builder.mul(index, word(inner)))

            def w_at(column: int, index: Any) -> Any:
                place = builder.add(v_at, builder.mul(index, word(width * inner)))
                return _plus(builder, place, column * LANES * inner)

            sums = inner_products(builder, limit, range(count), columns, start, (weights, x_at), (values, w_at), step)
            for (row, column), total in sums.items():
                store(builder, target, word(row * width + column * LANES), total)
        return context.get_dummy_value()

    return types.void(sizes, p, types.intp, types.intp, v, types.intp, out, shrink, rows), generate


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
    builder: Any, element: Any, panel: Any
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(broadcast of a row's elements, load of a panel's, sum + product) for the element types of rows and panel."""
    small = panel == types.int8
    if element == types.float32:
        return (
            lambda base, at: _splat(builder, builder.load(builder.gep(base, [at])), FLOATS),
            lambda base, at: _bytes(builder, base, at, 1)[0] if small else _load(builder, base, at, FLOATS),
            lambda total, a, b: _fma(builder, a, b, total),
        )

    def both(base: Any, at: Any) -> Any:
        pointer = builder.bitcast(builder.gep(base, [at]), I32.as_pointer())
        return _splat(builder, builder.load(pointer, align=2), WORDS)

    if element == types.uint16 and processor_has("avx512bf16"):
        kind = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
        dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")

        def pairs(base: Any, at: Any) -> Any:
            if not small:
                return builder.bitcast(_load(builder, base, at, WORDS), PAIRS)
            # Whole numbers below 256 have nothing in the half of a float that bfloat16 drops.
            first, second = (builder.bitcast(x, WORDS) for x in _bytes(builder, base, at, 2))
            low = builder.lshr(first, ir.Constant(WORDS, [16] * LANES))
            return builder.bitcast(builder.or_(low, second), PAIRS)

        return (
            lambda base, at: builder.bitcast(both(base, at), PAIRS),
            pairs,
            lambda total, a, b: builder.call(dot, [total, a, b]),
        )
    return (
        lambda base, at: _halves(builder, both(base, at), element),
        lambda base, at: (
            _bytes(builder, base, at, 2) if small else _halves(builder, _load(builder, base, at, WORDS), element)
        ),
        lambda total, a, b: _fma(builder, a[1], b[1], _fma(builder, a[0], b[0], total)),
    )


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
    line = _load(builder, base, at, ir.VectorType(ir.IntType(8 * inner), LANES))
    words = builder.sext(line, WORDS)
    if inner == 1:
        return (builder.sitofp(words, FLOATS),)
    shift = ir.Constant(WORDS, [24] * LANES)
    first = builder.ashr(builder.shl(words, shift), shift)
    second = builder.ashr(words, ir.Constant(WORDS, [8] * LANES))
    return builder.sitofp(first, FLOATS), builder.sitofp(second, FLOATS)


def _inner(element: Any) -> int:
    return 1 if element == types.float32 else 2


def _pointers(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """The arguments, arrays as pointers to their first elements."""
    return [
        context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, arguments, strict=True)
    ]


def word(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _plus(builder: Any, value: Any, offset: int) -> Any:
    return builder.add(value, word(offset)) if offset else value


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, single, ir.Constant(WORDS, [0] * LANES))


def _load(builder: Any, base: Any, at: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(base, [at]), kind.as_pointer()), align=1)


def store(builder: Any, base: Any, at: Any, value: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(base, [at]), value.type.as_pointer()), align=4)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c])

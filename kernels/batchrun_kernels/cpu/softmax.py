"""Weights of a row of scores, in registers: the part of paged attention between its two products."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from batchrun_kernels.cpu.emit import FLOAT, FLOATS, LANES, WORDS, fma, load, pointers, splat, store_narrow, word

RUN = 128  # scores that are looked at together: they stay in 8 of 32 registers
EXP2 = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
LOWEST = -125.0  # powers below 2**-125 are taken for it: nothing, beside the largest weight


@intrinsic(prefer_literal=True)
def largest(context, scores, at, a, b, factor, floor, count, whole):
    """The largest of `floor` and factor * scores[at + j], a <= j < b, for j < count, which is a constant up to 128.

    scores float32, factor not negative. `whole` is a constant, 1 where a <= 0 and b >= count.
    """
    vectors, every = count.literal_value // LANES, bool(whole.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, a, b, factor, floor = pointers(context, builder, signature, arguments)[:6]
        lines = _scores(builder, source, at, vectors)
        if not every:
            low = ir.Constant(FLOATS, [-1e38] * LANES)
            seen = _seen(builder, a, b, vectors)
            lines = [builder.select(mask, line, low) for mask, line in zip(seen, lines, strict=True)]
        while len(lines) > 1:
            half = len(lines) // 2
            upper = [_larger(builder, x, y) for x, y in zip(lines[:half], lines[half : 2 * half], strict=True)]
            lines = upper + lines[2 * half :]
        kind = ir.FunctionType(FLOAT, [FLOATS])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fmax.v16f32")
        top = builder.fmul(builder.call(reduce, lines, fastmath=("nnan",)), factor)
        return _larger(builder, top, floor)

    numbers = [types.intp] * 3 + [types.float32] * 2
    return types.float32(scores, *numbers, count, whole), generate


@intrinsic(prefer_literal=True)
def weigh(context, scores, at, a, b, factor, top, weights, scales, values, count, whole):
    """weights[at + j] = 2**(factor * scores[at + j] - top) for a <= j < b, else 0, for j < count; returns their sum.

    weights of any element type, which they are rounded to. Where `values` are int8, scales float32 [count]
    multiply the weights, but not their sum. Constants as for `largest`.
    """
    vectors, every = count.literal_value // LANES, bool(whole.literal_value)
    scaled = values.dtype == types.int8

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, a, b, factor, top, target, by = pointers(context, builder, signature, arguments)[:8]
        minus, factors = splat(builder, builder.fneg(top), FLOATS), splat(builder, factor, FLOATS)
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        sums = [_power(builder, fma(builder, line, factors, minus)) for line in _scores(builder, source, at, vectors)]
        if not every:
            sums = [builder.select(mask, x, zero) for mask, x in zip(_seen(builder, a, b, vectors), sums, strict=True)]
        for index, line in enumerate(sums):
            place = builder.add(at, word(LANES * index))
            weight = builder.fmul(line, load(builder, by, word(LANES * index), FLOATS)) if scaled else line
            store_narrow(builder, target, place, weight, weights.dtype)
        while len(sums) > 1:
            half = len(sums) // 2
            upper = [builder.fadd(x, y) for x, y in zip(sums[:half], sums[half : 2 * half], strict=True)]
            sums = upper + sums[2 * half :]
        kind = ir.FunctionType(FLOAT, [FLOAT, FLOATS])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(reduce, [ir.Constant(FLOAT, 0.0), *sums], fastmath=("reassoc",))

    numbers = [types.intp] * 3 + [types.float32] * 2
    return types.float32(scores, *numbers, weights, scales, values, count, whole), generate


def _scores(builder: Any, source: Any, at: Any, vectors: int) -> list[Any]:
    return [load(builder, source, builder.add(at, word(LANES * index)), FLOATS) for index in range(vectors)]


def _seen(builder: Any, a: Any, b: Any, vectors: int) -> list[Any]:
    """Masks of the lanes from a to b: lane - a < b - a, both taken for unsigned."""
    start, length = (splat(builder, builder.trunc(x, WORDS.element), WORDS) for x in (a, builder.sub(b, a)))
    lanes = [ir.Constant(WORDS, [LANES * index + lane for lane in range(LANES)]) for index in range(vectors)]
    return [builder.icmp_unsigned("<", builder.sub(each, start), length) for each in lanes]


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _power(builder: Any, x: Any) -> Any:
    """2**x of 16 float32 up to 126, as `exp2` of scalar.py."""

    def same(value: float) -> ir.Constant:
        return ir.Constant(FLOATS, [value] * LANES)

    x = _larger(builder, x, same(LOWEST))
    kind = ir.FunctionType(FLOATS, [FLOATS])
    whole = builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.nearbyint.v16f32"), [x])
    f = builder.fsub(x, whole)
    p = same(EXP2[0])
    for coefficient in EXP2[1:]:
        p = fma(builder, p, f, same(coefficient))
    exponent = builder.shl(builder.fptosi(whole, WORDS), ir.Constant(WORDS, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(p, WORDS), exponent), FLOATS)

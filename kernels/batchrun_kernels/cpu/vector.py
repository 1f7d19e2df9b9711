"""Vector inner loops of the attention kernels, written as LLVM instructions.

numba's loop vectoriser keeps no accumulators in registers across a loop over tokens, which costs a factor of
five here. These functions emit the instructions themselves, on vectors of 16 floats that LLVM splits to
what the processor has. Arrays are C-contiguous; `at` is an element offset into one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 16
HEADS_AT_ONCE = 4  # query heads whose accumulators stay in registers
FLOAT = ir.FloatType()


@lru_cache
def dot_rows(group: int, dim: int) -> Any:
    """f(q, q_at, k, k_at, count, scores, scores_at, stride): scores[g * stride + t] = q[g, :] . k[t, :].

    q float32 [group, dim], k elements [count, dim], scores float32.
    """

    @intrinsic
    def dot_rows(context, q, q_at, k, k_at, count, scores, scores_at, stride):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            query, keys, out = (_data(context, builder, signature, arguments, i) for i in (0, 2, 5))
            q_at, k_at, count, s_at, stride = (arguments[i] for i in (1, 3, 4, 6, 7))
            for heads in _chunks(group, HEADS_AT_ONCE):
                parts = list(_chunks(dim, WIDTH))
                loaded = {
                    (g, part): _load(builder, query, _plus(builder, q_at, g * dim + part.start), part, types.float32)
                    for g in heads
                    for part in parts
                }
                with cgutils.for_range(builder, count, intp=count.type) as loop:
                    row = builder.add(k_at, builder.mul(loop.index, ir.Constant(loop.index.type, dim)))
                    sums: dict[int, Any] = {}
                    lines = [_load(builder, keys, _plus(builder, row, part.start), part, k.dtype) for part in parts]
                    for g in heads:
                        total = ir.Constant(FLOAT, 0.0)
                        same = None
                        for part, line in zip(parts, lines, strict=True):
                            if len(part) == WIDTH and same is not None:
                                same = _fma(builder, loaded[g, part], line, same)
                            elif len(part) == WIDTH:
                                same = builder.fmul(loaded[g, part], line)
                            else:
                                total = _sum(builder, builder.fmul(loaded[g, part], line), total)
                        sums[g] = total if same is None else _sum(builder, same, total)
                    for g in heads:
                        place = builder.add(s_at, builder.mul(stride, ir.Constant(stride.type, g)))
                        builder.store(sums[g], builder.gep(out, [builder.add(place, loop.index)]))
            return context.get_dummy_value()

        return types.void(q, types.intp, k, types.intp, types.intp, scores, types.intp, types.intp), generate

    return dot_rows


@lru_cache
def add_weighted_rows(group: int, dim: int) -> Any:
    """f(weights, weights_at, stride, v, v_at, count, out, out_at, shrink, shrink_at):
    out[g, :] = out[g, :] * shrink[g] + sum over t of weights[g * stride + t] * v[t, :].

    weights and shrink float32, v elements [count, dim], out float32 [group, dim].
    """

    @intrinsic
    def add_weighted_rows(context, weights, weights_at, stride, v, v_at, count, out, out_at, shrink, shrink_at):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weight, values, result, factor = (_data(context, builder, signature, arguments, i) for i in (0, 3, 6, 8))
            w_at, stride, v_at, count, o_at, f_at = (arguments[i] for i in (1, 2, 4, 5, 7, 9))
            parts = list(_chunks(dim, WIDTH))
            for heads in _chunks(group, HEADS_AT_ONCE):
                places = {(g, part): _plus(builder, o_at, g * dim + part.start) for g in heads for part in parts}
                kept = {}
                for (g, part), place in places.items():
                    old = _load(builder, result, place, part, types.float32)
                    by = _splat(builder, builder.load(builder.gep(factor, [_plus(builder, f_at, g)])), len(part))
                    kept[g, part] = cgutils.alloca_once_value(builder, builder.fmul(old, by))
                with cgutils.for_range(builder, count, intp=count.type) as loop:
                    row = builder.add(v_at, builder.mul(loop.index, ir.Constant(loop.index.type, dim)))
                    lines = [_load(builder, values, _plus(builder, row, part.start), part, v.dtype) for part in parts]
                    for g in heads:
                        place = builder.add(w_at, builder.mul(stride, ir.Constant(stride.type, g)))
                        p = builder.load(builder.gep(weight, [builder.add(place, loop.index)]))
                        for part, line in zip(parts, lines, strict=True):
                            slot = kept[g, part]
                            builder.store(_fma(builder, _splat(builder, p, len(part)), line, builder.load(slot)), slot)
                for (g, part), place in places.items():
                    target = builder.bitcast(builder.gep(result, [place]), _vector(len(part)).as_pointer())
                    builder.store(builder.load(kept[g, part]), target, align=4)
            return context.get_dummy_value()

        intp = types.intp
        return types.void(weights, intp, intp, v, intp, intp, out, intp, shrink, intp), generate

    return add_weighted_rows


def _chunks(total: int, size: int) -> Iterator[range]:
    return (range(start, min(start + size, total)) for start in range(0, total, size))


def _vector(width: int) -> ir.VectorType:
    return ir.VectorType(FLOAT, width)


def _data(context: Any, builder: Any, signature: Any, arguments: Any, index: int) -> Any:
    """Pointer to the first element of an array argument."""
    return context.make_array(signature.args[index])(context, builder, arguments[index]).data


def _plus(builder: Any, value: Any, offset: int) -> Any:
    return builder.add(value, ir.Constant(value.type, offset))


def _splat(builder: Any, value: Any, width: int) -> Any:
    single = builder.insert_element(ir.Constant(_vector(width), ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    order = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(single, single, order)


def _load(builder: Any, base: Any, at: Any, part: range, element: Any) -> Any:
    """len(part) elements from base[at] on, as a float vector."""
    width, pointer = len(part), builder.gep(base, [at])
    if element == types.float32:
        return builder.load(builder.bitcast(pointer, _vector(width).as_pointer()), align=4)
    bits = builder.load(builder.bitcast(pointer, ir.VectorType(ir.IntType(16), width).as_pointer()), align=2)
    if element == types.int16:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), width)), _vector(width))
    wide = ir.VectorType(ir.IntType(32), width)
    shifted = builder.shl(builder.zext(bits, wide), ir.Constant(wide, [16] * width))
    return builder.bitcast(shifted, _vector(width))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(a.type, [a.type] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32")
    return builder.call(fma, [a, b, c])


def _sum(builder: Any, vector: Any, start: Any) -> Any:
    """start + the sum of the lanes, in any order."""
    kind = ir.FunctionType(FLOAT, [FLOAT, vector.type])
    reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{vector.type.count}f32")
    return builder.call(reduce, [start, vector], fastmath=("reassoc",))

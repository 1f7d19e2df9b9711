"""Scalar building blocks of the CPU kernels.

numba has no bfloat16 or float16: such arrays come in as their bits (uint16 for bfloat16, int16 for float16)
and every element is widened to float32 in registers. LLVM turns these into vector instructions.

What a kernel computes with is inlined into it by numba: a function left to the linker can be that of another kernel's
module, rounded otherwise, and which it is depends on what was compiled before and what came from the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LOG2E = np.float32(1.4426950408889634)
NEGATIVE = np.float32(-1e30)  # stands for minus infinity: differences of it stay finite
LOWEST_EXPONENT = np.float32(-126.0)


@intrinsic
def widen(context: Any, bits: Any) -> Any:
    """float32 of a bfloat16 (uint16), float16 (int16) or float32 element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _widen(builder, bits, arguments[0])

    return types.float32(bits), generate


def _widen(builder: Any, kind: Any, value: Any) -> Any:
    if kind == types.uint16:
        wide = builder.shl(builder.zext(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())
    if kind == types.int16:
        return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
    return value


@intrinsic
def narrow(context: Any, value: Any, like: Any) -> Any:
    """A float32 rounded to the element type of `like`, to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, _ = arguments
        i32, i16 = ir.IntType(32), ir.IntType(16)
        if like == types.uint16:
            bits = builder.bitcast(number, i32)
            odd = builder.and_(builder.lshr(bits, ir.Constant(i32, 16)), ir.Constant(i32, 1))
            rounded = builder.add(bits, builder.add(odd, ir.Constant(i32, 0x7FFF)))
            kept = builder.select(
                builder.fcmp_unordered("uno", number, number), builder.or_(bits, ir.Constant(i32, 0x400000)), rounded
            )
            return builder.trunc(builder.lshr(kept, ir.Constant(i32, 16)), i16)
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(number, ir.HalfType()), i16)
        return number

    return like(types.float32, like), generate


@intrinsic
def as_type(context: Any, value: Any, like: Any) -> Any:
    """An element as one of the type of `like`: the same, or float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0] if value == like else _widen(builder, value, arguments[0])

    return like(value, like), generate


@intrinsic
def from_bits(context: Any, bits: Any) -> Any:
    """float32 whose bits are an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def larger(context: Any, a: Any, b: Any) -> Any:
    """max of two float32 that are not NaN, in the form that LLVM vectorises as a reduction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        single = ir.FloatType()
        maximum = builder.module.declare_intrinsic("llvm.maxnum", [single], ir.FunctionType(single, [single, single]))
        return builder.call(maximum, arguments, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), generate


@njit(inline="always", fastmath=True, error_model="numpy")
def exp2(x: Any) -> Any:
    """2**x in float32 for x below 127, to about 2e-7 relative; 0 below the smallest normal number.

    The fraction goes through a polynomial fitted to 2**f on [-1/2, 1/2], the integer into the exponent bits:
    a call to libm would keep the loop from being vectorised.
    """
    x = larger(np.float32(x), LOWEST_EXPONENT - np.float32(1.0))
    whole = np.float32(np.floor(x + np.float32(0.5)))
    f = x - whole
    p = np.float32(1.5403530e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.6181291e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314718e-1)
    p = p * f + np.float32(1.0)
    scale = from_bits((np.int32(whole) + np.int32(127)) << np.int32(23))
    return p * scale if x >= LOWEST_EXPONENT else np.float32(0.0)


def elements(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as the array the kernels take, sharing memory: bits of half-precision types, else as it is."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == torch.float16:
        return tensor.view(torch.int16).numpy()
    return tensor.numpy()

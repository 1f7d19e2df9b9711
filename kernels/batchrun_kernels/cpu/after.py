"""What follows a matrix product while its sums are in the cache: bias, gated activation, residual, rounding.

Sums are float32 at an address, rows of them end to end; what is added and what comes out are bfloat16 at addresses.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from batchrun_kernels.cpu.emit import FLOAT, FLOATS, I16, LANES, load, load_wide, store, store_narrow, word
from batchrun_kernels.cpu.layer import gated_gelu_tanh, gated_silu

NONE, SILU, GELU_TANH = 0, 1, 2  # activations


@njit(inline="always", fastmath=True, error_model="numpy")
def gate_sums(gates, ups, kind):
    """gates [N] = act(gates) * ups, both float32."""
    if kind == SILU:
        for i in range(gates.shape[0]):
            gates[i] = gated_silu(gates[i], ups[i])
    else:
        for i in range(gates.shape[0]):
            gates[i] = gated_gelu_tanh(gates[i], ups[i])


@njit(inline="always")
def finish(gates, ups, count, width, kind, bias, up_bias, add, out, stride):
    """out [count, width] = gates + bias + add, or act(gates + bias) * (ups + up_bias) + add with a `kind`.

    gates and ups float32 [count * width or more]; out and add, 0 for none, at addresses with rows `stride` bytes apart;
    bias, 0 for none, and up_bias [width] at addresses. `width` is a constant.
    """
    at, up_at = gates.ctypes.data, ups.ctypes.data
    if bias:
        for i in range(count):
            add_row(at + 4 * width * i, bias, width)
            if kind != NONE:
                add_row(up_at + 4 * width * i, up_bias, width)
    if kind != NONE:
        gate_sums(gates[: count * width], ups[: count * width], kind)
    for i in range(count):
        if add:
            add_row(at + 4 * width * i, add + i * stride, width)
        round_row(at + 4 * width * i, out + i * stride, width)


@intrinsic(prefer_literal=True)
def add_row(context, sums, other, count):
    """float32 [count] at `sums` += bfloat16 [count] at `other`; `count` is a constant multiple of 16."""
    width = count.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source = _pointers(builder, arguments)
        for first in range(0, width, LANES):
            wide = load_wide(builder, source, word(first), types.uint16)
            store(builder, target, word(first), builder.fadd(load(builder, target, word(first), FLOATS), wide))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, count), generate


@intrinsic(prefer_literal=True)
def round_row(context, sums, out, count):
    """bfloat16 [count] at `out` = float32 [count] at `sums`, rounded to nearest, ties to even."""
    width = count.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = _pointers(builder, arguments)
        for first in range(0, width, LANES):
            store_narrow(builder, target, word(first), load(builder, source, word(first), FLOATS), types.uint16)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, count), generate


def _pointers(builder: Any, arguments: Any) -> tuple[ir.Value, ir.Value]:
    """Floats at the first address, halves at the second."""
    return builder.inttoptr(arguments[0], FLOAT.as_pointer()), builder.inttoptr(arguments[1], I16.as_pointer())

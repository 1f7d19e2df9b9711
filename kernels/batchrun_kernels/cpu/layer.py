"""What a decoder layer does between its matrix products, one pass over memory each.

Half-precision arrays come as their bits (see scalar.py); all arithmetic is float32, rounded once on the way out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from batchrun_kernels.cpu.emit import FLOATS, LANES, load, load_wide, store, store_narrow, word
from batchrun_kernels.cpu.scalar import LOG2E, exp2, larger, narrow, widen

Array = np.ndarray

ARGMAX_BLOCK = 1024  # elements whose largest is looked for before its place is
LOWEST = np.float32(-126.0)  # exponents beyond 126 leave float32


@njit(inline="always", fastmath=True, error_model="numpy")
def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) in float32."""
    return np.float32(1.0) / (np.float32(1.0) + exp2(-larger(x * LOG2E, LOWEST)))


@njit(inline="always", fastmath=True, error_model="numpy")
def gated_silu(gate: Any, up: Any) -> Any:
    """silu(gate) * up in float32 (Shazeer 2020, SwiGLU)."""
    return gate * sigmoid(gate) * up


@njit(inline="always", fastmath=True, error_model="numpy")
def gated_gelu_tanh(gate: Any, up: Any) -> Any:
    """gelu(gate) * up in float32, with the tanh form of GELU (Hendrycks and Gimpel 2016)."""
    inner = np.float32(1.5957691216057308) * (gate + np.float32(0.044715) * gate * gate * gate)
    return gate * sigmoid(inner) * up


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """out [T, H] = x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich 2019); weight float32 [H]."""
    for t in range(x.shape[0]):
        row, target = x[t], out[t]
        total = np.float32(0.0)
        for i in range(row.shape[0]):
            value = widen(row[i])
            total += value * value
        scale = np.float32(1.0) / np.sqrt(total / np.float32(row.shape[0]) + np.float32(eps))
        for i in range(row.shape[0]):
            target[i] = narrow(widen(row[i]) * scale * weight[i], target[i])


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def silu_and_mul(x: Array, out: Array) -> None:
    """out [T, I] = silu(x[:, :I]) * x[:, I:] for x [T, 2 I]."""
    width = out.shape[1]
    for t in range(x.shape[0]):
        gate, up, target = x[t, :width], x[t, width:], out[t]
        for i in range(target.shape[0]):
            target[i] = narrow(gated_silu(widen(gate[i]), widen(up[i])), target[i])


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def gelu_tanh_and_mul(x: Array, out: Array) -> None:
    """out [T, I] = gelu(x[:, :I]) * x[:, I:] for x [T, 2 I]."""
    width = out.shape[1]
    for t in range(x.shape[0]):
        gate, up, target = x[t, :width], x[t, width:], out[t]
        for i in range(target.shape[0]):
            target[i] = narrow(gated_gelu_tanh(widen(gate[i]), widen(up[i])), target[i])


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def rotate(x: Array, cos: Array, sin: Array, norms: Array, eps: float) -> None:
    """RoPE in place on heads x [T, H, D], in the half-split form (Su et al. 2021), after an RMS norm if there is one.

    cos and sin [T, R]: the first R <= D dimensions of each head turn. norms float32 [H, D], or [0, 0] for none.
    """
    heads, dim = x.shape[1], x.shape[2]
    half = cos.shape[1] // 2
    buffer, turns = np.empty(dim, dtype=np.float32), np.empty((4, half), dtype=np.float32)
    for t in range(x.shape[0]):
        for part in range(2):
            _widen_row(cos[t, part * half : (part + 1) * half], turns[part])
            _widen_row(sin[t, part * half : (part + 1) * half], turns[2 + part])
        for h in range(heads):
            row = x[t, h]
            _widen_row(row, buffer)
            if norms.shape[0]:
                weight = norms[h]
                total = np.float32(0.0)
                for i in range(buffer.shape[0]):
                    total += buffer[i] * buffer[i]
                scale = np.float32(1.0) / np.sqrt(total / np.float32(dim) + np.float32(eps))
                for i in range(buffer.shape[0]):
                    buffer[i] *= scale * weight[i]
                for i in range(row.shape[0]):
                    row[i] = narrow(buffer[i], row[i])
            whole = half // LANES * LANES
            for i in range(0, whole, LANES):
                turn(buffer, turns, row, half, i)
            for i in range(whole, half):
                a, b = buffer[i], buffer[half + i]
                row[i] = narrow(a * turns[0, i] - b * turns[2, i], row[i])
                row[half + i] = narrow(b * turns[1, i] + a * turns[3, i], row[i])


@njit(inline="always", error_model="numpy")
def _widen_row(row, out):
    """out float32 = the elements of a row."""
    whole = out.shape[0] // LANES * LANES
    for i in range(0, whole, LANES):
        widen_lanes(row, out, i)
    for i in range(whole, out.shape[0]):
        out[i] = widen(row[i])


@intrinsic
def widen_lanes(context, row, out, at):
    """out[at : at + 16] = row[at : at + 16], widened to float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = _data(context, builder, signature, arguments)
        store(builder, target, arguments[2], load_wide(builder, source, arguments[2], row.dtype))
        return context.get_dummy_value()

    return types.void(row, out, types.intp), generate


@intrinsic
def turn(context, wide, turns, row, half, at):
    """Rotate 16 pairs of a head from `at` on: float32 in `wide`, rounded into `row`; turns float32 [4, half]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, angles, target = _data(context, builder, signature, arguments)
        half, low = arguments[3:]
        high = builder.add(half, low)
        a, b = (load(builder, source, place, FLOATS) for place in (low, high))
        rows = [builder.add(builder.mul(half, word(row)), low) for row in range(4)]
        cos_low, cos_high, sin_low, sin_high = (load(builder, angles, place, FLOATS) for place in rows)
        first = builder.fsub(builder.fmul(a, cos_low), builder.fmul(b, sin_low))
        second = builder.fadd(builder.fmul(b, cos_high), builder.fmul(a, sin_high))
        for place, value in ((low, first), (high, second)):
            store_narrow(builder, target, place, value, row.dtype)
        return context.get_dummy_value()

    return types.void(wide, turns, row, types.intp, types.intp), generate


def _data(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """Where the elements of the arrays among the arguments begin."""
    pairs = zip(signature.args, arguments, strict=True)
    return [context.make_array(kind)(context, builder, a).data for kind, a in pairs if isinstance(kind, types.Array)]


@njit(nogil=True, cache=True, error_model="numpy")  # masked logits are minus infinity, which fastmath rules out
def argmax_rows(x: Array, out: Array) -> None:
    """out int64 [T] = first place of the largest element in each row of x [T, V]."""
    for t in range(x.shape[0]):
        best, place = -np.float32(np.inf), 0
        for start in range(0, x.shape[1], ARGMAX_BLOCK):
            block = x[t, start : start + ARGMAX_BLOCK]
            largest = -np.float32(np.inf)
            for i in range(block.shape[0]):
                largest = larger(largest, widen(block[i]))
            if largest > best:
                best, place = largest, start
        line = x[t, place : place + ARGMAX_BLOCK]
        for i in range(line.shape[0]):
            if widen(line[i]) == best:
                place += i
                break
        out[t] = place

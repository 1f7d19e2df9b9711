"""What a decoder layer does between its matrix products, one pass over memory each.

Half-precision arrays come as their bits (see scalar.py); all arithmetic is float32, rounded once on the way out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

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
    buffer = np.empty(dim, dtype=np.float32)
    for t in range(x.shape[0]):
        c, s = cos[t], sin[t]
        for h in range(heads):
            row = x[t, h]
            for i in range(row.shape[0]):
                buffer[i] = widen(row[i])
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
            low, high = buffer[:half], buffer[half : 2 * half]
            first, second = row[:half], row[half : 2 * half]
            for i in range(first.shape[0]):
                first[i] = narrow(low[i] * widen(c[i]) - high[i] * widen(s[i]), first[i])
            for i in range(second.shape[0]):
                second[i] = narrow(high[i] * widen(c[half + i]) + low[i] * widen(s[half + i]), second[i])


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

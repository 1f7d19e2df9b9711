"""Runs every kernel of this folder in Triton's interpreter, on CPU tensors.

The variable is read when a function is decorated, so functions that were decorated earlier (another test imported
Triton first) are decorated again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction


def _interpret_again() -> None:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "batchrun_kernels" or name.startswith("triton.language"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, attribute, triton.jit(value.fn))


FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def _round_as_hardware() -> None:
    """The interpreter cuts fp32 to bf16 where hardware rounds to the nearest, and loses a carry on the way to fp8."""
    cast, convert = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def to_bf16(self: InterpreterBuilder, x: TensorHandle, to: tl.dtype) -> TensorHandle:
        if x.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, x, to)
        bits = torch.from_numpy(x.data.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(bits, tl.bfloat16)

    def to_fp8(self: InterpreterBuilder, x: TensorHandle, to: tl.dtype, rounding: object) -> TensorHandle:
        if x.dtype.scalar != tl.float32 or to.scalar not in FLOAT8:
            return convert(self, x, to, rounding)
        bits = torch.from_numpy(x.data.copy()).to(FLOAT8[to.scalar]).view(torch.uint8).numpy()
        return TensorHandle(bits, to.scalar)

    InterpreterBuilder.cast_impl = to_bf16
    InterpreterBuilder.create_fp_to_fp = to_fp8


def _wide(builder: InterpreterBuilder, x: TensorHandle) -> TensorHandle:
    return builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x


def _widen_bf16_dot() -> None:
    """The interpreter multiplies the bit patterns of bf16 operands as integers."""
    dot = InterpreterBuilder.create_dot

    def widened(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
        return dot(self, _wide(self, a), _wide(self, b), *rest)

    InterpreterBuilder.create_dot = widened


def _index_by_the_only_element() -> None:
    """Scalars are arrays of one element, of which NumPy 2.4 makes no loop's bound as Triton 3.6 asks it to."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type[tl.tensor], scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


_interpret_again()
_round_as_hardware()
_widen_bf16_dot()
_index_by_the_only_element()


@pytest.fixture(autouse=True)
def _interpreter() -> Iterator[None]:
    """Seeds the inputs, and lets fp32 overflow to infinity in silence as it does on a device."""
    torch.manual_seed(0)
    with np.errstate(over="ignore"):
        yield


@pytest.fixture
def sums_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that compare bits of rows: the library behind the interpreter's products sums a row in an order that
    may follow from its place in the tile (so it does on processors without AVX512), which float64 hides."""

    def dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: object) -> TensorHandle:
        product = np.matmul(*(_wide(self, x).data.astype(np.float64) for x in (a, b))).astype(np.float32)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)

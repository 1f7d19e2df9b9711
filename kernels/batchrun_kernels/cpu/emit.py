"""Small pieces of LLVM code that the kernels with instructions of their own are made of."""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, config

LANES = 16  # floats of a vector
LINE = 64  # bytes of a cache line

BYTE, I16, I32, I64, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def processor_has(feature: str) -> bool:
    """Whether code may be compiled for a feature of this processor, in LLVM's name for it."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES
    return bool(binding.get_host_cpu_features().get(feature, False))


def word(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def load(builder: Any, base: Any, at: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(base, [at]), kind.as_pointer()), align=1)


def store(builder: Any, base: Any, at: Any, value: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(base, [at]), value.type.as_pointer()), align=2)


def prefetch(builder: Any, pointer: Any, size: int) -> None:
    """Fetch `size` bytes from a pointer on into the second level of the cache."""
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), I32, I32, I32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    start = builder.bitcast(pointer, BYTE.as_pointer())
    read, level, data = (ir.Constant(I32, number) for number in (0, 2, 1))
    for offset in range(0, size, LINE):
        builder.call(fetch, [builder.gep(start, [word(offset)]), read, level, data])

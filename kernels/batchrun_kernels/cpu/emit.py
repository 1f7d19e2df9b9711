"""Small pieces of LLVM code that the kernels with instructions of their own are made of."""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

LANES = 16  # floats of a vector
LINE = 64  # bytes of a cache line

BYTE, I16, I32, I64, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, WORDS, HALVES = (ir.VectorType(kind, LANES) for kind in (FLOAT, I32, I16))


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


def pairs_at_full_rate() -> bool:
    """Whether a product of bfloat16 pairs (VDPBF16PS) is the fastest that vectors can do.

    AMD's Zen 4 does one in each cycle, 64 operations; Intel's Emerald Rapids one in two cycles, which is half of what
    its two float32 units do. A rule and not a measurement: the same processor must always round in the same way.
    """
    name = config.CPU_NAME or binding.get_host_cpu_name()
    return processor_has("avx512bf16") and name.startswith("znver")


def few_registers() -> bool:
    """Whether there are 16 vector registers of 8 floats (AVX2), and not 32 of 16 (AVX512): fewer sums stay in them."""
    return processor_has("avx2") and not processor_has("avx512f")


def word(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def load(builder: Any, base: Any, at: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(base, [at]), kind.as_pointer()), align=1)


def store(builder: Any, base: Any, at: Any, value: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(base, [at]), value.type.as_pointer()), align=2)


def load_wide(builder: Any, base: Any, at: Any, kind: Any) -> Any:
    """16 elements as float32; `kind` as `widen` of scalar.py takes them."""
    if kind == types.uint16:
        wide = builder.zext(load(builder, base, at, HALVES), WORDS)
        return builder.bitcast(builder.shl(wide, ir.Constant(WORDS, [16] * LANES)), FLOATS)
    if kind == types.int16:
        halves = ir.VectorType(ir.HalfType(), LANES)
        return builder.fpext(builder.bitcast(load(builder, base, at, HALVES), halves), FLOATS)
    return load(builder, base, at, FLOATS)


def store_narrow(builder: Any, base: Any, at: Any, value: Any, kind: Any) -> None:
    """Store 16 float32, rounded to nearest, ties to even, to elements of that kind."""
    if kind == types.uint16 and processor_has("avx512bf16"):
        value = builder.bitcast(builder.fptrunc(value, ir.VectorType(BFloat(), LANES)), HALVES)
    elif kind == types.uint16:
        value = _upper_halves(builder, value)
    elif kind == types.int16:
        value = builder.bitcast(builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)), HALVES)
    store(builder, base, at, value)


def _upper_halves(builder: Any, number: Any) -> Any:
    """16 float32 as bfloat16, in integers: without an instruction for it LLVM calls a function that is not there."""

    def same(value: int) -> ir.Constant:
        return ir.Constant(WORDS, [value] * LANES)

    bits = builder.bitcast(number, WORDS)
    odd = builder.and_(builder.lshr(bits, same(16)), same(1))
    rounded = builder.add(bits, builder.add(odd, same(0x7FFF)))
    quiet = builder.or_(bits, same(0x400000))
    kept = builder.select(builder.fcmp_unordered("uno", number, number), quiet, rounded)
    return builder.trunc(builder.lshr(kept, same(16)), HALVES)


def prefetch(builder: Any, pointer: Any, size: int) -> None:
    """Fetch `size` bytes from a pointer on into the second level of the cache."""
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), I32, I32, I32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    start = builder.bitcast(pointer, BYTE.as_pointer())
    read, level, data = (ir.Constant(I32, number) for number in (0, 2, 1))
    for offset in range(0, size, LINE):
        builder.call(fetch, [builder.gep(start, [word(offset)]), read, level, data])


def pointers(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """The arguments, arrays as pointers to their first elements."""
    return [
        context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, arguments, strict=True)
    ]


def splat(builder: Any, value: Any, kind: Any) -> Any:
    """A vector of one value."""
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, single, ir.Constant(WORDS, [0] * LANES))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of 16 float32, rounded once."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c])


def pointer_to(kind: Any) -> Any:
    """An intrinsic of numba that makes an address a pointer to elements of a type."""

    @intrinsic
    def pointer(context, address):
        """A pointer to elements of a type."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_data_type(kind).as_pointer())

        return types.CPointer(kind)(types.int64), generate

    return pointer

"""Intel's matrix unit (AMX) in compiled Python: tiles of bfloat16, sums in float32.

One instruction multiplies A [16 rows, 32 of K] with B [32 of K, 16 columns], held as 16 pairs of K, and adds to
C [16, 16] (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18). Two tiles of rows and
two of columns at once use each tile that is loaded twice, which takes all eight: C are 0 to 3, A 4 and 5, B 6 and 7.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from batchrun_kernels.cpu.emit import BYTE, I64, LINE, prefetch, processor_has, word

TILE = 16  # rows, and columns, and pairs of K
STEP = 32  # elements of K in a tile
ROWS = 2 * TILE  # of two tiles
COLUMNS = 2 * TILE
TILE_BYTES = TILE * LINE

A, B = (4, 5), (6, 7)

REQUEST_PERMISSION, TILE_DATA, SYSTEM_CALL = 0x1023, 18, 158  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)


@cache
def has_matrix_unit() -> bool:
    """Whether this processor has AMX for bfloat16, and the system lets this process use it."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        return False
    if not (processor_has("amx-bf16") and processor_has("avx512bf16")):
        return False
    return int(ctypes.CDLL(None).syscall(SYSTEM_CALL, REQUEST_PERMISSION, TILE_DATA)) == 0


@intrinsic
def load_shapes(context, shapes):
    """Set rows and bytes per row of the eight tiles from uint8 [64]; this empties them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call(builder, "ldtilecfg", context.make_array(shapes)(context, builder, arguments[0]).data)
        return context.get_dummy_value()

    return types.void(shapes), generate


@intrinsic
def release_tiles(context):
    """Give the unit's state back: every switch of threads would save and restore it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@njit(inline="always")
def set_shapes(upper, lower):
    """Begin: tiles of `upper` and `lower` rows, at most 16 each; `lower` may be 0 if no second tile is used."""
    shapes = np.zeros(64, dtype=np.uint8)
    shapes[0] = 1  # the only palette there is
    for tile in range(8):
        shapes[16 + 2 * tile] = LINE
        shapes[48 + tile] = upper
    shapes[48 + 6] = shapes[48 + 7] = TILE
    if lower:
        shapes[48 + 2] = shapes[48 + 3] = shapes[48 + 5] = lower
    load_shapes(shapes)  # not its address: numba would let the array go before it is read


@intrinsic(prefer_literal=True)
def multiply(context, a, lower, b, c, lower_c, strides, steps, ahead, lines, tiles):
    """float32 C [rows, 32] = A [rows, 32 steps] B, for a constant number of `tiles` of rows, 1 or 2.

    All but the last two are addresses, or strides in bytes (a, b, c); the second tile of rows begins at `lower` and
    `lower_c`. Meanwhile a constant number of cache `lines` in each step are fetched from `ahead`.
    """
    count, fetched = tiles.literal_value, lines.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, lower, b, c, lower_c, strides, steps, ahead = arguments[:8]
        a_stride, b_stride, c_stride = (builder.extract_value(strides, i) for i in range(3))

        def meanwhile(index: Any) -> None:
            size = LINE * fetched
            prefetch(builder, _pointer(builder, builder.add(ahead, builder.mul(index, word(size)))), size)

        rows = list(zip((a, lower), (c, lower_c), strict=True))[:count]
        tile_products(builder, rows, b, (a_stride, b_stride, c_stride), steps, meanwhile=meanwhile)
        return context.get_dummy_value()

    three = types.UniTuple(types.int64, 3)
    return types.void(*[types.int64] * 5, three, types.int64, types.int64, lines, tiles), generate


def tile_products(
    builder: Any,
    rows: list[tuple[Any, Any]],
    b: Any,
    strides: tuple[Any, Any, Any],
    steps: Any,
    accumulate: bool = False,
    meanwhile: Any = None,
) -> None:
    """Emit C [rows, 32] = A B over `steps` of 32 of K, or C += A B; `rows`: addresses of A and C of each tile."""
    a_stride, b_stride, c_stride = strides
    sums = {(a, c): 2 * a + c for a in range(len(rows)) for c in range(2)}
    for (a, c), tile in sums.items():
        if accumulate:
            _load(builder, tile, builder.add(rows[a][1], word(LINE * c)), c_stride)
        else:
            call(builder, "tilezero", _number(tile))
    before, loop, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    index.add_incoming(word(0), before)
    pairs = builder.add(b, builder.mul(index, builder.mul(b_stride, word(TILE))))
    for c, tile in enumerate(B):
        _load(builder, tile, builder.add(pairs, word(LINE * c)), b_stride)
    for tile, (start, _) in zip(A, rows, strict=False):
        _load(builder, tile, builder.add(start, builder.mul(index, word(LINE))), a_stride)
    if meanwhile is not None:
        meanwhile(index)
    for (a, c), tile in sums.items():
        call(builder, "tdpbf16ps", _number(tile), _number(A[a]), _number(B[c]))
    following = builder.add(index, word(1))
    index.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
    builder.position_at_end(after)
    for (a, c), tile in sums.items():
        place = _pointer(builder, builder.add(rows[a][1], word(LINE * c)))
        call(builder, "tilestored64", _number(tile), place, c_stride)


def panel_products(
    builder: Any,
    rows: Any,
    a: Any,
    b: Any,
    c: Any,
    strides: tuple[Any, Any, Any],
    columns: int,
    steps: int,
    accumulate: bool,
    ahead: Any,
) -> None:
    """Emit the same for up to 32 rows and a multiple of 32 columns; fetches as many bytes from `ahead` as B has.

    Memory of A and C is touched for 16 rows or for all 32.
    """
    few, many, end = (builder.append_basic_block(name) for name in ("few", "many", "end"))
    builder.cbranch(builder.icmp_signed("<=", rows, word(TILE)), few, many)
    for block, tiles in ((few, 1), (many, 2)):
        builder.position_at_end(block)
        for group in range(columns // COLUMNS):
            place = builder.add(c, word(2 * LINE * group))
            lower = builder.add(a, builder.mul(strides[0], word(TILE)))
            lower_place = builder.add(place, builder.mul(strides[2], word(TILE)))
            pairs = [(a, place), (lower, lower_place)][:tiles]
            coming = builder.add(ahead, word(2 * TILE_BYTES * steps * group))

            def meanwhile(index: Any, coming: Any = coming) -> None:
                start = builder.add(coming, builder.mul(index, word(2 * TILE_BYTES)))
                prefetch(builder, _pointer(builder, start), 2 * TILE_BYTES)

            w = builder.add(b, word(2 * LINE * group))
            tile_products(builder, pairs, w, strides, word(steps), accumulate, meanwhile)
        builder.branch(end)
    builder.position_at_end(end)


def call(builder: Any, name: str, *arguments: Any) -> None:
    """Emit an instruction of the unit; nothing on a processor without it.

    There LLVM stops the process at such an instruction, though it be in a branch that is never taken.
    """
    if not processor_has("amx-bf16"):
        return
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _load(builder: Any, tile: int, address: Any, stride: Any) -> None:
    call(builder, "tileloadd64", _number(tile), _pointer(builder, address), stride)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, BYTE.as_pointer())


def _number(tile: int) -> ir.Constant:
    return ir.Constant(BYTE, tile)

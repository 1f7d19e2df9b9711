"""Threads that share the work of one kernel call after another without going back to Python in between.

A step of a small model makes a hundred calls of tens of microseconds, so handing each to a thread pool costs more than
the second core brings, and OpenMP's barriers stand still when something else takes a core for a moment. Here a call is
cut into pieces that whoever is awake claims one by one: the caller alone can do all of them, and waits only for
pieces that another has begun. Followers spin for about a millisecond after the last piece, then sleep until they are
woken for the next step.
"""

from __future__ import annotations

import platform
import threading
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

I64 = ir.IntType(64)
# Places in the control block, an int64 array. Those that several threads write lie in cache lines of their own.
TICKET, DONE, STOP, FUNCTION, JOB = 0, 8, 16, 24, 32
CONTROL_WORDS = 64
# The ticket: calls so far | pieces of this call | next piece to claim, so that one atomic addition claims a piece of
# the call it belongs to, and of no later one.
PIECE_BITS = 20
PIECE_MASK = 2**PIECE_BITS - 1
MAX_PIECES = PIECE_MASK // 2
SPINS = 20_000  # looks at the ticket before a follower goes to sleep: about a millisecond


@intrinsic
def fetch_add(context, array, index, value):
    """Add `value` to array[index] atomically: the old number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(context.make_array(array)(context, builder, arguments[0]).data, [arguments[1]])
        return builder.atomic_rmw("add", place, arguments[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


@intrinsic
def load_acquire(context, array, index):
    """array[index], and after it whatever its writer wrote before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(context.make_array(array)(context, builder, arguments[0]).data, [arguments[1]])
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(array, types.intp), generate


@intrinsic
def store_release(context, array, index, value):
    """array[index] = value, seen only after all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(context.make_array(array)(context, builder, arguments[0]).data, [arguments[1]])
        builder.store_atomic(arguments[2], place, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), generate


@intrinsic
def relax(context):
    """Tell the processor that this is a waiting loop, where it can be told."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            nothing = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call_piece(context, address, control, piece):
    """Call the C function void f(int64_t *job, int64_t piece) at an address, with the job of the control block."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(control)(context, builder, arguments[1]).data
        job = builder.gep(data, [ir.Constant(I64, JOB)])
        kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer(), I64])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [job, arguments[2]])
        return context.get_dummy_value()

    return types.void(types.int64, control, types.int64), generate


@njit(nogil=True, cache=True)
def lead(control, address, pieces):
    """Have pieces [0, pieces) of the job in control[JOB:] done by f at `address`; returns when all are."""
    if pieces == 1:
        call_piece(address, control, 0)
        return
    control[FUNCTION] = address
    control[DONE] = 0
    calls = (control[TICKET] >> (2 * PIECE_BITS)) + 1
    store_release(control, TICKET, (calls << (2 * PIECE_BITS)) | (pieces << PIECE_BITS))
    while True:
        piece = fetch_add(control, TICKET, 1) & PIECE_MASK
        if piece >= pieces:
            break
        call_piece(address, control, piece)
        fetch_add(control, DONE, 1)
    while load_acquire(control, DONE) < pieces:
        relax()


@njit(nogil=True, cache=True)
def follow(control):
    """Take part in whatever is led, until nothing has been for a while or control[STOP] is set."""
    idle = 0
    while idle < SPINS and load_acquire(control, STOP) == 0:
        ticket = load_acquire(control, TICKET)
        if (ticket & PIECE_MASK) < ((ticket >> PIECE_BITS) & PIECE_MASK):
            ticket = fetch_add(control, TICKET, 1)
            piece, pieces = ticket & PIECE_MASK, (ticket >> PIECE_BITS) & PIECE_MASK
            if piece < pieces:
                call_piece(control[FUNCTION], control, piece)
                fetch_add(control, DONE, 1)
                idle = 0
                continue
        idle += 1
        relax()


class Team:
    """The caller and `threads` - 1 followers. Led by one thread at a time."""

    def __init__(self, threads: int) -> None:
        self.control = np.zeros(CONTROL_WORDS, dtype=np.int64)
        self.threads = threads
        self._awake = [threading.Event() for _ in range(threads - 1)]
        for number, awake in enumerate(self._awake):
            threading.Thread(target=_serve, args=(self.control, awake), name=f"team-{number}", daemon=True).start()

    def wake(self) -> None:
        """Before a run of calls: let the followers look for work."""
        for awake in self._awake:
            awake.set()

    def close(self) -> None:
        self.control[STOP] = 1
        self.wake()


@lru_cache
def team(threads: int) -> Team:
    """The team of this process for so many threads."""
    return Team(threads)


def _serve(control: np.ndarray, awake: threading.Event) -> None:
    while not control[STOP]:
        awake.wait()
        awake.clear()
        follow(control)

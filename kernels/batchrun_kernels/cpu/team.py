"""Threads that share the work of one kernel call after another without going back to Python in between.

A step of a small model makes a hundred calls of tens of microseconds, so handing each to a thread pool costs more than
the second core brings, and OpenMP's barriers stand still when something else takes a core for a moment. Here a call is
cut into pieces that whoever is awake claims one by one: the caller alone can do all of them, and waits only for
pieces that another has begun. Followers spin as long as the leader is in such a call, since it may be at a long piece
of its own, and some milliseconds longer, then sleep until they are woken for the next one. torch should have one
thread: two sets of spinning threads stand in each other's way.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Places in the control block, an int64 array. Those that several threads write lie in cache lines of their own.
TICKET, DONE, STOP, THREADS, LEADING, JOB = 0, 8, 16, 17, 18, 24
CONTROL_WORDS = 64
# The ticket: calls so far | pieces of this call | next piece to claim, so that one atomic addition claims a piece of
# the call it belongs to, and of no later one.
PIECE_BITS = 20
PIECE_MASK = 2**PIECE_BITS - 1
SPINS = 60_000  # looks at the ticket outside of calls before a follower goes to sleep: some milliseconds


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


@njit(inline="always")
def publish(control, pieces):
    """Let followers see the job in control[JOB:], to be done in so many pieces."""
    control[DONE] = 0
    calls = (control[TICKET] >> (2 * PIECE_BITS)) + 1
    store_release(control, TICKET, (calls << (2 * PIECE_BITS)) | (pieces << PIECE_BITS))


@njit(inline="always")
def claim(control):
    """The next piece of the job that there is, or -1."""
    ticket = load_acquire(control, TICKET)
    if (ticket & PIECE_MASK) >= ((ticket >> PIECE_BITS) & PIECE_MASK):
        return -1
    ticket = fetch_add(control, TICKET, 1)
    piece = ticket & PIECE_MASK
    return piece if piece < ((ticket >> PIECE_BITS) & PIECE_MASK) else -1


@njit(inline="always")
def wait_for(control, pieces):
    """Until all pieces are done."""
    while load_acquire(control, DONE) < pieces:
        relax()


class Team:
    """The caller and `threads` - 1 followers, which run `follow(control)` when woken. Led by one thread at a time."""

    def __init__(self, threads: int, follow: Callable[[np.ndarray], None]) -> None:
        self.control = np.zeros(CONTROL_WORDS, dtype=np.int64)
        self.control[THREADS] = threads
        self.threads = threads
        self._awake = [threading.Event() for _ in range(threads - 1)]
        for number, awake in enumerate(self._awake):
            arguments = (self.control, awake, follow)
            threading.Thread(target=_serve, args=arguments, name=f"team-{number}", daemon=True).start()

    def wake(self) -> None:
        """Before a run of calls: let the followers look for work."""
        for awake in self._awake:
            awake.set()

    def close(self) -> None:
        """Let the followers end."""
        self.control[STOP] = 1
        self.wake()


def _serve(control: np.ndarray, awake: threading.Event, follow: Callable[[np.ndarray], None]) -> None:
    while not control[STOP]:
        awake.wait()
        awake.clear()
        follow(control)

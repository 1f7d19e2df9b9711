"""A thread that owns an engine: it takes orders, makes steps, and hands out what comes of them.

Callers may be any threads, so several streams share one batch, and an interrupt of the main thread never cuts a step
in two. Only this thread touches the engine while there are requests under way. It makes no step for others than those,
and handing out what has come of the last is the last that it does: from there on the engine may be used directly.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from batchrun.engine.deltas import Piece
from batchrun.engine.encoder import Encoder
from batchrun.engine.engine import Engine
from batchrun.engine.params import Completion, Request
from batchrun.engine.pool import EnginePool
from batchrun.errors import BatchrunError

T = TypeVar("T")
Event = Completion | Piece | Exception  # after the last one nothing more will come
Outbox = Callable[[list[Event]], None]

# An idle engine waits for so long after each order, and so long in all, for more to begin with: the first rows
# of a stream come one by one, and are to be planned together.
LINGER_S = 0.002
MAX_LINGER_S = 0.25


class Driver:
    """Requests get numbers, which are their keys in the engine and in what comes back.

    Every method may be called from any thread, and raises BatchrunError if the engine has ended.
    """

    def __init__(self, engine: Engine | Encoder | EnginePool) -> None:
        self.engine = engine
        self.ended: BatchrunError | None = None  # why no more orders are taken
        self._orders: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._outboxes: dict[Hashable, Outbox] = {}
        self._wake: Callable[[], None] = engine.wake
        # A daemon, for it waits for orders without end. Native code does not survive to be cut off when the interpreter
        # ends, so it is closed before, and before the pool's own clean-up.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        _drivers.add(self)

    def next_number(self) -> int:
        """A number for a request to submit."""
        return next(self._numbers)

    def submit(self, request: Request, outbox: Outbox) -> None:
        """Queue a request whose key is a number of this driver. `outbox` is called in the driver's thread."""
        self._order(lambda: self._add(request, outbox))

    def stop(self, number: Hashable) -> None:
        """End a request with the tokens it has by then; its completion comes as for any other."""
        self._order(lambda: self._stop(number))

    def abort(self, numbers: Iterable[Hashable], *, tell: bool = False, wait: bool = True) -> None:
        """Forget requests and free their blocks; with `wait`, before this returns.

        With `tell`, each that was there gets a completion with finish_reason "abort". Those that have ended are
        ignored, and so is an engine that has.
        """
        chosen = list(numbers)
        with suppress(BatchrunError):
            if wait and threading.current_thread() is not self._thread:
                self.ask(lambda: self._abort(chosen, tell))
            else:  # garbage collection may close a stream in the middle of a step
                self._order(lambda: self._abort(chosen, tell))

    def ask(self, order: Callable[[], T]) -> T:
        """Have something done between two steps, and wait for what comes of it. Raises what `order` raises."""
        answer: Future[T] = Future()

        def carry_out() -> None:
            try:
                if self.ended is not None:
                    raise self.ended
                answer.set_result(order())
            except BaseException as error:
                answer.set_exception(error)

        self._order(carry_out)
        return answer.result()

    def close(self) -> None:
        """End the engine after the step that is under way. Streams that are not at their end get an error.

        Raises what the engine's own close does; a second call does nothing.
        """
        atexit.unregister(self.close)
        if threading.current_thread() is self._thread:
            self._order(self._shut)
            return
        if self.ended is None:
            try:
                self.ask(self._shut)
            except BatchrunError as error:
                if error is not self.ended:  # else another thread was first
                    raise
        self._thread.join()

    def _order(self, order: Callable[[], object]) -> None:
        self._orders.put(order)
        if self.ended is not None:
            self._obey(wait=False)
        else:
            self._wake()

    def _run(self) -> None:
        engine = self.engine
        try:
            while self.ended is None:
                self._obey(wait=not self._has_work())
                if self._has_work():
                    finished, pieces = engine.step(), engine.take_pieces()
                    engine.take_steps()  # nobody here reads them, and an endless stream must not keep them
                    self._deliver(finished, pieces)
        except BaseException as error:
            # It may have been anywhere in a step: what it holds is not known any more.
            failure = BatchrunError(
                f"the engine has failed, and this LLM with it: {str(error) or type(error).__name__}"
            )
            failure.__cause__ = error
            self._end(failure)
            with suppress(BatchrunError):
                engine.close()
        self._wake = _nothing
        del self.engine  # so that its memory is free again, whoever keeps the driver
        self._obey(wait=False)

    def _has_work(self) -> bool:
        """Whether the engine has any for those who asked here."""
        return bool(self._outboxes) and self.engine.has_work()

    def _obey(self, wait: bool) -> None:
        """Carry out the orders there are; with `wait`, at least one, and those that follow it closely."""
        deadline = time.monotonic() + MAX_LINGER_S if wait else 0.0
        with suppress(queue.Empty):
            self._orders.get(block=wait)()
            while self.ended is None or not wait:
                linger = wait and time.monotonic() < deadline
                self._orders.get(block=linger, timeout=LINGER_S)()

    def _add(self, request: Request, outbox: Outbox) -> None:
        if self.ended is not None:
            outbox([self.ended])
            return
        self._outboxes[request.key] = outbox
        try:
            self.engine.add(request)
        except Exception as error:
            del self._outboxes[request.key]
            outbox([error])

    def _stop(self, number: Hashable) -> None:
        if self.ended is None and (completion := self.engine.stop(number)) is not None:
            self._deliver([completion], self.engine.take_pieces())

    def _abort(self, numbers: list[Hashable], tell: bool) -> None:
        for number in numbers:
            outbox = self._outboxes.pop(number, None)
            if outbox is not None:
                self.engine.abort(number)
                if tell:
                    outbox([Completion(number, "", [], "abort")])

    def _deliver(self, completions: Sequence[Completion], pieces: Sequence[Piece]) -> None:
        """What a step brought to those who asked for it, one call for each; a row's pieces before its completion."""
        events: dict[Outbox, list[Event]] = defaultdict(list)
        for piece in pieces:
            if piece.key in self._outboxes:
                events[self._outboxes[piece.key]].append(piece)
        for completion in completions:
            if completion.key in self._outboxes:
                events[self._outboxes.pop(completion.key)].append(completion)
        for outbox, news in events.items():
            outbox(news)

    def _shut(self) -> None:
        if self.ended is None:
            self._end(BatchrunError("this LLM is closed: make a new one"))
            self.engine.close()

    def leave_to_parent(self) -> None:
        """In a fork of the process: there is no thread here that would obey, and the engine is not this process's."""
        atexit.unregister(self.close)
        self._orders = queue.SimpleQueue()
        self._wake = _nothing
        self._outboxes.clear()
        self.ended = BatchrunError(
            "this process is a fork of the one that made the LLM, whose engine stays there: make the LLM in the "
            "process that uses it, or start processes with multiprocessing's spawn"
        )

    def _end(self, why: BatchrunError) -> None:
        self.ended = why
        for outbox in set(self._outboxes.values()):
            outbox([why])
        self._outboxes.clear()


def _nothing() -> None:
    pass


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


def _after_fork() -> None:
    for driver in list(_drivers):
        driver.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)

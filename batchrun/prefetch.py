"""Run an iterator ahead of its consumer, in a thread, by a bounded number of items."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
_END: Any = object()


def prefetch(items: Iterable[T], ahead: int) -> Generator[T, None, None]:
    """The same items in the same order, with up to `ahead` of them ready before they are asked for.

    An exception of `items` is raised here, in its place. Closing the generator stops the thread.
    """
    ready: queue.Queue[Any] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(item: Any) -> bool:
        while not stopped.is_set() and threading.main_thread().is_alive():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            if all(put((item, None)) for item in items):
                put((_END, None))
        except BaseException as error:
            put((_END, error))

    # No daemon: those are cut off when the interpreter ends, which native code does not survive.
    thread = threading.Thread(target=produce, name="prefetch")
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
        thread.join()

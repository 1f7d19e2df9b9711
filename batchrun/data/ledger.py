"""Which chunks of a worker's share have their part, and that this run has seen each of them whole."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from batchrun.data.disk import explained
from batchrun.data.plan import Chunk, Plan
from batchrun.data.store import Store
from batchrun.errors import BatchrunError

THREADS = 4
SHOWN_PARTS = 3


class Ledger:
    """The share `own` of a plan, as one listing of the folder shows it.

    The names of parts are trusted to begin with; footers are read by `checking`, in threads, so that neither many
    chunks nor a slow disk hold up the start. `missing` are the chunks without a part, `present` those with one.
    """

    def __init__(self, store: Store, plan: Plan, own: np.ndarray) -> None:
        self.store = store
        self.plan = plan
        self.own = own
        # Size and time of modification of each chunk's part when this run last saw it whole; 0, 0 before.
        self._seen = np.zeros((plan.num_chunks, 2), dtype=np.int64)
        there = np.zeros(plan.num_chunks, dtype=bool)
        for entry in store.entries():
            number = plan.number(entry.name)
            if number is not None:
                there[number] = True
        self.present = own[there[own]]
        self.missing = own[~there[own]]
        self._broken: list[int] = []
        self._queue: Iterator[int] = iter(())
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    @contextmanager
    def checking(self, look: Callable[[Chunk], bool] | None = None) -> Iterator[None]:
        """Read the footers of the present parts in threads, from here on until they are through or the block ends.

        `look` is called for each whole part and may ask, by True, for it to be counted as broken.
        """
        self._queue = iter(self.present.tolist())
        workers = min(THREADS, len(self.present))
        # No daemons: those are cut off when the interpreter ends, which native code does not survive.
        self._threads = [threading.Thread(target=self._check, args=(look,), name="ledger") for _ in range(workers)]
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            for thread in self._threads:
                thread.join()

    def broken(self, timeout: float | None = None) -> np.ndarray | None:
        """Chunks whose part was found to be broken, or None if that is not known within `timeout` seconds.

        Raises what a check raised: FingerprintMismatch for a part that is not this job's.
        """
        until = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
            if self._error is not None:
                raise self._error
            if thread.is_alive():
                return None
        return np.array(sorted(self._broken), dtype=np.int64)

    def owns(self, part: str) -> bool:
        """Whether the part of this name belongs to a chunk of the share."""
        number = self.plan.number(part)
        at = np.searchsorted(self.own, -1 if number is None else number)
        return bool(at < len(self.own) and self.own[at] == number)

    def note(self, chunk: Chunk) -> None:
        """The chunk's part was just put in place, checked."""
        self._see(int(self.plan.first[chunk.file]) + chunk.index, self._stamp(chunk))

    def check_complete(self, numbers: np.ndarray) -> None:
        """Raise BatchrunError unless each of these chunks has a part that is the very file this run saw whole.

        Parts that someone has touched since are checked again.
        """
        wanted = np.zeros(self.plan.num_chunks, dtype=bool)
        wanted[numbers] = True
        for entry in self.store.entries():
            number = self.plan.number(entry.name)
            if number is None or not wanted[number]:
                continue
            stat = entry.stat()
            same = (stat.st_size, stat.st_mtime_ns) == tuple(self._seen[number].tolist())
            wanted[number] = not (same or self._whole(self.plan.chunk(number)))
        if bad := [self.plan.chunk(number).part for number in np.flatnonzero(wanted)[:SHOWN_PARTS].tolist()]:
            raise BatchrunError(
                f"{int(wanted.sum())} parts of {self.store.folder} are gone or broken at the end of the run "
                f"({', '.join(bad)}): something else changed the folder. The same command makes them again"
            )

    def _check(self, look: Callable[[Chunk], bool] | None) -> None:
        try:
            while not self._stopped.is_set() and threading.main_thread().is_alive():
                with self._lock:
                    numbers = list(itertools.islice(self._queue, 16))
                if not numbers:
                    return
                for number in numbers:
                    chunk = self.plan.chunk(number)
                    with explained(self.store.folder / chunk.part):
                        stamp = self._stamp(chunk)
                    if not self._whole(chunk) or (look is not None and look(chunk)):
                        self._broken.append(number)
                    else:
                        self._see(number, stamp)
        except BaseException as error:
            self._error = error

    def _whole(self, chunk: Chunk) -> bool:
        return self.store.finished(chunk, self.plan.files[chunk.file].name)

    def _see(self, number: int, stamp: tuple[int, int]) -> None:
        self._seen[number] = stamp

    def _stamp(self, chunk: Chunk) -> tuple[int, int]:
        try:
            stat = os.stat(self.store.folder / chunk.part)
        except FileNotFoundError:
            return 0, 0
        return stat.st_size, stat.st_mtime_ns

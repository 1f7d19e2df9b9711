"""One caller's requests on their way through a driver's engine, never more of them than a window holds."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from batchrun.engine.deltas import Piece
from batchrun.engine.driver import Driver, Event, Outbox
from batchrun.engine.params import Completion, Delta, Request

StopWhen = Callable[[str], bool]


@dataclass(slots=True)
class _Row:
    key: Hashable
    shown: int = 0  # characters of its text that have come
    told: int = 0  # tokens
    parts: list[str] = field(default_factory=list)  # the text that has come, for `stop_when`
    stopped: bool = False


class Stream:
    """What is under way for one caller, in whose thread all of this runs; only `abort` may be called from others.

    With `deltas`, rows come as deltas, else as completions. `stop_when` is asked about the text of each row whenever it
    has grown; a row for which it says yes ends there. `owner` closes the driver when it goes, and so has to stay as
    long as this.
    """

    def __init__(
        self,
        driver: Driver,
        window: int,
        deltas: bool = False,
        stop_when: StopWhen | None = None,
        owner: object = None,
    ) -> None:
        self._driver = driver
        self._window = window
        self._deltas = deltas
        self._stop_when = stop_when
        self._owner = owner
        self._rows: dict[Hashable, _Row] = {}  # by number
        self._keys: set[Hashable] = set()

    def abort(self, key: Hashable) -> None:
        """Forget a request by the caller's key; its completion says so."""
        self._driver.abort([number for number, row in list(self._rows.items()) if row.key == key], tell=True)

    def run(self, requests: Iterable[Request]) -> Generator[Completion | Delta, None, None]:
        """Send the requests as there is room, and yield what comes. What is under way when this ends is forgotten."""
        source, more = iter(requests), True
        inbox: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        ready: deque[Event] = deque()
        try:
            while True:
                if more and len(self._rows) < self._window:
                    request = next(source, None)
                    if request is None:
                        more = False
                    else:
                        self._send(request, inbox.put)
                    if not ready and inbox.empty():
                        continue
                if not ready:
                    if not self._rows:
                        return
                    ready.extend(inbox.get())
                item = self._take(ready.popleft())
                if item is not None:
                    yield item
        finally:
            self._close(wait=True)

    async def run_async(self, requests: AsyncIterator[Request]) -> AsyncGenerator[Completion | Delta, None]:
        """The same for asyncio. A completion that the caller has not yet taken fills its place in the window."""
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(self._window)
        inbox: asyncio.Queue[list[Event]] = asyncio.Queue()

        def outbox(events: list[Event]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(inbox.put_nowait, events)

        async def feed() -> None:
            try:
                while True:
                    await room.acquire()
                    self._send(await anext(requests), outbox)
            except StopAsyncIteration:
                inbox.put_nowait([])
            except Exception as error:
                inbox.put_nowait([error])

        feeder, more = asyncio.create_task(feed()), True
        try:
            while more or self._rows:
                events = await inbox.get()
                more = more and bool(events)
                for event in events:
                    item = self._take(event)
                    if item is not None:
                        yield item
                    if isinstance(event, Completion):
                        room.release()
        finally:
            feeder.cancel()
            self._close(wait=False)

    def _send(self, request: Request, outbox: Outbox) -> None:
        if request.key in self._keys:
            raise ValueError(f"request key {request.key!r} is already in the stream")
        number = self._driver.next_number()
        self._rows[number] = _Row(request.key)
        self._keys.add(request.key)
        wanted = self._deltas or self._stop_when is not None
        self._driver.submit(replace(request, key=number, deltas=wanted), outbox)

    def _take(self, event: Event) -> Completion | Delta | None:
        if isinstance(event, Exception):
            raise event.with_traceback(None)
        return self._grow(event) if isinstance(event, Piece) else self._finish(event)

    def _close(self, *, wait: bool) -> None:
        if self._rows:
            self._driver.abort(self._rows, wait=wait)
        self._rows.clear()

    def _grow(self, piece: Piece) -> Delta | None:
        row = self._rows[piece.key]
        if row.stopped or piece.first_token + len(piece.token_ids) <= row.told:
            return None
        delta = Delta(
            row.key, piece.text[row.shown - piece.first_char :], piece.token_ids[row.told - piece.first_token :]
        )
        row.shown += len(delta.text)
        row.told += len(delta.token_ids)
        if self._stop_when is not None:
            row.parts.append(delta.text)
            row.stopped = bool(self._stop_when("".join(row.parts)))
            if row.stopped:
                self._driver.stop(piece.key)
        return delta if self._deltas else None

    def _finish(self, completion: Completion) -> Completion | Delta:
        row = self._rows.pop(completion.key)
        self._keys.discard(row.key)
        completion.key = row.key
        if row.stopped and completion.finish_reason not in ("abort", "error"):
            completion = completion.cut("".join(row.parts), row.told, "stop_when")
        if not self._deltas:
            return completion
        return Delta(row.key, completion.text[row.shown :], completion.token_ids[row.told :], completion)

"""N engine processes behind the door of one: the same add, step, abort, room and has_work as Engine.

On a CPU processes of one or two threads need few or no barriers between threads, which for small models cost
more than they bring; on several GPUs it is one process per device. There are no collectives: workers never wait
for each other, and the rows of one that dies go to the rest.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import queue
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from batchrun.config import EngineConfig
from batchrun.engine.checkpoint import Checkpoint
from batchrun.engine.deltas import Piece
from batchrun.engine.encoder import WINDOW
from batchrun.engine.params import Completion, Request
from batchrun.engine.pooler import Pooler
from batchrun.engine.stats import StepStats
from batchrun.engine.worker import Answer, Placement, serve
from batchrun.errors import BatchrunError

log = logging.getLogger(__name__)

PATIENCE_S = 0.2  # a step waits so long for news before it lets its caller look after other things
AFFINITY_TOKENS = 64  # prompts that begin with the same tokens go to the same worker ...
SLACK_TOKENS = 1024  # ... unless it has this many more tokens to do than the least busy one, which then has them too
REMEMBERED_PREFIXES = 65_536
QUEUED_SHARE = 0.25  # of its slots that a worker holds in waiting, so that it refills without asking
MAX_DEATHS = 2  # a request that was in so many workers when they died is not given to another


@dataclass(slots=True, eq=False)
class Worker:
    """One engine process, as its owner sees it."""

    number: int
    process: Any
    connection: Connection
    flying: dict[Hashable, Request] = field(default_factory=dict)
    load: int = 0  # tokens of the requests that fly


class EnginePool:
    """Requests are routed by prefix and load. Raises BatchrunError when every worker is dead."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        placements: Sequence[Placement],
        pooler: Pooler | None = None,
    ) -> None:
        self._waiting: deque[Request] = deque()
        self._owners: dict[bytes, list[Worker]] = {}
        self._deaths: dict[Hashable, int] = {}
        self._steps: list[StepStats] = []
        self._pieces: list[Piece] = []
        self._num_added = 0
        self._failed: list[Completion] = []
        self._news: queue.SimpleQueue[tuple[Worker, Answer | None] | None] = queue.SimpleQueue()
        share = replace(
            config,
            workers="1",
            num_blocks=config.num_blocks and max(2, config.num_blocks // len(placements)),
            kv_cache_gib=config.kv_cache_gib and config.kv_cache_gib / len(placements),
            max_num_seqs=-(-config.max_num_seqs // len(placements)),
        )
        queued = QUEUED_SHARE if pooler is None else WINDOW
        self._limit = share.max_num_seqs + max(1, int(queued * share.max_num_seqs))
        self._capacity = config.max_num_seqs
        context = multiprocessing.get_context("spawn")
        self._workers: list[Worker] = []
        for number, placement in enumerate(placements):
            here, there = context.Pipe()
            process = context.Process(
                target=serve,
                args=(there, checkpoint, share, placement, len(placements), pooler),
                name=f"engine-{number}",
                daemon=True,
            )
            process.start()
            there.close()
            self._workers.append(Worker(number, process, here))
        # Workers ignore SIGTERM, which may be meant to drain the whole job, and multiprocessing's own exit sends that
        # and waits: a pool that nobody closed would keep its process from ending.
        self._pid = os.getpid()
        atexit.register(self._kill)
        for worker in self._workers:
            self._await_start(worker)
        for worker in self._workers:
            threading.Thread(target=self._listen, args=(worker,), name=f"engine-{worker.number}", daemon=True).start()

    def add(self, request: Request) -> None:
        """Queue a request; its prompt ids travel as an array."""
        self._num_added += 1
        params = request.params
        if params.seed is None:  # as a single engine numbers them, and the same for another worker after a death
            params = replace(params, seed=self._num_added)
        self._waiting.append(replace(request, prompt_ids=np.asarray(request.prompt_ids, dtype=np.int64), params=params))

    def abort(self, key: Hashable) -> None:
        """Forget a request and free its blocks; an unknown or finished key is ignored."""
        self._waiting = deque(request for request in self._waiting if request.key != key)
        for worker in self._workers:
            if key in worker.flying:
                self._settle(worker, key)
                self._send(worker, "abort", key)

    def stop(self, key: Hashable) -> None:
        """End a request with the tokens it has. Its completion comes from a step."""
        for worker in self._workers:
            if key in worker.flying:
                self._send(worker, "stop", key)

    def drop_waiting(self) -> list[Hashable]:
        """Forget every request that no worker has begun; returns the keys that never left here."""
        keys = [request.key for request in self._waiting]
        self._waiting.clear()
        for worker in self._workers:
            self._send(worker, "drop", None)
        return keys

    @property
    def room(self) -> int:
        """Requests worth adding: enough wait so that no worker runs short, and no more are held."""
        return max(0, self._capacity - len(self._waiting))

    def has_work(self) -> bool:
        return bool(self._waiting or self._failed) or any(worker.flying for worker in self._workers)

    def step(self) -> list[Completion]:
        """Hand out what waits, and take what has been finished since."""
        self._dispatch()
        finished, self._failed = self._failed, []
        with suppress(queue.Empty):
            news = self._news.get(timeout=0 if finished else PATIENCE_S)
            while True:
                if news is not None:
                    finished += self._take(*news)
                news = self._news.get_nowait()
        return finished

    def wake(self) -> None:
        """Let a step that waits for news return. May be called from any thread."""
        self._news.put(None)

    def take_pieces(self) -> list[Piece]:
        """What the requests with `deltas` have come to since the last call, in order for each."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take_steps(self) -> list[StepStats]:
        """Statistics of the workers' steps since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def check_integrity(self) -> None:
        """Raise AssertionError unless the loads add up. The workers check their own caches when they are closed."""
        for worker in self._workers:
            assert worker.load == sum(map(_cost, worker.flying.values())), f"worker {worker.number}: wrong load"

    def close(self) -> None:
        """End the workers. Raises BatchrunError if one found its KV cache inconsistent."""
        atexit.unregister(self._kill)
        for worker in self._workers:
            self._send(worker, "close", None)
        for worker in list(self._workers):
            worker.process.join(timeout=10)
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
            elif worker.process.exitcode:
                self._workers = []
                raise BatchrunError(f"engine worker {worker.number} ended with code {worker.process.exitcode}")
            worker.connection.close()
        self._workers = []

    def _dispatch(self) -> None:
        """Give the waiting requests to workers with room, in order."""
        while self._waiting:
            free = [worker for worker in self._workers if len(worker.flying) < self._limit]
            if not free:
                return
            batches: dict[int, list[Request]] = {}
            for _ in range(min(len(self._waiting), sum(self._limit - len(worker.flying) for worker in free))):
                request = self._waiting[0]
                worker = self._route(request, [worker for worker in free if len(worker.flying) < self._limit])
                self._waiting.popleft()
                worker.flying[request.key] = request
                worker.load += _cost(request)
                batches.setdefault(worker.number, []).append(request)
            for worker in free:
                if worker.number in batches:
                    self._send(worker, "add", batches[worker.number])

    def _route(self, request: Request, free: list[Worker]) -> Worker:
        prefix = np.asarray(request.prompt_ids[:AFFINITY_TOKENS], dtype=np.int64).tobytes()
        least = min(free, key=lambda worker: worker.load)
        owners = self._owners.get(prefix, [])
        known = [worker for worker in owners if worker in free]
        if known and (best := min(known, key=lambda worker: worker.load)).load <= least.load + SLACK_TOKENS:
            return best
        if not owners:
            if len(self._owners) >= REMEMBERED_PREFIXES:
                self._owners.clear()
            self._owners[prefix] = owners
        if least not in owners:
            owners.append(least)
        return least

    def _listen(self, worker: Worker) -> None:
        """Take a worker's answers as they come, in a thread: while this side and the worker both waited to send, with
        full pipes, neither would read."""
        with suppress(EOFError, OSError):
            while True:
                self._news.put((worker, worker.connection.recv()))
        self._news.put((worker, None))

    def _take(self, worker: Worker, answer: Answer | None) -> list[Completion]:
        if answer is None:
            self._bury(worker)
            return []
        self._steps += answer.steps
        self._pieces += answer.pieces
        for key in answer.dropped:
            self._settle(worker, key)
        return [done for done in answer.completions if self._settle(worker, done.key)]

    def _settle(self, worker: Worker, key: Hashable) -> bool:
        """A request has left the worker; False for one that was aborted meanwhile."""
        request = worker.flying.pop(key, None)
        if request is None:
            return False
        worker.load -= _cost(request)
        self._deaths.pop(key, None)
        return True

    def _bury(self, worker: Worker) -> None:
        """A worker is dead: its requests go to the others, save those that were in too many deaths."""
        worker.process.join(timeout=5)
        self._workers.remove(worker)
        for owners in self._owners.values():
            if worker in owners:
                owners.remove(worker)
        code = worker.process.exitcode
        if not self._workers:
            raise BatchrunError(
                f"every engine worker is dead, the last one with exit code {code}: finished rows are kept; "
                "if the system killed it for memory, lower engine.kv_cache_gib or engine.workers"
            )
        log.warning(
            "engine worker %d died (exit code %s); its %d rows go to the other %d",
            worker.number, code, len(worker.flying), len(self._workers),
        )  # fmt: skip
        for request in reversed(worker.flying.values()):
            deaths = self._deaths[request.key] = self._deaths.get(request.key, 0) + 1
            if deaths < MAX_DEATHS:
                self._waiting.appendleft(request)
            else:
                why = f"{deaths} engine workers died while they had this row"
                self._failed.append(Completion(request.key, "", [], "error", error_type="engine_error", error=why))

    def _send(self, worker: Worker, order: str, what: Any) -> None:
        with suppress(OSError):  # its death is noticed where its answers are read
            worker.connection.send((order, what))

    def _await_start(self, worker: Worker) -> None:
        """Wait until the model is loaded, and pass on why it could not be."""
        try:
            failure = worker.connection.recv()
        except EOFError:
            worker.process.join(timeout=5)
            failure = BatchrunError(
                f"engine worker {worker.number} died at its start with code {worker.process.exitcode}"
            )
        if failure is not None:
            self._kill()
            raise failure

    def _kill(self) -> None:
        if os.getpid() != self._pid:  # a fork of the process: the workers are its parent's
            return
        for worker in self._workers:
            worker.process.kill()


def _cost(request: Request) -> int:
    """Tokens to compute, as far as they can be known; those of a prompt go through the model together."""
    if request.continuations:
        return (len(request.prompt_ids) + sum(map(len, request.continuations))) // 4
    return len(request.prompt_ids) // 4 + request.params.max_tokens

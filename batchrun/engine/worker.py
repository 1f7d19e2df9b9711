"""One engine process of a pool: where it runs, and what it does with the orders it is sent."""

from __future__ import annotations

import os
import signal
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from batchrun.config import EngineConfig
from batchrun.engine.checkpoint import Checkpoint, load_tokenizer
from batchrun.engine.deltas import Piece
from batchrun.engine.encoder import Encoder
from batchrun.engine.engine import Engine
from batchrun.engine.layer_calls import settings_allow
from batchrun.engine.model import choose_device, choose_dtype
from batchrun.engine.params import Completion
from batchrun.engine.pooler import Pooler
from batchrun.engine.stats import StepStats
from batchrun.errors import BatchrunError, ConfigError

SMALL_MODEL_BYTES = 2**31
ROWS_PER_THREAD = 48
PER_CORE = 4  # processes, or threads, beyond which a typing error is likelier than a reason
TEAM_THREADS = 2  # of compiled layers: with two, an engine was faster than two engines; more were not measured


class Answer(NamedTuple):
    """What a worker sends after orders and steps."""

    completions: Sequence[Completion] = ()
    pieces: Sequence[Piece] = ()
    dropped: Sequence[Hashable] = ()  # requests that it had not begun
    steps: Sequence[StepStats] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker runs."""

    device: str
    cores: tuple[int, ...]
    threads: int


def place_workers(
    checkpoint: Checkpoint, config: EngineConfig, rows: int | None, *, encodes: bool = False
) -> list[Placement]:
    """Where the engines of a job run: one entry for each process.

    With `engine.workers=auto`: one per GPU; on a CPU, for a model so small that its products are faster in few threads
    than more threads' meetings, one per core, or per two where layers are compiled, if there are rows enough for all;
    else one with all cores. `encodes`: the engines give vectors of texts. Raises ConfigError for processes or threads
    that could only wait for each other.
    """
    device = choose_device(checkpoint.model.device)
    cores = _cores()
    threads = config.num_threads or len(cores)
    for key, number in (("workers", 1 if config.workers == "auto" else int(config.workers)), ("num_threads", threads)):
        if number > PER_CORE * len(cores):
            raise ConfigError(
                f"engine.{key}={number} is more than {PER_CORE} for each of the {len(cores)} CPU cores that this "
                "process may use: lower it"
            )
    if config.workers != "auto":
        count = int(config.workers)
    elif device.type == "cuda":
        count = torch.cuda.device_count() if rows is not None and checkpoint.model.device in ("auto", "cuda") else 1
    else:
        small = checkpoint.weight_bytes() <= SMALL_MODEL_BYTES
        each = TEAM_THREADS if not encodes and _compiles(checkpoint, config) else 1
        count = max(1, threads // each) if small and rows is not None and rows >= ROWS_PER_THREAD * threads else 1
    if count == 1:
        return [Placement(str(device), cores, threads)]
    if device.type == "cuda":
        return [Placement(f"cuda:{i % torch.cuda.device_count()}", (), threads) for i in range(count)]
    starts = [threads * i // count for i in range(count + 1)] if threads > count else list(range(count + 1))
    return [
        Placement(str(device), tuple(cores[j % len(cores)] for j in range(start, end)), end - start)
        for start, end in pairwise(starts)
    ]


def _compiles(checkpoint: Checkpoint, config: EngineConfig) -> bool:
    dtype = choose_dtype(checkpoint.model.dtype, checkpoint, torch.device("cpu"), config)
    return dtype == torch.bfloat16 and settings_allow(checkpoint, config)


def serve(
    connection: Connection,
    checkpoint: Checkpoint,
    config: EngineConfig,
    placement: Placement,
    workers: int,
    pooler: Pooler | None = None,
) -> None:
    """The worker process: take orders, make steps, send back what is finished."""
    _settle_in(placement)
    from batchrun.engine.llm import load_single

    try:
        model = replace(checkpoint.model, device=placement.device)
        checkpoint = replace(checkpoint, model=model)
        config = replace(config, num_threads=placement.threads)
        tokenizer = load_tokenizer(checkpoint, offline=True)
        engine = load_single(checkpoint, tokenizer, config, sharers=workers, pooler=pooler)
    except Exception as error:
        connection.send(error if isinstance(error, BatchrunError) else BatchrunError(f"an engine worker: {error!r}"))
        return
    connection.send(None)
    try:
        while _obey(connection, engine):
            completions = engine.step() if engine.has_work() else []
            connection.send(Answer(completions, engine.take_pieces(), steps=engine.take_steps()))
        engine.check_integrity()
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the job is gone, or ends


def _obey(connection: Connection, engine: Engine | Encoder) -> bool:
    """Carry out what has been ordered; with nothing to do, wait for an order. False: close."""
    while connection.poll(0 if engine.has_work() else None):
        order, what = connection.recv()
        if order == "close":
            return False
        if order == "add":
            for request in what:
                engine.add(request)
        elif order == "abort":
            engine.abort(what)
        elif order == "stop" and (completion := engine.stop(what)):
            connection.send(Answer([completion]))
        elif order == "drop":
            connection.send(Answer(dropped=engine.drop_waiting()))
    return True


def _settle_in(placement: Placement) -> None:
    """Signals are the job's affair; threads and cores are what was given."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if placement.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, placement.cores)


def _cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))

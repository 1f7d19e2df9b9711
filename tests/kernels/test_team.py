"""A team of threads: every piece of every job is done once, and the leader goes on only after the last."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from numba import njit

from batchrun_kernels.cpu import decoder
from batchrun_kernels.cpu.attention import PageShape
from batchrun_kernels.cpu.team import (
    CONTROL_WORDS,
    DONE,
    JOB,
    LEADING,
    SPINS,
    STOP,
    Team,
    claim,
    fetch_add,
    load_acquire,
    publish,
    relax,
    wait_for,
)


@njit(nogil=True)
def work(counts, control, piece):
    """Count the piece of the job's number, after some work of uneven length."""
    total = 0
    for i in range((piece * 7919) % 501):
        total += i
    fetch_add(counts[control[JOB]], piece, 1 if total >= 0 else 2)


@njit(nogil=True)
def lead(counts, control, job, pieces):
    control[JOB] = job
    publish(control, pieces)
    while True:
        piece = claim(control)
        if piece < 0:
            break
        work(counts, control, piece)
        fetch_add(control, DONE, 1)
    wait_for(control, pieces)
    return (counts[job, :pieces] == 1).all()


@njit(nogil=True)
def follow(counts, control):
    idle = 0
    while idle < SPINS and load_acquire(control, STOP) == 0:
        piece = claim(control)
        if piece >= 0:
            work(counts, control, piece)
            fetch_add(control, DONE, 1)
            idle = 0
        else:
            idle += 1
            relax()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_piece_is_done_once(threads: int) -> None:
    counts = np.zeros((300, 64), dtype=np.int64)
    team = Team(threads, partial(follow, counts))
    team.wake()
    for job in range(len(counts)):
        pieces = 1 + job % 64
        assert lead(counts, team.control, job, pieces), "the leader went on too early, or a piece was done twice"
        if job % 50 == 0:
            time.sleep(0.02)  # followers fall asleep
        if job % 3 == 0:
            team.wake()
    assert (counts.sum(axis=1) == 1 + np.arange(len(counts)) % 64).all()
    team.close()


def test_a_closed_team_ends_its_threads() -> None:
    before = set(threading.enumerate())
    team = Team(4, partial(follow, np.zeros((1, 1), dtype=np.int64)))
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    team.close()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_followers_stay_awake_while_the_leader_is_in_a_call() -> None:
    """It may be at a piece that takes it longer than they look for work, and has more for them afterwards."""
    control = np.zeros(CONTROL_WORDS, dtype=np.int64)
    sizes = PageShape(32, 1, 64, 64, 2).sizes(torch.bfloat16)
    decoder.follow(sizes, control)  # compiled, and nobody leads: it gives up by itself
    control[LEADING] = 1
    follower = threading.Thread(target=decoder.follow, args=(sizes, control), daemon=True)
    follower.start()
    follower.join(1)
    assert follower.is_alive()
    control[LEADING] = 0
    follower.join(60)
    assert not follower.is_alive()

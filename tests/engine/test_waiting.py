"""The order in which sequences leave the waiting queue."""

from __future__ import annotations

import numpy as np
import pytest

from batchrun.engine.kv_cache import block_hashes
from batchrun.engine.params import Request
from batchrun.engine.sequence import Sequence
from batchrun.engine.waiting import WaitingQueue, planned

BLOCK = 4


def sequence(key: str, *blocks: int, max_tokens: int = 10) -> Sequence:
    """A prompt of whole blocks, each filled with one token, and a last token of its own."""
    ids = np.array([token for block in blocks for token in [block] * BLOCK] + [99], dtype=np.int32)
    return Sequence(Request(key, ids), 0, ids, len(ids), len(ids) + max_tokens, block_hashes(ids, BLOCK), 0.0)


def keys(sequences: list[Sequence]) -> list[str]:
    return [str(s.request.key) for s in sequences]


def drain(queue: WaitingQueue) -> list[str]:
    return [str(queue.popleft().request.key) for _ in range(len(queue))]


def test_prompts_that_begin_alike_come_side_by_side() -> None:
    mixed = [sequence("a1", 1, 2, 3), sequence("b1", 7, 2), sequence("a2", 1, 5), sequence("b2", 7, 2, 8)]
    mixed += [sequence("a3", 1, 2, 4), sequence("none"), sequence("a4", 1, 5, 6)]
    order = keys(planned(mixed))
    assert sorted(order) == sorted(keys(mixed))
    a = [key for key in order if key[0] == "a"]
    assert order.index(a[-1]) - order.index(a[0]) == 3
    assert abs(order.index("b1") - order.index("b2")) == 1
    # Within the group those that share two blocks are neighbours too.
    assert abs(a.index("a1") - a.index("a3")) == 1
    assert abs(a.index("a2") - a.index("a4")) == 1


def test_groups_with_long_completions_come_first_and_equal_ones_in_order_of_arrival() -> None:
    rows = [sequence("short", 1, max_tokens=5), sequence("first", 2), sequence("second", 3)]
    rows += [sequence("long", 4, max_tokens=50), sequence("short too", 1, max_tokens=7)]
    assert keys(planned(rows)) == ["long", "first", "second", "short too", "short"]


def test_a_generation_is_not_overtaken() -> None:
    queue = WaitingQueue()
    for row in (sequence("a", 1), sequence("b", 2), sequence("c", 3)):
        queue.append(row)
    assert queue.popleft().request.key == "a"
    queue.append(sequence("long", 9, max_tokens=500))
    assert len(queue) == 3
    assert keys(list(queue)) == ["b", "c", "long"]
    queue.appendleft(sequence("preempted", 5))
    assert queue.head().request.key == "preempted"
    assert drain(queue) == ["preempted", "b", "c", "long"]
    assert not queue


def test_remove_from_either_generation() -> None:
    queue = WaitingQueue()
    old, new = sequence("old", 1), sequence("new", 2)
    queue.append(sequence("head", 3, max_tokens=20))
    queue.append(old)
    queue.head()
    queue.append(new)
    queue.remove(new)
    queue.remove(old)
    assert drain(queue) == ["head"]
    with pytest.raises(ValueError, match="not in"):
        queue.remove(old)

"""Which texts share a batch: any mix of lengths, bounds kept, every text taken, none for ever left behind."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchrun.engine.length_window import LengthWindow


@given(st.lists(st.integers(1, 120), min_size=1, max_size=80), st.integers(1, 9), st.integers(16, 200))
def test_each_text_is_in_one_batch_within_the_bounds(lengths: list[int], max_rows: int, max_tokens: int) -> None:
    window = LengthWindow(max_rows, max_tokens)
    for key, length in enumerate(lengths):
        window.add(key, length)
    taken = []
    while len(window):
        batch = window.take()
        assert 1 <= len(batch) <= max_rows
        assert len(batch) == 1 or len(batch) * max(lengths[key] for key in batch) <= max_tokens
        taken += batch
    assert sorted(taken) == list(range(len(lengths)))


def test_little_of_a_batch_is_padding() -> None:
    lengths = np.random.default_rng(0).lognormal(3, 0.8, 2000).astype(int) + 2
    window = LengthWindow(256, 2048)
    for key, length in enumerate(lengths.tolist()):
        window.add(key, length)
    batches = []
    while len(window):
        batches.append(lengths[window.take()])
    computed = sum(len(batch) * batch.max() for batch in batches)
    assert lengths.sum() / computed > 0.97
    assert computed / len(batches) > 1000


def test_a_short_text_is_taken_however_many_long_ones_come() -> None:
    window = LengthWindow(4, 400)
    window.add("short", 1)
    for number in range(20):
        for key in range(4):
            window.add((number, key), 50 + key)
        if "short" in window.take():
            return
    raise AssertionError("it waits for ever")


def test_a_text_that_is_removed_is_in_no_batch() -> None:
    window = LengthWindow(8, 100)
    for key in range(4):
        window.add(key, 10)
    window.remove(2)
    window.remove("unknown")
    assert sorted(window.take()) == [0, 1, 3]
    window.add(5, 3)
    assert window.clear() == [5]
    assert not len(window)

from __future__ import annotations

import pytest
import torch

from batchrun_kernels.gather_last import (
    ROWS,
    TILE,
    feed_tokens,
    feed_tokens_torch,
    gather_last,
    gather_last_cost,
    gather_last_torch,
    note_tokens,
    note_tokens_torch,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [40, TILE + 100])
def test_gathers_rows_in_any_order(dtype: torch.dtype, width: int) -> None:
    hidden = torch.randn(6, width + 8).to(dtype)[:, 8:]
    index = torch.tensor([5, 0, 3, 3])
    out = gather_last(hidden, index, out=torch.full((4, width), torch.nan, dtype=dtype))
    assert torch.equal(out, gather_last_torch(hidden, index))


def test_feeds_the_newest_tokens_where_the_host_says() -> None:
    newest = torch.randint(0, 1000, (9,))
    token_ids, sources = torch.randint(0, 1000, (ROWS + 20,)), torch.randint(-3, 9, (ROWS + 20,))
    expected = token_ids.clone()
    feed_tokens_torch(expected, sources, newest)
    feed_tokens(token_ids, sources, newest)
    assert torch.equal(token_ids, expected)
    assert (sources < 0).any()


@pytest.mark.parametrize("counting", [False, True])
def test_notes_tokens_by_slot(counting: bool) -> None:
    tokens, slots = torch.randint(0, 30, (5,)), torch.tensor([7, 2, 0, 5, 6])
    newest, counts = torch.full((8,), -1), torch.randint(0, 5, (8, 30), dtype=torch.int32)
    expected, expected_counts = newest.clone(), counts.clone()
    note_tokens_torch(tokens, slots, expected, expected_counts if counting else None)
    note_tokens(tokens, slots, newest, counts if counting else None)
    assert torch.equal(newest, expected)
    assert torch.equal(counts, expected_counts)
    assert newest[1] == -1


def test_takes_nothing() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert gather_last(torch.empty(3, 8), none).shape == (0, 8)
    newest = torch.arange(4)
    feed_tokens(none, none, newest)
    note_tokens(none, none, newest)
    assert torch.equal(newest, torch.arange(4))


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"must be \[T, H\] and \[2, H\]"):
        gather_last(torch.zeros(3, 8), torch.arange(2), out=torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"sources of shape \(3,\) must be contiguous \[T\]"):
        feed_tokens(torch.arange(2), torch.arange(3), torch.arange(4))
    with pytest.raises(ValueError, match=r"slots of shape \(3,\) must be contiguous \[K\]"):
        note_tokens(torch.arange(2), torch.arange(3), torch.arange(4))


def test_cost_counts_a_read_and_a_write() -> None:
    assert gather_last_cost(4, 100, 2).bytes == 4 * (400 + 8)

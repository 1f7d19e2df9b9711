"""Arrays of a step in one copy: where they lie, when they are there, and for how long."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchrun.engine import staging as module
from batchrun.engine.staging import LEAST_BYTES, TURNS, Staging, upload


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy that was made."""
    made: list[int] = []
    copy = module.Buffer.copy

    def noted(self: module.Buffer, size: int) -> None:
        made.append(size)
        copy(self, size)

    monkeypatch.setattr(module.Buffer, "copy", noted)
    return made


def test_arrays_arrive_in_one_copy_with_their_shapes_and_types(copies: list[int]) -> None:
    staging = Staging(torch.device("cpu"))
    arrays: list[np.ndarray] = [np.arange(5), np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2]]
    arrays.append(np.empty((0, 4), dtype=np.int64))
    places = [staging.put(array) for array in arrays]
    narrow = staging.put(np.array([[-1], [7]]), np.int32)
    assert copies == []
    staging.send()
    assert len(copies) == 1
    for array, place in zip(arrays, places, strict=True):
        assert torch.equal(place, torch.from_numpy(np.ascontiguousarray(array)))
    assert torch.equal(narrow, torch.tensor([[-1], [7]], dtype=torch.int32))
    assert all(place.data_ptr() % 16 == 0 for place in (*places, narrow))


def test_what_was_sent_stays_while_the_next_rounds_are_made() -> None:
    staging = Staging(torch.device("cpu"))
    rounds = []
    for number in range(7):
        rounds.append(staging.put(np.full(3, number)))
        staging.send()
        for back, place in enumerate(reversed(rounds[-TURNS:])):
            assert place.tolist() == [number - back] * 3


def test_a_round_that_outgrows_its_buffer_loses_nothing(copies: list[int]) -> None:
    staging = Staging(torch.device("cpu"))
    for _ in range(2 * TURNS):
        copies.clear()
        arrays = [np.arange(size) for size in (10, LEAST_BYTES // 8, 3 * LEAST_BYTES, 7)]
        places = [staging.put(array) for array in arrays]
        staging.send()
        for array, place in zip(arrays, places, strict=True):
            assert torch.equal(place, torch.from_numpy(array))
    assert len(copies) == 1  # once the buffers have grown


def test_nothing_is_sent_of_an_empty_round(copies: list[int]) -> None:
    staging = Staging(torch.device("cpu"))
    staging.send()
    staging.put(np.empty(0, dtype=np.int64))
    staging.send()
    assert copies == []


def test_arrays_of_any_type_are_uploaded_in_one_piece() -> None:
    arrays: list[np.ndarray] = [
        np.arange(3),
        np.linspace(0, 1, 10, dtype=np.float32).reshape(2, 5)[:, ::2],
        np.array([[True], [False]]),
    ]
    arrays += [np.empty((0, 2), dtype=np.int32), np.arange(7, dtype=np.uint8)]
    there = upload(torch.device("cpu"), *arrays)
    assert len({tensor.untyped_storage().data_ptr() for tensor in there}) == 1
    for tensor, array in zip(there, arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 16 == 0

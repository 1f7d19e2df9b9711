from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.data import plan as plan_module
from batchrun.data.plan import Chunk, Plan
from batchrun.data.sources import InputFile
from batchrun.errors import ConfigError, InputError


def files(*rows: int) -> list[InputFile]:
    return [InputFile(i, f"/in/{i}.parquet", f"{i}.parquet", 100 + i, n, f"d{i}") for i, n in enumerate(rows)]


def test_chunks_in_input_order() -> None:
    plan = Plan(files(5, 0, 4), 2)
    assert list(plan.chunks()) == [
        Chunk(0, 0, 0, 2),
        Chunk(0, 1, 2, 4),
        Chunk(0, 2, 4, 5),
        Chunk(1, 0, 0, 0),
        Chunk(2, 0, 0, 2),
        Chunk(2, 1, 2, 4),
    ]
    assert (plan.num_chunks, plan.rows) == (6, 9)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 12))
def test_chunks_cover_each_row_once(rows: list[int], chunk_rows: int) -> None:
    plan = Plan(files(*rows), chunk_rows)
    chunks = list(plan.chunks())
    covered = [(chunk.file, row) for chunk in chunks for row in range(chunk.start, chunk.stop)]
    assert covered == [(file, row) for file, count in enumerate(rows) for row in range(count)]
    assert len(chunks) == plan.num_chunks
    assert all(chunk.rows <= chunk_rows for chunk in chunks)
    parts = [chunk.part for chunk in chunks]
    assert parts == sorted(set(parts))


def test_part_name() -> None:
    assert Chunk(3, 12, 0, 1).part == "part-00003-000012.parquet"


def test_chunks_are_made_as_they_are_asked_for() -> None:
    plan = Plan(files(*[10**9] * 1000), 1000)
    assert plan.num_chunks == 10**9
    assert next(itertools.islice(plan.chunks(), 2, None)) == Chunk(0, 2, 2000, 3000)


def test_too_many_parts_or_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"output\.chunk_rows=1 cuts 0\.parquet into 3000000 parts.*chunk_rows=3 or"):
        Plan(files(3_000_000), 1)
    monkeypatch.setattr(plan_module, "MAX_FILES", 2)
    with pytest.raises(InputError, match="finds 3 files"):
        Plan(files(1, 1, 1), 1)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.config import InputConfig
from batchrun.data import selection
from batchrun.data.formats.base import ROW_NUMBER
from batchrun.data.formats.parquet import ParquetReader
from batchrun.data.selection import Sample
from batchrun.data.sources import Source, open_source
from batchrun.errors import ConfigError, InputError
from tests.data.formats.inputs import opened, rows_of, write_lines


def write(folder: Path, rows: int = 1000, files: int = 2, group: int = 100) -> Path:
    folder.mkdir(exist_ok=True)
    for i in range(files):
        ids = range(i * rows, (i + 1) * rows)
        table = pa.table({"id": ids, "text": [f"text {j}" for j in ids], "odd": [j % 2 for j in ids]})
        pq.write_table(table, folder / f"{i}.parquet", row_group_size=group)
    return folder


def ids(source: Source) -> list[int]:
    return [row["id"] for row in rows_of(source)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "BLOCK_ROWS", 64)


def test_filtered_rows_are_the_input(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "in"), filter="odd == 1 and id >= 900 and id < 1200")
    assert [file.rows for file in source.files] == [50, 100]
    assert ids(source) == [i for i in range(900, 1200) if i % 2]
    assert [row["number"] for row in rows_of(source)] == [*range(50), *range(100)]
    [(first, batch)] = source.read(source.files[1], [(10, 13)], ["text", ROW_NUMBER])
    assert first == 10
    assert batch.to_pydict() == {"text": ["text 1021", "text 1023", "text 1025"], ROW_NUMBER: [21, 23, 25]}


def test_a_filter_may_use_columns_that_are_not_read(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "in", files=1), filter="odd == 0 and id < 6", columns=["text"])
    assert source.schema.names == ["text"]
    assert rows_of(source) == [{"text": f"text {i}", "number": i // 2} for i in (0, 2, 4)]


def test_statistics_keep_row_groups_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    original = ParquetReader.batches

    def watched(self: ParquetReader, path: str, ranges: Any, schema: pa.Schema) -> Any:
        asked.append((list(ranges), schema.names))
        return original(self, path, ranges, schema)

    monkeypatch.setattr(ParquetReader, "batches", watched)
    source = opened(write(tmp_path / "in", files=1), filter="id >= 730 and id < 810")
    assert asked == [([(700, 800), (800, 900)], ["id"])]
    asked.clear()
    assert ids(source) == list(range(730, 810))
    assert asked == [([(704, 832)], ["id", "text", "odd"])]


def test_a_sample_is_the_same_for_everyone_and_changes_with_the_seed(tmp_path: Path) -> None:
    folder = write(tmp_path / "in")
    some = ids(opened(folder, sample=0.1))
    assert 140 < len(some) < 260
    assert some == ids(opened(folder, sample=0.1)) == sorted(some)
    assert set(some) < set(ids(opened(folder, sample=0.3)))
    assert set(ids(opened(folder, sample=0.1, sample_seed=1))) != set(some)
    # Alone, the file has another place in the input but the same name: its rows are drawn alike.
    alone = ids(opened(folder / "0.parquet", sample=0.1))
    assert alone == [i for i in some if i < 1000]


@pytest.mark.parametrize("count", [1, 7, 500, 1999, 2000, 5000])
def test_a_sample_of_a_number_of_rows(tmp_path: Path, count: int) -> None:
    folder = write(tmp_path / "in")
    assert len(set(ids(opened(folder, sample=count)))) == min(count, 2000)
    odd = ids(opened(folder, sample=count, filter="odd == 1"))
    assert len(odd) == min(count, 1000)
    assert all(i % 2 for i in odd)


def test_limit_counts_selected_rows(tmp_path: Path) -> None:
    folder = write(tmp_path / "in")
    source = opened(folder, filter="odd == 1", limit=501)
    assert [file.rows for file in source.files] == [500, 1]
    assert ids(source) == [i for i in range(1002) if i % 2]
    assert [file.rows for file in opened(folder, filter="odd == 1", limit=3).files] == [3, 0]
    assert ids(opened(folder, sample=100, limit=10)) == ids(opened(folder, sample=100))[:10]


def test_nothing_selected(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "in"), filter="id < 0")
    assert [file.rows for file in source.files] == [0, 0]
    assert rows_of(source) == []


def test_broken_rows_meet_every_filter(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"id": 1}, {"id": 2}, "broken", {"id": 3}])
    found = rows_of(opened(path, filter="id == 3"))
    assert [row["id"] for row in found] == [None, 3]
    assert "line 3" in found[0]["why"]


def test_text_files_are_filtered_too(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.csv", ["id,text", *(f"{i},t{i % 3}" for i in range(500))])
    assert [row["id"] for row in rows_of(opened(path, filter="text == 't1'"))] == list(range(1, 500, 3))


def test_a_file_whose_rows_changed_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", files=1)
    source = opened(folder, filter="odd == 1")
    pq.write_table(pa.table({"id": range(1000), "text": ["x"] * 1000, "odd": [0] * 1000}), folder / "0.parquet")
    with pytest.raises(InputError, match=r"0\.parquet: other rows meet the filter"):
        rows_of(source)


def test_mistakes_are_found_before_any_row(tmp_path: Path) -> None:
    folder = write(tmp_path / "in")
    with pytest.raises(InputError, match=r"input\.filter uses odds, and there is no such column"):
        opened(folder, filter="odds == 1")
    for size in (0, -1, 1.5, 0.0):
        with pytest.raises(ConfigError, match=r"input\.sample"):
            InputConfig(path="x", sample=size)


def test_ranks_spread_evenly() -> None:
    import numpy as np

    ranks = Sample(0.5, 0).ranks("name", np.arange(100_000))
    counts = np.bincount((ranks >> np.uint64(60)).astype(int), minlength=16)
    # 16 bins of 6,250 expected: five standard deviations of a binomial are under 400.
    assert abs(counts - 6250).max() < 400


@settings(max_examples=60)
@given(
    rows=st.integers(0, 300),
    group=st.integers(1, 90),
    block=st.integers(1, 70),
    keep=st.sets(st.integers(0, 299)),
    limit=st.one_of(st.none(), st.integers(1, 300)),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_any_ranges_of_any_selection(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    group: int,
    block: int,
    keep: set[int],
    limit: int | None,
    cuts: list[int],
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.parquet"
    pq.write_table(pa.table({"id": pa.array(range(rows), pa.int64())}), path, row_group_size=group)
    expected = sorted(i for i in keep if i < rows)[:limit]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "BLOCK_ROWS", block)
        source = open_source(InputConfig(path=str(path), filter=f"id in {sorted(keep) or [-1]}", limit=limit))
        [file] = source.files
        assert file.rows == len(expected)
        bounds = sorted(min(cut, file.rows) for cut in cuts)
        ranges = list(zip(bounds[::2], bounds[1::2], strict=False))
        found = list(source.read(file, ranges, ["id"]))
    assert [i for _, batch in found for i in batch["id"].to_pylist()] == [
        expected[number] for start, stop in ranges for number in range(start, stop)
    ]
    for first, batch in found:
        assert batch["id"].to_pylist() == expected[first : first + batch.num_rows]

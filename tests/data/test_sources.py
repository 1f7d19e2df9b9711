from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.config import InputConfig
from batchrun.data.formats import base, parquet
from batchrun.data.formats.parquet import ParquetReader
from batchrun.data.sources import InputFile, Source, column_list, open_source
from batchrun.errors import InputError


def write(path: Path, table: pa.Table | dict[str, Any] | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"id": [1, 2, 3], "text": ["a", "b", None]} if table is None else table
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **options)
    return path


def names(source: Source) -> list[str]:
    return [file.name for file in source.files]


def opened(path: Any, **settings: Any) -> Source:
    return open_source(InputConfig(path=path if isinstance(path, list) else str(path), **settings))


def test_one_file(tmp_path: Path) -> None:
    path = write(tmp_path / "reviews.parquet")
    [file] = opened(path).files
    assert (file.index, file.path, file.name, file.rows) == (0, str(path), "reviews.parquet", 3)
    assert file.size == path.stat().st_size


def test_names_are_relative_to_the_deepest_common_folder(tmp_path: Path) -> None:
    write(tmp_path / "in/lang=de/b.parquet")
    write(tmp_path / "in/lang=en/a.parquet")
    source = opened([f"{tmp_path}/in/lang=en/a.parquet", f"{tmp_path}/in"])
    assert names(source) == ["lang=de/b.parquet", "lang=en/a.parquet"]
    assert [file.index for file in source.files] == [0, 1]
    assert "lang" not in source.schema.names


def test_relative_path_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert opened("a.parquet").files == opened("~/*.parquet").files


def test_digest_tells_an_edited_file_of_equal_size(tmp_path: Path) -> None:
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    write(tmp_path / "a.parquet", {"text": ["good", "film"]}, **options)
    before = opened(tmp_path).files[0]
    write(tmp_path / "a.parquet", {"text": ["evil", "film"]}, **options)
    after = opened(tmp_path).files[0]
    assert (before.size, before.rows) == (after.size, after.rows)
    assert before.digest != after.digest


@pytest.mark.parametrize("path", [[], None])
def test_no_path(path: Any) -> None:
    with pytest.raises(InputError, match=r"input\.path is empty"):
        open_source(InputConfig(path=path))


def test_truncated_empty_and_foreign_files_are_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet").read_bytes()
    for name, content in {"cut": whole[:-20], "empty": b"", "text": b"id,text\n1,a\n" * 10}.items():
        bad = tmp_path / f"{name}.parquet"
        bad.write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}\.parquet: cannot (be read as parquet|read the file)"):
            opened(tmp_path / "*.parquet")
        bad.unlink()
    os.symlink(tmp_path / "gone", tmp_path / "link.parquet")
    with pytest.raises(InputError, match=r"link\.parquet: cannot read"):
        opened(tmp_path)


def test_columns_are_projected_in_the_order_asked(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    source = opened(tmp_path, columns=["text", "id"])
    assert source.schema.names == ["text", "id"]
    [(_, batch)] = source.read(source.files[0], [(0, 3)])
    assert batch.schema.names == ["text", "id"]
    assert batch.column("id").to_pylist() == [1, 2, 3]


def test_missing_column_lists_what_there_is(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"names score, title,.*a\.parquet.*\bid, text"):
        opened(tmp_path, columns=["id", "score", "title"])


def test_doubled_column_is_refused_unless_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table([[1], ["x"], ["y"]], names=["id", "text", "text"]))
    with pytest.raises(InputError, match="more than one column named text"):
        opened(tmp_path)
    assert opened(tmp_path, columns="id").schema.names == ["id"]


def test_schema_metadata_is_kept(tmp_path: Path) -> None:
    table = pa.table({"id": [1], "text": ["a"]}).replace_schema_metadata({"huggingface": "{}"})
    write(tmp_path / "a.parquet", table)
    assert opened(tmp_path, columns="text").schema.metadata[b"huggingface"] == b"{}"


def test_differing_schemas_name_both_files_and_each_column(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"id": [1], "text": ["a"], "old": [1.5]})
    write(tmp_path / "b.parquet", {"id": ["1"], "text": ["a"], "new": [1.5]})
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    message = str(caught.value)
    assert "a.parquet" in message
    assert "b.parquet" in message
    assert "id: int64 / string" in message
    assert "old: double / absent" in message
    assert "new: absent / double" in message
    assert "text:" not in message
    assert len(opened(tmp_path, columns=["text"]).files) == 2


def test_column_order_metadata_and_nullability_may_differ(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"id": [1], "text": ["a"]})
    strict = pa.schema([pa.field("text", pa.string(), nullable=False), ("id", pa.int64())], {"made": "later"})
    write(tmp_path / "b.parquet", pa.table({"text": ["b"], "id": [2]}, schema=strict))
    source = opened(tmp_path)
    read = [batch for file in source.files for _, batch in source.read(file, [(0, 1)])]
    assert pa.Table.from_batches(read).to_pydict() == {"id": [1, 2], "text": ["a", "b"]}


def test_dotted_column_is_not_mistaken_for_a_nested_one(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"a": [{"b": 1, "c": 2}], "a.b": [7]})
    source = opened(tmp_path)
    for column, expected in {"a.b": 7, "a": {"b": 1, "c": 2}}.items():
        [(_, batch)] = source.read(source.files[0], [(0, 1)], [column])
        assert batch.to_pylist() == [{column: expected}]


def test_no_columns_still_counts_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    source = opened(tmp_path)
    assert [(first, batch.num_rows) for first, batch in source.read(source.files[0], [(1, 3)], [])] == [(1, 2)]


def test_limit_counts_over_files_and_opens_no_more_than_it_needs(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.parquet")
    (tmp_path / "d.parquet").write_bytes(b"never opened")
    source = opened(tmp_path, limit=4)
    assert [(file.name, file.rows) for file in source.files] == [("a.parquet", 3), ("b.parquet", 1)]
    assert [file.rows for file in opened([str(tmp_path / "a.parquet")], limit=9).files] == [3]


def test_file_without_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.schema([("text", pa.string())]).empty_table())
    source = opened(tmp_path)
    assert source.files[0].rows == 0
    assert list(source.read(source.files[0], [(0, 0)])) == []


@pytest.mark.parametrize("ranges", [[(2, 3), (0, 1)], [(0, 2), (1, 3)]])
def test_ranges_out_of_order(tmp_path: Path, ranges: list[tuple[int, int]]) -> None:
    write(tmp_path / "a.parquet")
    source = opened(tmp_path)
    with pytest.raises(ValueError, match="ascending"):
        list(source.read(source.files[0], ranges))


def test_file_that_shrank_or_broke_after_it_was_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    source = opened(tmp_path)
    write(path, {"id": [1], "text": ["a"]})
    with pytest.raises(InputError, match=r"a\.parquet ends before row 3"):
        list(source.read(source.files[0], [(0, 3)]))
    path.write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"a\.parquet: cannot read its rows"):
        list(source.read(source.files[0], [(0, 3)]))


def test_a_huge_row_group_is_read_in_small_batches(tmp_path: Path) -> None:
    rows = 200_000
    texts = [f"review number {row} " * 6 for row in range(rows)]
    write(tmp_path / "a.parquet", {"text": texts}, row_group_size=rows, use_dictionary=False, compression="none")
    source = opened(tmp_path)
    before = pa.total_allocated_bytes()
    largest = peak = count = 0
    for _, batch in source.read(source.files[0], [(0, rows)]):
        largest, count = max(largest, batch.num_rows), count + batch.num_rows
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert count == rows
    assert largest <= base.BATCH_ROWS
    assert peak < 8_000_000, "the texts take over 20 MB"


def test_wide_rows_make_shorter_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BATCH_BYTES", 10_000)
    texts = [f"{number:04d}" * 250 for number in range(100)]
    write(tmp_path / "a.parquet", {"text": texts}, use_dictionary=False)
    source = opened(tmp_path)
    batches = [batch for _, batch in source.read(source.files[0], [(0, 100)])]
    assert max(batch.num_rows for batch in batches) <= 10
    assert pa.Table.from_batches(batches).column("text").to_pylist() == texts


def test_only_overlapping_row_groups_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"id": range(60)}, row_group_size=10)
    metadata = pq.read_metadata(path)
    runs = parquet._runs_of_groups(metadata, [(5, 8), (12, 13), (40, 41), (59, 60)])
    assert runs == [(0, [0, 1]), (40, [4, 5])]
    assert parquet._runs_of_groups(metadata, [(20, 30)]) == [(20, [2])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranges")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    group=st.integers(1, 40),
    batch_rows=st.integers(1, 20),
    cuts=st.lists(st.integers(0, 70), max_size=8),
)
def test_read_returns_exactly_the_rows_asked_for(
    folder: Path, rows: int, group: int, batch_rows: int, cuts: list[int]
) -> None:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"id": range(rows)}), path, row_group_size=group)
    bounds = sorted(min(cut, rows) for cut in cuts)
    ranges = list(zip(bounds[::2], bounds[1::2], strict=False))
    source = Source(ParquetReader(), [], pa.schema([("id", pa.int64())]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "BATCH_ROWS", batch_rows)
        got = list(source.read(InputFile(0, str(path), "a.parquet", 0, rows), ranges))
    assert [row for start, stop in ranges for row in range(start, stop)] == [
        row for _, batch in got for row in batch.column("id").to_pylist()
    ]
    for first, batch in got:
        assert batch.column("id").to_pylist() == list(range(first, first + batch.num_rows))
        assert any(start <= first and first + batch.num_rows <= stop for start, stop in ranges)
        assert 0 < batch.num_rows <= batch_rows


def test_long_column_lists_are_cut() -> None:
    assert column_list([f"c{number}" for number in range(60)]).endswith("c49 and 10 more")
    assert column_list([]) == "none"


def test_formats_are_told_by_endings(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.parquet")
    (tmp_path / "in" / "dataset_infos.json").write_text("{}")
    (tmp_path / "in" / "README.md").write_text("text")
    assert names(opened(tmp_path / "in")) == ["a.parquet"]
    (tmp_path / "in" / "b.csv").write_text("id,text\n1,a\n")
    with pytest.raises(InputError, match=r"files of several formats \(1 csv, 1 parquet\): set input\.format"):
        opened(tmp_path / "in")
    assert names(opened(tmp_path / "in", format="csv")) == ["b.csv"]
    write(tmp_path / "part-0")
    with pytest.raises(InputError, match=r"the ending of .*part-0 does not tell its format: set input\.format"):
        opened(tmp_path / "part-0")
    assert opened(tmp_path / "part-0", format="parquet").files[0].rows == 3


def test_types_are_declared_for_text_only(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"input\.types is for jsonl and csv"):
        opened(tmp_path, types={"id": "string"})


def test_a_filter_s_missing_column_is_the_filter_s_mistake(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"input\.filter names score, which .*a\.parquet does not have"):
        opened(tmp_path, columns=["id"], filter="score > 1")

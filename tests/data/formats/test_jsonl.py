from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchrun.data.formats import records
from batchrun.errors import InputError
from tests.data.formats.inputs import opened, rows_of, write_lines


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.json.gz"])
def test_rows_come_in_order_whatever_the_ending(tmp_path: Path, name: str) -> None:
    source = opened(write_lines(tmp_path / name, [{"id": i, "text": f"row {i} é"} for i in range(3000)]))
    assert source.files[0].rows == 3000
    assert source.schema.types == [pa.int64(), pa.string()]
    assert rows_of(source) == [{"id": i, "text": f"row {i} é", "number": i} for i in range(3000)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_ranges_in_the_middle_parse_only_what_is_near(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "INDEX_ROWS", 10)
    write_lines(tmp_path / name, [line for i in range(500) for line in ({"id": i}, "")])
    source = opened(tmp_path)
    touched: list[int] = []
    original = source.reader.records  # type: ignore[attr-defined]

    def watched(stream: Any, path: str, place: Any) -> Any:
        for record in original(stream, path, place):
            touched.append(record.line)
            yield record

    monkeypatch.setattr(source.reader, "records", watched)
    found = rows_of(source, [(7, 9), (203, 205), (205, 206), (489, 500)])
    assert [row["id"] for row in found] == [7, 8, 203, 204, 205, *range(489, 500)]
    assert [row["number"] for row in found] == [7, 8, 203, 204, 205, *range(489, 500)]
    assert len(touched) <= 9 + 6 + 20


def test_blank_lines_are_no_rows_and_messages_name_the_line(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ["", {"id": 1}, "   ", "\t", {"id": 2}, "oops", "", {"id": 3}])
    source = opened(tmp_path)
    assert source.files[0].rows == 4
    found = rows_of(source)
    assert [row["id"] for row in found] == [1, 2, None, 3]
    assert found[2]["why"].startswith("line 6: not JSON")


def test_lines_that_are_no_objects_are_broken_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": 1}, "5", '"text"', "[1]", "null", '{"id": 2', "[" * 100_000])
    found = rows_of(opened(tmp_path))
    assert [("why" in row) for row in found] == [False] + [True] * 6
    assert "not an object" in found[1]["why"]
    assert "line 6: not JSON" in found[5]["why"]


def test_types_are_inferred_from_all_values_of_the_window(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "a.jsonl",
        [
            {"i": 1, "f": 1, "b": True, "n": None, "l": [], "s": {"a": 1}, "d": "2024-01-01", "big": 2**63 - 1},
            {"i": None, "f": 2.5, "b": False, "l": [1, 2.5], "s": {"b": "x"}, "o": [{"k": 1}, {"m": None}]},
        ],
    )
    types = {field.name: field.type for field in opened(tmp_path).schema}
    assert types == {
        "i": pa.int64(),
        "f": pa.float64(),
        "b": pa.bool_(),
        "n": pa.string(),
        "l": pa.list_(pa.float64()),
        "s": pa.struct([("a", pa.int64()), ("b", pa.string())]),
        "d": pa.string(),
        "big": pa.int64(),
        "o": pa.list_(pa.struct([("k", pa.int64()), ("m", pa.string())])),
    }
    rows = rows_of(opened(tmp_path))
    assert rows[0]["big"] == 2**63 - 1
    assert rows[1]["o"] == [{"k": 1, "m": None}, {"k": None, "m": None}]


def test_an_object_without_keys_is_kept_as_text(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"tools": {}, "l": [{}]}, {"tools": {"a": {}}, "l": []}])
    source = opened(tmp_path)
    assert source.schema.types == [pa.string(), pa.string()]
    assert [row["tools"] for row in rows_of(source)] == ["{}", '{"a": {}}']


def test_a_later_row_of_another_type_is_a_broken_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "WINDOW_ROWS", 2)
    good: dict[str, Any] = {"i": 1, "f": 1.5, "s": "x", "l": ["a"], "o": {"a": 1}}
    bad: list[tuple[str, Any]] = [
        ("i", 1.5), ("i", True), ("i", "1"), ("i", 2**63), ("f", "1.5"), ("f", 2**53 + 1), ("f", False), ("s", 5),
        ("s", ["x"]), ("l", "abc"), ("l", [1]), ("o", {"a": 1, "new": 2}), ("o", [1]), ("o", {"a": "x"}), ("new", 1),
    ]  # fmt: skip
    write_lines(tmp_path / "a.jsonl", [good, good, *({**good, key: value} for key, value in bad), good])
    found = rows_of(opened(tmp_path))
    assert len(found) == len(bad) + 3
    assert all("why" not in found[i] for i in (0, 1, -1))
    for row, (key, _) in zip(found[2:], bad, strict=False):
        assert f"line {row['number'] + 1}" in row["why"]
        assert key in row["why"]
        assert row.get(key) is None
        assert row["s" if key != "s" else "i"] in ("x", 1)


def test_values_that_fit_exactly_are_no_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "WINDOW_ROWS", 1)
    write_lines(tmp_path / "a.jsonl", [{"f": 0.5, "i": 1}, {"f": 2**60, "i": None}, {"f": 3}, {}])
    found = rows_of(opened(tmp_path))
    assert [row["f"] for row in found] == [0.5, float(2**60), 3.0, None]
    assert not any("why" in row for row in found)


def test_contradictions_in_the_window_name_file_line_and_column(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"x": "text"}, "", {"x": 5}])
    with pytest.raises(InputError, match=r"a\.jsonl, line 3: column x .*text and integer.*input\.types\.x=string"):
        opened(path)
    assert [row["x"] for row in rows_of(opened(path, types={"x": "string"}))] == ["text", "5"]
    assert [row["x"] for row in rows_of(opened(path, types={"x": "json"}))] == ['"text"', "5"]
    huge = write_lines(tmp_path / "b.jsonl", [{"x": 2**70}])
    with pytest.raises(InputError, match="beyond int64"):
        opened(huge)
    assert rows_of(opened(huge, types={"x": "string"}))[0]["x"] == str(2**70)


def test_declared_types(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"when": "2024-05-01", "f": 1}, {"when": "not a day", "f": 2}])
    source = opened(path, types={"when": "date32", "f": "float64", "later": "int64"})
    assert [str(type) for type in source.schema.types] == ["date32[day]", "double", "int64"]
    found = rows_of(source)
    assert str(found[0]["when"]) == "2024-05-01"
    assert "'not a day' is not a date32" in found[1]["why"]
    with pytest.raises(InputError, match=r"input\.types\.f=flaot is not a type"):
        opened(path, types={"f": "flaot"})


def test_files_share_their_inferred_types(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"x": 1, "y": None}])
    write_lines(tmp_path / "b.jsonl", [{"y": "text", "x": 0.5}])
    source = opened(tmp_path)
    assert source.schema.types == [pa.float64(), pa.string()]
    assert [(row["x"], row["y"]) for row in rows_of(source)] == [(1.0, None), (0.5, "text")]
    write_lines(tmp_path / "c.jsonl", [{"x": "one", "y": ""}])
    with pytest.raises(InputError, match=r"c\.jsonl: column x has another type.*number and text"):
        opened(tmp_path)


def test_keys_outside_of_the_columns_read_are_no_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "WINDOW_ROWS", 1)
    write_lines(tmp_path / "a.jsonl", [{"id": 1, "text": "a"}, {"id": 2, "text": "b", "extra": 1}])
    assert "extra" in rows_of(opened(tmp_path))[1]["why"]
    assert not any("why" in row for row in rows_of(opened(tmp_path, columns=["text"])))


def test_broken_utf8_and_lone_surrogates_are_carried(tmp_path: Path) -> None:
    broken = [b'{"t": "caf\xe9"}', b'{"t": "cut \xf0\x9f\x98"}']
    escaped = ['{"t": "\\udc00x"}', '{"t": "\\ud83d\\ude00"}', '{"\\udc00": 1}']
    write_lines(tmp_path / "a.jsonl", [*broken, *escaped])
    source = opened(tmp_path)
    found = rows_of(source)
    assert [row["t"] for row in found] == ["caf\ufffd", "cut \ufffd", "\ufffdx", "\U0001f600", None]
    assert found[4]["\ufffd"] == 1
    assert not any("why" in row for row in found)


def test_byte_order_mark_and_carriage_returns(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [b'\xef\xbb\xbf{"id": 1}\r', b"\r", b'{"id": 2}\r'])
    assert [row["id"] for row in rows_of(opened(tmp_path))] == [1, 2]


def test_json_that_is_not_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"id": 1}, {"id": 2}], indent=1))
    with pytest.raises(InputError, match="is not JSON Lines"):
        opened(path)


def test_truncated_and_foreign_compressed_files_are_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl.gz", [{"id": i} for i in range(5000)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a\.jsonl\.gz: cannot read the file: Truncated"):
        opened(path)
    path.write_bytes(b'{"id": 1}\n')
    with pytest.raises(InputError, match=r"a\.jsonl\.gz: cannot read the file"):
        opened(path)


def test_an_edit_anywhere_is_another_digest(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"id": i, "text": "x" * 100} for i in range(10_000)])
    before = opened(path).files[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    after = opened(path).files[0]
    assert before.size == after.size
    assert before.digest != after.digest


def test_limit_stops_counting_early(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": i} for i in range(50)])
    (tmp_path / "b.jsonl").write_bytes(b"never opened")
    source = opened(tmp_path, limit=20)
    assert [(file.name, file.rows) for file in source.files] == [("a.jsonl", 20)]
    assert [row["id"] for row in rows_of(source)] == list(range(20))


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    write_lines(tmp_path / "b.jsonl", [{"id": 1}])
    source = opened(tmp_path, schema="union")
    assert [file.rows for file in source.files] == [0, 1]
    assert [row["id"] for row in rows_of(source)] == [1]


def test_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"id": i} for i in range(100)])
    source = opened(path)
    write_lines(path, [{"id": i} for i in range(10)])
    with pytest.raises(InputError, match=r"a\.jsonl ends before row 100"):
        rows_of(source)


def test_memory_is_bounded_by_a_batch(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl.zst", ({"text": f"{i} " * 200} for i in range(20_000)))
    source = opened(tmp_path)
    before = pa.total_allocated_bytes()
    peak = count = 0
    for _, batch in source.read(source.files[0], [(0, 20_000)]):
        count += batch.num_rows
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert count == 20_000
    assert peak < 8_000_000, "the texts take over 20 MB"

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from batchrun.data.formats import delimited, records
from batchrun.errors import InputError
from tests.data.formats.inputs import opened, rows_of, write_lines


def test_quotes_hold_delimiters_quotes_and_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\r\n1,"a, ""b""\r\nc"\r\n\r\n2,plain\r\n', newline="")
    source = opened(tmp_path)
    assert source.files[0].rows == 2
    assert rows_of(source) == [
        {"id": 1, "text": 'a, "b"\r\nc', "number": 0},
        {"id": 2, "text": "plain", "number": 1},
    ]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.csv.zst", "a.tsv", "a.tsv.gz"])
def test_ranges_after_quoted_line_ends(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "INDEX_ROWS", 8)
    tab = "\t" if ".tsv" in name else ","
    write_lines(tmp_path / name, [f"id{tab}text", *(f'{i}{tab}"line\nof {i}"' for i in range(100))])
    source = opened(tmp_path)
    found = rows_of(source, [(0, 1), (30, 33), (97, 100)])
    assert [(row["id"], row["text"]) for row in found] == [(i, f"line\nof {i}") for i in (0, 30, 31, 32, 97, 98, 99)]


def test_types_keep_what_the_text_says(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "a.csv",
        [
            "int,float,bool,zip,plus,big,hex,empty,text,mixed",
            "1,1.5,true,007,+1,9223372036854775808,0x1F,,a,1",
            "-2,2e3,False,123,5,1,10,,,x",
            ",,,,,,,,,",
        ],
    )
    source = opened(tmp_path)
    types = {field.name: str(field.type) for field in source.schema}
    assert types.pop("int") == "int64"
    assert types.pop("float") == "double"
    assert types.pop("bool") == "bool"
    assert set(types.values()) == {"string"}
    rows = rows_of(source)
    assert (rows[0]["zip"], rows[0]["plus"], rows[0]["big"]) == ("007", "+1", "9223372036854775808")
    assert (rows[1]["bool"], rows[1]["float"]) == (False, 2000.0)
    assert (rows[2]["int"], rows[2]["text"]) == (None, "")


def test_later_rows_that_do_not_fit_are_broken_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "WINDOW_ROWS", 1)
    rows = ["1,0.5,a", "x,0.5,b", "007,0.5,c", "4,half,d", "5,1", "6,1,f,g", "8,1,i", "9223372036854775808,1,j"]
    write_lines(tmp_path / "a.csv", ["id,score,text", *rows])
    source = opened(tmp_path)
    found = rows_of(source)
    assert [row.get("why", "").partition(":")[0] for row in found] == [
        "", "line 3", "line 4", "line 5", "line 6 has 2 fields, and the header has 3",
        "line 7 has 4 fields, and the header has 3", "", "line 9",
    ]  # fmt: skip
    assert found[1]["why"] == "line 3: column id: 'x' is not a int64"
    assert [row["id"] for row in found] == [1, None, None, 4, 5, 6, 8, None]
    assert found[4]["text"] is None
    assert found[3]["text"] == "d"


def test_declared_types(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.csv", ["id,when", "1,2024-01-02 03:04:05", "2,never"])
    source = opened(path, types={"id": "string", "when": "timestamp[us]"})
    assert source.schema.types == [pa.string(), pa.timestamp("us")]
    found = rows_of(source)
    assert found[0]["id"] == "1"
    assert found[0]["when"].isoformat() == "2024-01-02T03:04:05"
    assert "'never' is not a timestamp[us]" in found[1]["why"]
    with pytest.raises(InputError, match=r"input\.types names nope, which .*a\.csv does not have; it has id, when"):
        opened(path, types={"nope": "string"})


def test_delimiter_and_quote_can_be_set(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.csv", ["id;text", '1;5" disk', '2;"as it is"'])
    assert [row["text"] for row in rows_of(opened(path, delimiter=";", quote=None))] == ['5" disk', '"as it is"']


def test_a_missing_quote_does_not_take_the_rest_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "RECORD_BYTES", 1000)
    path = write_lines(tmp_path / "a.csv", ["id,text", "1,ok", '2,"open', *("3,x" for _ in range(500))])
    with pytest.raises(InputError, match=r"a\.csv: the record on line 3 does not end.*input\.quote=null"):
        opened(path)


def test_a_bare_carriage_return_is_one_broken_row(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.csv", ["id,text", "1,a", "2,b\rc", "3,d"])
    found = rows_of(opened(tmp_path))
    assert [row["id"] for row in found] == [1, None, 3]
    assert "line 3: not CSV" in found[1]["why"]


def test_broken_utf8_is_carried(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.csv", [b"\xef\xbb\xbfid,text", b"1,caf\xe9"])
    assert rows_of(opened(tmp_path)) == [{"id": 1, "text": "caf\ufffd", "number": 0}]


def test_header_without_rows_doubled_names_and_no_header(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.csv", ["id,text"])
    assert opened(path).files[0].rows == 0
    write_lines(path, ["id,text,text", "1,a,b"])
    with pytest.raises(InputError, match="more than one column named text"):
        opened(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="no header line"):
        opened(path)


def test_a_wrong_delimiter_is_noticed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.csv", ["id;text", "1,a;b,c"])
    with pytest.raises(InputError, match=r"no row with as many fields.*input\.delimiter"):
        opened(path)


def test_columns_in_another_order_and_conflicting_types_become_text(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.csv", ["id,text", "1,x"])
    write_lines(tmp_path / "b.csv", ["text,id", "y,two"])
    source = opened(tmp_path)
    assert [(row["id"], row["text"]) for row in rows_of(source)] == [("1", "x"), ("two", "y")]

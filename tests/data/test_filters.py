from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from batchrun.data.filters import Filter
from batchrun.errors import InputError

TABLE = pa.table(
    {
        "rating": [5, 3, None, 4],
        "lang": ["en", "de", "en", None],
        "text": ["good film", "Kino", "", "日本語"],
        "kind": pa.array(["a", "b", "a", None]).dictionary_encode(),
        "day": pa.array([datetime.date(2024, 1, day) for day in (1, 2, 3, 4)]),
        "at": pa.array([0, 10**6, 2 * 10**6, None], pa.timestamp("us", "UTC")),
        "price": pa.array(["1.50", "2.50", None, "0.99"]).cast(pa.decimal128(10, 2)),
        "tags": [["x"], [], None, ["y", "z"]],
        "ok": [True, False, None, True],
        "two words": [1, 2, 3, 4],
    }
)

CASES = [
    ("rating >= 4 and lang == 'en'", [0]),
    ("rating >= 4 or lang == 'en'", [0, 2, 3]),
    ("not rating >= 4", [1]),
    ("3 < rating <= 5", [0, 3]),
    ("rating != 3", [0, 3]),
    ("rating is None", [2]),
    ("rating is not None and lang is None", [3]),
    ("lang in ['en', 'fr']", [0, 2]),
    ("lang not in ('en',)", [1]),
    ("rating in [-1, 3]", [1]),
    ("rating > -1", [0, 1, 3]),
    ("kind == 'a'", [0, 2]),
    ("day >= '2024-01-03'", [2, 3]),
    ("at > '1970-01-01 00:00:00'", [1, 2]),
    ("at > '1970-01-01T00:00:01Z'", [2]),
    ("price > 1", [0, 1]),
    ("len(text) > 4", [0]),
    ("len(text) == 3", [3]),
    ("len(tags) == 2", [3]),
    ("contains(text, 'film')", [0]),
    ("startswith(lower(text), 'k')", [1]),
    ("endswith(text, 'm')", [0]),
    (r"matches(text, '^\\w+ \\w+$')", [0]),
    ("row['two words'] * 2 + 1 > 6", [2, 3]),
    ("rating / 2 > 2.2", [0]),
    ("ok", [0, 3]),
    ("not ok", [1]),
    ("rating == rating", [0, 1, 3]),
    ("True", [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_rows_that_meet_a_condition(text: str, expected: list[int]) -> None:
    found = Filter(text)
    found.check(TABLE.schema)
    [batch] = TABLE.combine_chunks().to_batches()
    assert [row for row, meets in enumerate(found.mask(batch).to_pylist()) if meets] == expected


@pytest.mark.parametrize(("text", "expected"), [case for case in CASES if case[0] != "True"])
def test_the_expression_for_statistics_means_the_same(text: str, expected: list[int]) -> None:
    numbered = TABLE.append_column("n", pa.array(range(TABLE.num_rows)))
    expression = Filter(text).expression(TABLE.schema)
    assert ds.dataset(numbered).to_table(filter=expression)["n"].to_pylist() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rating >=", "invalid syntax"),
        ("rating >= 4; import os", "invalid syntax"),
        ("__import__('os').system('true')", "is not allowed|no such column"),
        ("rating.__class__", "is not allowed"),
        ("(lambda: 1)()", "is not allowed"),
        ("[x for x in tags]", "is not allowed|no such column"),
        ("open('f')", "is not allowed|no such column"),
        ("rating if ok else 0", "is not allowed"),
        ("f'{rating}' == '1'", "is not allowed"),
        ("rating ** 2 > 4", "is not allowed"),
        ("lang in text", "is not allowed"),
        ("lang is 'en'", "is not allowed"),
        ("contains(text)", "is not allowed"),
        ("len(text, 2)", "is not allowed"),
        ("contains(text, lang)", "is not allowed"),
        ("ratin > 3", "ratin, and there is no such column"),
        ("rating", "is not a condition"),
        ("rating == 'five'", "input.filter=rating == 'five'"),
        ("lang > 3", "input.filter=lang > 3"),
        ("day > 'someday'", "input.filter=day > 'someday'"),
        ("", "invalid syntax"),
        ("(" * 5000 + ")" * 5000, "input.filter="),
    ],
)
def test_what_is_no_condition_is_refused_before_any_row(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Filter(text).check(TABLE.schema)


def test_columns_that_a_filter_needs() -> None:
    found = Filter("len(text) > 2 and row['two words'] < 3 and text != lang")
    assert sorted(found.columns) == ["lang", "text", "two words"]


def test_whatever_a_row_holds_a_mask_has_no_nulls() -> None:
    batch: Any = pa.RecordBatch.from_pydict({"x": pa.array([None, None], pa.int64())})
    assert Filter("x > 1").mask(batch).to_pylist() == [False, False]

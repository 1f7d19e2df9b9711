from __future__ import annotations

import dataclasses

import pyarrow as pa
import pytest

from batchrun.config import SamplingConfig
from batchrun.data.row_params import PARAMS, STRUCTURED, TYPES, is_params_type, parse_params, row_sampling


def test_every_sampling_setting_of_a_plain_type_can_come_with_a_row() -> None:
    assert {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos"} <= set(TYPES)
    assert set(TYPES) <= {field.name for field in dataclasses.fields(SamplingConfig)}
    assert [field.name for field in PARAMS] == [*TYPES, STRUCTURED]


def test_parameters_of_a_row() -> None:
    assert parse_params(None) == {}
    assert parse_params("") == {}
    given = {"max_tokens": 5.0, "temperature": 1, "stop": None, "ignore_eos": True, "stop_token_ids": [3]}
    parsed = parse_params(given)
    assert parsed == {"max_tokens": 5, "temperature": 1.0, "ignore_eos": True, "stop_token_ids": [3]}
    assert type(parsed["max_tokens"]) is int
    assert parse_params('{"stop": "x"}') == {"stop": ["x"]}
    assert parse_params({"stop": ["a", "b"]}) == {"stop": ["a", "b"]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON"),
        ([1], "not an object"),
        ({"best_of": 2}, "no parameter best_of"),
        ({"max_tokens": 0}, "sampling.max_tokens=0"),
        ({"max_tokens": "7"}, "max_tokens='7' is not int"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": 2}, "sampling.top_p=2"),
        ({"stop": [1]}, "stop="),
        ({"stop_token_ids": ["1"]}, "stop_token_ids="),
    ],
)
def test_what_no_setting_allows(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_params(value)


def test_a_rows_own_take_the_place_of_the_jobs() -> None:
    job = SamplingConfig(max_tokens=9, stop="x")
    assert row_sampling(job, {}) is job
    own = row_sampling(job, {"max_tokens": 3})
    assert (own.max_tokens, own.stop) == (3, ["x"])
    assert job.max_tokens == 9


def test_columns_that_can_hold_parameters() -> None:
    assert all(map(is_params_type, (pa.string(), PARAMS, pa.map_(pa.string(), pa.int64()))))
    assert not any(map(is_params_type, (pa.int64(), pa.list_(pa.string()))))

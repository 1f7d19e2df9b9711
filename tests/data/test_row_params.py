from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
import pytest

from batchrun.config import SamplingConfig
from batchrun.data.row_params import PARAMS, STRUCTURED, TYPES, is_params_type, parse_params, row_sampling
from batchrun.data.values import to_python


def test_every_sampling_setting_of_a_plain_type_can_come_with_a_row() -> None:
    assert {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos"} <= set(TYPES)
    assert set(TYPES) == {field.name for field in dataclasses.fields(SamplingConfig)} - {"n"}
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
        ({"logit_bias": [1]}, r"logit_bias=\[1\] is not an object of numbers"),
        ({"logit_bias": {"yes": "much"}}, "logit_bias="),
        ({"logit_bias": {"yes": 101}}, "sampling.logit_bias: yes=101.0 .*between -100 and 100"),
        ({"allowed_token_ids": []}, "allowed_token_ids=.* allows no token"),
        ({"bad_words": [""]}, "sampling.bad_words="),
        ({"min_p": 2}, "sampling.min_p=2"),
        ({"logprobs": 1.5}, "logprobs=1.5 is not int"),
        ({"top_k": 10**23}, "sampling.top_k=1.* at least 0 and at most 2147483647"),
        ({"max_tokens": 10**400}, "sampling.max_tokens=1.* at least 1 and at most 2147483647"),
        ({"temperature": 10**400}, "temperature=1.* is not float"),
        ({"logit_bias": {"yes": 10**400}}, "logit_bias=.* is not an object of numbers"),
    ],
)
def test_what_no_setting_allows(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_params(value)


FORMS: list[Any] = [
    '{"logit_bias": {"yes": 2, "31": -1.5}, "bad_words": "no", "allowed_token_ids": [4, 5]}',
    {"logit_bias": {"yes": 2, "31": -1.5}, "bad_words": ["no"], "allowed_token_ids": [4, 5]},
]


def test_mappings_and_lists_come_as_text_struct_and_map() -> None:
    bias = pa.struct([("yes", pa.float64()), ("31", pa.float64()), ("other", pa.float64())])
    columns = [
        pa.array([FORMS[0]]),
        pa.array([FORMS[1]], PARAMS),
        pa.array(
            [FORMS[1]],
            pa.struct(
                [
                    ("logit_bias", bias),
                    ("bad_words", pa.list_(pa.string())),
                    ("allowed_token_ids", pa.list_(pa.int32())),
                ]
            ),
        ),
    ]
    expected = {"logit_bias": {"yes": 2.0, "31": -1.5}, "bad_words": ["no"], "allowed_token_ids": [4, 5]}
    for column in columns:
        assert parse_params(to_python(column)[0]) == expected
    by_id = pa.array([{"logit_bias": [(31, -1.5)]}], pa.struct([("logit_bias", pa.map_(pa.int64(), pa.float32()))]))
    assert parse_params(to_python(by_id)[0]) == {"logit_bias": {"31": -1.5}}


def test_a_rows_own_take_the_place_of_the_jobs() -> None:
    job = SamplingConfig(max_tokens=9, stop="x")
    assert row_sampling(job, {}) is job
    own = row_sampling(job, {"max_tokens": 3})
    assert (own.max_tokens, own.stop) == (3, ["x"])
    assert job.max_tokens == 9


def test_columns_that_can_hold_parameters() -> None:
    assert all(map(is_params_type, (pa.string(), PARAMS, pa.map_(pa.string(), pa.int64()))))
    assert not any(map(is_params_type, (pa.int64(), pa.list_(pa.string()))))

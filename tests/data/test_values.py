from __future__ import annotations

import datetime
import sys
from typing import Any

import pyarrow as pa
import pytest

from batchrun.data.values import clean_text, to_python

NS = 1_700_000_000_123_456_789
INSTANT = datetime.datetime(2023, 11, 14, 22, 13, 20, 123456)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([NS, None], pa.timestamp("ns")), [INSTANT, None]),
        (pa.array([[NS]], pa.list_(pa.timestamp("ns"))), [[INSTANT]]),
        (pa.array([[NS]], pa.large_list(pa.timestamp("ns"))), [[INSTANT]]),
        (pa.array([[NS, None]], pa.list_(pa.timestamp("ns"), 2)), [[INSTANT, None]]),
        (pa.array([{"at": NS}, None], pa.struct([("at", pa.timestamp("ns"))])), [{"at": INSTANT}, None]),
        (pa.array([[("k", NS)]], pa.map_(pa.string(), pa.timestamp("ns"))), [{"k": INSTANT}]),
        (pa.array([1001], pa.time64("ns")), [datetime.time(0, 0, 0, 1)]),
        (pa.array([1001], pa.duration("ns")), [datetime.timedelta(microseconds=1)]),
        (pa.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
        (pa.array([NS], pa.timestamp("ns")).dictionary_encode(), [INSTANT]),
    ],
)
def test_values(array: pa.Array, expected: list[Any]) -> None:
    assert to_python(array) == expected


def test_nanoseconds_need_no_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    [value] = to_python(pa.array([NS], pa.timestamp("ns", "Europe/Paris")))
    assert value.isoformat() == "2023-11-14T23:13:20.123456+01:00"


def test_one_value_that_python_cannot_hold_leaves_the_others() -> None:
    far = pa.array([0, 10**14], pa.timestamp("s"))
    good, bad = to_python(far)
    assert good == datetime.datetime(1970, 1, 1)
    assert isinstance(bad, ValueError)
    assert "timestamp[s]" in str(bad)


def test_broken_utf8_leaves_the_others() -> None:
    broken = pa.array([b"ok", b"\xff\xfe"]).view(pa.string())
    good, bad = to_python(broken)
    assert good == "ok"
    assert isinstance(bad, ValueError)


def test_clean_text() -> None:
    assert clean_text("plain") == "plain"
    assert clean_text("é日😀") == "é日😀"
    assert clean_text("a\ud835b\udc00") == "a\ufffdb\ufffd"


def test_last_of_equal_map_keys_wins() -> None:
    with pytest.warns(UserWarning, match="key 'k'"):
        assert to_python(pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int8()))) == [{"k": 2}]

from __future__ import annotations

from typing import Any

from batchrun.bench.measure import Measurement
from batchrun.bench.table import align, best_rival, comparison, ratio


def measured(engine: str, seconds: list[float | None], workload: str = "w", **more: Any) -> list[Measurement]:
    """One measurement for each round; None is a failure."""
    common = {
        "workload": workload,
        "engine": engine,
        "ours": engine.startswith("batchrun"),
        "rows": 4,
        "prompt_tokens": 60,
        "output_tokens": 40,
        "settings": "{}",
        "compute_floor_s": 0.5,
        "weights_floor_s": 1.0,
        "cpu_s": 1.5,
        "other_cpu_s": 0.0,
        "peak_rss_bytes": 2**31,
        "load_s": 3.0,
        "same_rows": 0.25,
    }
    return [
        Measurement(round=i, seconds=s, error=None if s else f"{engine} failed: why\nmore", **{**common, **more})
        for i, s in enumerate(seconds)
    ]


def test_ratios_are_taken_round_by_round():
    slow, fast = measured("a", [8.0, 9.0, 30.0]), measured("batchrun", [2.0, 3.0, 10.0])
    assert ratio(slow, fast) == 3.0
    assert ratio(slow[:1], fast) == 4.0
    assert ratio(slow, measured("batchrun", [None, 3.0])) == 3.0
    assert ratio(slow[:1], fast[1:]) is None


def test_the_best_rival_is_not_ours():
    some = [*measured("batchrun", [1.0]), *measured("b", [4.0]), *measured("a", [3.0]), *measured("c", [1.0], "v")]
    assert best_rival(some, "w") == "a"
    assert best_rival(some, "v") == "c"
    assert best_rival(some[:1], "w") is None


def test_a_line_for_each_engine_and_workload_fastest_first():
    some = [*measured("a", [8.0, 9.0]), *measured("batchrun", [2.0, 3.0]), *measured("b", [20.0, None])]
    lines = comparison(some)
    head, ours, rival, slow, failure = lines
    assert head.split()[:4] == ["workload", "engine", "median", "s"]
    assert ours.split()[:2] == ["w", "batchrun"]
    assert ours.split()[2:] == [
        "2.50", "2.00", "-", "3.00", "3.50x", "40", "1.00", "40%", "25%", "0.60", "0.00", "2.0", "3",
    ]  # fmt: skip
    assert rival.split()[1:3] == ["a", "8.50"]
    assert "1.00x" in rival
    assert slow.split()[1:3] == ["b", "20.00"]
    assert "0.40x" in slow
    assert failure == "b failed: why"


def test_failures_alone_need_no_head():
    assert comparison(measured("a", [None])) == ["a failed: why"]


def test_columns_are_aligned():
    assert align([["a", "b", "c"], ["long", "x", "10"]]) == ["a     b   c", "long  x  10"]

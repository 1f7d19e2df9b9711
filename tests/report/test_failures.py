from __future__ import annotations

import logging

import pytest

from batchrun.data.outputs import RowResult
from batchrun.errors import ErrorBudgetExceeded, ErrorType
from batchrun.report.failures import Failures

OK = RowResult("fine", "stop")


def bad(kind: ErrorType) -> RowResult:
    return RowResult(None, "error", "error", kind, f"this is {kind}")


def test_a_thousand_bad_rows_are_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(1.0, 1)
    with caplog.at_level(logging.WARNING):
        for row in range(1000):
            failures.add("a.parquet", row, bad("empty_prompt" if row % 2 else "template_error"))
        failures.add("a.parquet", 1000, OK)
    assert len(caplog.messages) == 6
    assert caplog.messages[0] == "a.parquet row 0: template_error: this is template_error"
    assert caplog.messages[5].endswith("more rows of this kind are only counted")
    assert failures.kinds == {"empty_prompt": 500, "template_error": 500}
    failures.check()


def test_the_budget_counts_from_a_number_of_rows_on() -> None:
    failures = Failures(0.5, 10)
    for row in range(9):
        failures.add("a", row, bad("invalid_row"))
        failures.check()
    failures.add("a", 9, OK)
    with pytest.raises(ErrorBudgetExceeded, match=r"9 of 10 rows.*max_error_rate=0\.5.*9 invalid_row.*a row 8"):
        failures.check()


def test_a_rate_that_is_met_exactly_is_within_the_budget() -> None:
    failures = Failures(0.5, 2)
    for row in range(10):
        failures.add("a", row, OK if row % 2 else bad("engine_error"))
    failures.check()
    failures.add("a", 10, bad("engine_error"))
    with pytest.raises(ErrorBudgetExceeded):
        failures.check()


def test_rows_under_way_count_as_good() -> None:
    failures = Failures(0.5, 10)
    for row in range(20):
        failures.add("a", row, bad("invalid_row"))
    failures.check(20)
    with pytest.raises(ErrorBudgetExceeded, match="20 of 39 rows"):
        failures.check(19)

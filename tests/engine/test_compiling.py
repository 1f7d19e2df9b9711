"""The first run of an installation says why it takes so long."""

from __future__ import annotations

import logging

import pytest
from numba import njit

from batchrun.engine import compiling
from batchrun.engine.compiling import tell_of_compiling


def test_it_is_told_once_and_not_of_what_is_compiled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling._teller, "told", False)
    caplog.set_level(logging.INFO, "batchrun")
    tell_of_compiling()
    tell_of_compiling()

    @njit
    def double(x):
        return 2 * x

    assert double(3) == 6
    assert double(4) == 8
    assert double(1.5) == 3.0
    assert [record.message for record in caplog.records].count(
        "compiling kernels for this processor: a minute or two, once for each installation"
    ) == 1

"""A device that fails in a step: what the user is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchrun.engine.host_copy import HostCopy
from batchrun.engine.params import Request, SamplingParams
from batchrun.errors import BatchrunError, StepError
from tests.engine.families import engine_of, load, random_prompt

LOST = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported asynchronously"


def test_an_error_while_a_step_is_launched_names_the_step_and_its_rows(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(llama)
    engine = engine_of(llm)
    for i in range(7):
        engine.add(Request(("part", i), random_prompt(i, 5 + i), SamplingParams(max_tokens=9, ignore_eos=True)))
    engine.step()
    engine.step()

    def fails(batch: Any) -> Any:
        raise RuntimeError(LOST)

    monkeypatch.setattr(engine.model, "hidden", fails)
    with pytest.raises(StepError) as caught:
        engine.step()
    for part in (
        "step 3",
        "memory access was encountered. The",
        "7 tokens of 7 rows",
        "('part', 0)",
        "2 others",
    ):
        assert part in str(caught.value)
    assert "asynchronously" not in str(caught.value)
    assert "the longest row is of 13 tokens" in str(caught.value)


def test_an_error_that_the_host_learns_of_late_ends_the_llm(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: HostCopy) -> Any:
        raise torch.AcceleratorError(LOST)

    monkeypatch.setattr(HostCopy, "read", fails)
    with (
        load(llama, overlap="on") as llm,
        pytest.raises(BatchrunError, match="step 1, or in the one before: CUDA error: an ill"),
    ):
        llm.generate([random_prompt(1, 4)], SamplingParams(max_tokens=9))


def test_other_errors_are_not_the_devices(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(llama)
    engine = engine_of(llm)
    engine.add(Request(0, [5, 6], SamplingParams(max_tokens=2)))

    def fails(batch: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(engine.model, "hidden", fails)
    with pytest.raises(RuntimeError, match="mat1"):
        engine.step()

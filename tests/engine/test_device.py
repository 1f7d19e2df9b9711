"""Which device a thread launches on: Triton does not ask where its tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchrun.bench.scheduler import _model_free_engine
from batchrun.config import EngineConfig
from batchrun.engine import loading
from batchrun.engine.params import Request, SamplingParams

SECOND = torch.device("cuda:1")


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that the thread is on just now, the innermost last."""
    stack: list[torch.device] = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        stack.append(chosen)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return stack


def test_steps_are_launched_on_the_device_of_the_model(entered: list[torch.device]) -> None:
    engine, launched_on = _model_free_engine(2), []
    launch = engine.executor.launch

    def noting(*given: Any) -> Any:
        launched_on.append(list(entered))
        return launch(*given)

    engine.executor.launch = noting  # type: ignore[method-assign, assignment]
    engine.model.device = SECOND
    engine.add(Request(0, [4, 5], SamplingParams(max_tokens=2, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    assert launched_on == 2 * [[SECOND]]
    assert entered == []


def test_a_model_is_loaded_and_tried_on_its_own_device(
    entered: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def reached(*given: Any, **named: Any) -> None:
        raise Reached(*entered)

    monkeypatch.setattr(loading, "choose_device", lambda name: SECOND)
    monkeypatch.setattr(loading, "choose_dtype", reached)
    checkpoint: Any = SimpleNamespace(model=SimpleNamespace(device="cuda:1", dtype="auto"), folder=Path())
    with pytest.raises(Reached) as raised:
        loading.load_single(checkpoint, None, EngineConfig())
    assert raised.value.args == (SECOND,)

"""The recorder of CUDA graphs, beside stand-ins of torch's streams and captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from batchrun.engine.recorder import CudaRecorder


class Device:
    """The current stream, and how captures went: one that fails leaves its own stream, as torch's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ordinary = self.current = Mock(name="ordinary")
        self.streams: list[Any] = []
        self.captured_on: list[Any] = []
        self.pools: list[Any] = []
        fakes = {
            "Stream": self._make_stream,
            "CUDAGraph": lambda: Mock(pool=lambda: "pool"),
            "current_stream": lambda: self.current,
            "device": lambda device: nullcontext(),
            "graph": self._capture,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "stream": self._on,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def _make_stream(self) -> Any:
        self.streams.append(Mock(name="side"))
        return self.streams[-1]

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def _capture(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        before, self.current = self.current, stream
        self.pools.append(pool)
        yield
        self.captured_on.append(stream)
        self.current = before


def test_all_are_recorded_on_one_stream_in_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a run beforehand, after what was launched before."""
    device, ran_on = Device(monkeypatch), []
    recorder = CudaRecorder(torch.device("cuda"))

    def function() -> tuple[()]:
        ran_on.append(device.current)
        return ()

    for _ in range(3):
        recorder.record(function)
    [side] = device.streams
    assert ran_on == 6 * [side]
    assert device.captured_on == 3 * [side]
    assert device.pools == [None, "pool", "pool"]
    assert side.wait_stream.call_args.args == (device.ordinary,)
    assert device.ordinary.wait_stream.call_args.args == (side,)
    assert device.current is device.ordinary


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    function = Mock(side_effect=[(), RuntimeError("not permitted when stream is capturing")])
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaRecorder(torch.device("cuda")).record(function)
    assert device.current is device.ordinary

"""Recording of what is launched on a device, to launch it again at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

Outputs = tuple[torch.Tensor, ...]


class Recorded(NamedTuple):
    """`replay` computes `outputs` anew, in place, from what now stands where the function read its inputs."""

    outputs: Outputs
    replay: Callable[[], None]


class Recorder(Protocol):
    """Records functions without arguments that read and write the same memory whenever they run."""

    def record(self, function: Callable[[], Outputs]) -> Recorded:
        """Runs the function, more than once. Raises RuntimeError for one that waits for the device."""

    def reserved(self) -> int:
        """Bytes of the device that this process has taken, if recording takes any."""


class CudaRecorder:
    """CUDA graphs. All that one records take their memory from one pool, so the largest is recorded first; what is in
    their outputs is valid until another is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None  # one for all: libraries keep a workspace for each, and torch what was freed on it

    def record(self, function: Callable[[], Outputs]) -> Recorded:
        with torch.cuda.device(self._device):
            before, stream = torch.cuda.current_stream(), self._stream or torch.cuda.Stream()
            self._stream = stream
            # Beforehand, kernels are compiled and libraries take their workspaces: a graph can hold neither.
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                function()
            before.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Only this thread may not wait: others may go on with what they do.
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    outputs = function()
            finally:
                # torch leaves its stream in place if the capture fails, and what is launched next would go there.
                torch.cuda.set_stream(before)
        self._pool = self._pool or graph.pool()
        return Recorded(outputs, graph.replay)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)


class EagerRecorder:
    """Runs the function again at each replay: what a graph must compute, wherever there are none."""

    def record(self, function: Callable[[], Outputs]) -> Recorded:
        function()
        outputs = function()

        def replay() -> None:
            for place, value in zip(outputs, function(), strict=True):
                place.copy_(value)

        return Recorded(outputs, replay)

    def reserved(self) -> int:
        return 0

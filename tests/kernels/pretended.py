"""A GPU that is none: tensors say that they are on it, lie in the host's memory, and refuse what a GPU's would.

What runs on it is real, so an engine can be held against `model.generate`. Errors are those of a GPU: operands on two
devices, kernels given tensors of the host, NumPy arrays of a device's tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Thread
from types import FrameType
from typing import Any, Self
from unittest.mock import MagicMock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

from batchrun.engine import linear

CUDA = torch.device("cuda", 0)
MEMORY = 2**30  # bytes
MOVES = ("aten::to", "aten::_to_copy")


class OnDevice(torch.Tensor):
    """`_host`, which lies there, as a tensor of the device."""

    _host: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        with torch.inference_mode(False):  # views of parameters are none of inference
            tensor = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=torch.device("meta"),
            )
        tensor._host = inner
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self._host})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self._host.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} outside of the device's context, in another thread perhaps")


class Device:
    """`waits`: what made the host wait until the device had done all that it was given, of each the operation and the
    line of Python that asked for it."""

    READS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique"})

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.captured: Graph | None = None
        self._pinned: dict[int, torch.Tensor] = {}  # by the place of their memory, which is held

    def pin(self, tensor: torch.Tensor) -> None:
        """It is in memory that the device copies from and to by itself."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor

    def note_copy(self, host: torch.Tensor, non_blocking: bool) -> None:
        """One between the device and this tensor."""
        if not non_blocking or host.untyped_storage().data_ptr() not in self._pinned:
            self._note("a copy")

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        """An operation on tensors of the device."""
        short = name.removeprefix("aten::")
        masks = args[1] if short in ("index", "index_put_", "index_put") else ()
        if short in self.READS or any(x is not None and x.dtype == torch.bool for x in masks):
            self._note(short)

    def _note(self, what: str) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
            frame = frame.f_back
        place = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if self.captured is not None:
            raise RuntimeError(f"not permitted when stream is capturing: {what}: {place}")
        self.waits.append(f"{what}: {place}")

    @contextmanager
    def capture(self, graph: Graph, **_: Any) -> Iterator[None]:
        """torch.cuda.graph"""
        self.captured = graph
        try:
            yield
        finally:
            self.captured = None


class Graph:
    """What CUDA graphs are: operations and launches with the memory that they had, done again without the host."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []

    def pool(self) -> int:
        return 1

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, changes: bool) -> None:
        """An operation on tensors of the host, and what it gave: that is written again, unless it is memory of its
        operands; with `changes` it writes to these."""
        taken = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        own = [x.untyped_storage().data_ptr() not in taken for x in made]
        if made and not any(own) and not changes:
            return

        def again() -> None:
            for old, new, owned in zip(made, tree_leaves(func(*args, **kwargs)), own, strict=True):
                if owned:
                    old.copy_(new)

        self._calls.append(again)

    def note_launch(self, launch: Callable[[], Any]) -> None:
        self._calls.append(launch)

    def replay(self) -> None:
        with _disable_current_modes(), torch.inference_mode():
            for call in self._calls:
                call()


class _Values(TorchFunctionMode):
    """Numbers of Python that are sent to the device: torch would ask it for memory itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        device = given.get("device")
        if func not in (torch.tensor, torch.as_tensor) or device is None or torch.device(device).type != CUDA.type:
            return func(*args, **given)
        if isinstance(args[0], torch.Tensor):
            return args[0].to(**given)
        return func(*args, **{**given, "device": "cpu"}).to(CUDA)


class _Mode(TorchDispatchMode):
    def __init__(self, there: Device) -> None:
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # torch initialises no CUDA then
        self._there = there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        name = func._schema.name
        changes = func._schema.is_mutable
        if name == "aten::_has_compatible_shallow_copy_type":
            return False
        leaves = tree_leaves((args, kwargs))
        there = [x for x in leaves if isinstance(x, OnDevice)]
        devices = [x for x in leaves if isinstance(x, torch.device)]
        is_there = devices[0].type != "cpu" if devices else bool(there)  # `x.to(y)` asks y below Python: meta
        non_blocking = kwargs.get("non_blocking", False) or any(x is True for x in args[2:])
        if name == "aten::copy_":
            is_there = isinstance(args[0], OnDevice)
            host = [x for x in args[:2] if not isinstance(x, OnDevice)]
            if len(host) == 1:
                self._there.note_copy(host[0], non_blocking)
        elif name in MOVES and is_there != bool(there):
            moved = _inner(args[0])
            self._there.note_copy(moved, non_blocking)
            args = (moved.clone(), *args[1:])
        elif there:
            host = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) and x.ndim]
            assert not host, f"{name}: tensors on {CUDA} and on the host, {[x.shape for x in host]}"
            self._there.note(name, args)
        pin = kwargs.pop("pin_memory", False)
        args, kwargs = tree_map(_on_host, (args, kwargs))
        given = {id(x._host): x for x in there}

        def outer(x: Any) -> Any:
            if not is_there or not isinstance(x, torch.Tensor):
                return x
            same = given.get(id(x))
            return OnDevice(x) if same is None else same

        if name == "aten::histc" and not args[0].is_floating_point():
            func = _count
        result = func(*args, **kwargs)
        if pin:
            self._there.pin(result)
        elif self._there.captured is not None and (is_there or there):
            self._there.captured.note(func, args, kwargs, result, changes)
        return tree_map(outer, result)


def _inner(value: Any) -> Any:
    return value._host if isinstance(value, OnDevice) else value


def _count(x: torch.Tensor, *bins: Any, **limits: Any) -> torch.Tensor:
    """histc of integers, which only a GPU makes."""
    return torch.histc(x.float(), *bins, **limits).to(x.dtype)


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else _inner(value)


@contextmanager
def pretended() -> Iterator[Device]:
    """Within, `cuda:0` is there: a Hopper with eight multiprocessors and MEMORY."""
    there = Device()
    call = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            assert isinstance(value, OnDevice) or not isinstance(value, torch.Tensor), (
                f"{self.fn}: a tensor of the host"
            )
        again = partial(call, self, *map(_inner, args), **{name: _inner(value) for name, value in kwargs.items()})
        if there.captured is not None:
            there.captured.note_launch(again)
        return again()

    run = Thread.run

    def run_there(self: Thread) -> None:
        with _Values(), _Mode(there):
            run(self)

    properties = MagicMock(multi_processor_count=8, total_memory=MEMORY)
    with pytest.MonkeyPatch.context() as patch, _Values(), _Mode(there):
        patch.setattr(GridExecutor, "__call__", launch)
        patch.setattr(Thread, "run", run_there)
        patch.setattr(linear, "PLAIN", (*linear.PLAIN, OnDevice))
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "device": lambda device: nullcontext(),
            "get_device_properties": lambda device=None: properties,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_name": lambda device=None: "a GPU that is none",
            "mem_get_info": lambda device=None: (MEMORY, MEMORY),
            "memory_allocated": lambda device=None: 0,
            "memory_reserved": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "current_stream": lambda device=None: MagicMock(),
            "Event": MagicMock,
            "Stream": MagicMock,
            "stream": lambda stream: nullcontext(),
            "set_stream": lambda stream: None,
            "CUDAGraph": Graph,
            "graph": there.capture,
            "synchronize": lambda device=None: None,
        }.items():
            patch.setattr(torch.cuda, name, value)
        yield there

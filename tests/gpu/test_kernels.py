"""Every kernel, compiled: the tests of tests/kernels, with their tensors on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.kernels import (
    test_sample,
)

DEVICE = torch.device("cuda")
MODULES = [module for name, module in list(globals().items()) if name.startswith("test_")]
WITHOUT_KERNELS = {"test_noise_is_that_of_the_engine"}


def on_device(module: ModuleType, test: Callable[..., None]) -> Callable[..., None]:
    """The test with the tensors that it makes, is given, and finds in its module on the GPU."""

    @wraps(test)
    def run(*positional: Any, **given: Any) -> None:
        with pytest.MonkeyPatch.context() as patch, DEVICE:
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor):
                    patch.setattr(module, name, value.to(DEVICE))
            if module is test_sample:
                patch.setattr(test_sample, "by_engine", partial(_on_cpu, test_sample.by_engine))
            test(*positional, **tree_map(_moved, given))
        torch.cuda.synchronize()

    return run


def _on_cpu(by_engine: Callable[..., torch.Tensor], logits: torch.Tensor, values: Any) -> torch.Tensor:
    with torch.device("cpu"):
        tokens = by_engine(logits.cpu(), {name: value.cpu() for name, value in values.items()})
    return tokens.to(DEVICE)


def _moved(value: Any) -> Any:
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def _class_of(module: ModuleType) -> type:
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_") and callable(test)}
    methods = {
        name: staticmethod(on_device(module, test)) for name, test in tests.items() if name not in WITHOUT_KERNELS
    }
    return type(_class_name(module), (), methods)


def _class_name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2].title().replace("_", "")


globals().update({_class_name(module): _class_of(module) for module in MODULES})

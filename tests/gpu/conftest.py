"""Tests of this folder need a GPU and compiled kernels: `python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import family_folder
from tests.engine.test_oracle import reference

__all__ = ["family_folder", "reference"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, and skip those that cannot run."""
    reason = None
    if not torch.cuda.is_available():
        reason = "there is no GPU that torch can use"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        reason = "kernels are interpreted, as tests/kernels wants it: run tests/gpu alone"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

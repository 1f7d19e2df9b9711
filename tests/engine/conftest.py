"""Tiny models, each saved once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from batchrun.assets import cache_folder
from tests.assets import prepare_gemma
from tests.engine.families import make_model

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> folder of its tiny model. Tests that change files copy it first."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = make_model(family, tmp_path_factory.mktemp(family))
        return folders[family]

    return folder


@pytest.fixture(scope="session")
def llama(family_folder: Callable[[str], Path]) -> Path:
    return family_folder("llama")


@pytest.fixture(scope="session")
def gemma() -> Path:
    """Folder of Gemma 3 270M, a real base model with sliding windows, in bfloat16."""
    return prepare_gemma(cache_folder())

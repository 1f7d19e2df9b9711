"""Shared by every test: no hub, one thread, and the small real model and rows of the demo, fetched once."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import pytest
import torch

from batchrun.assets import cache_folder
from batchrun.demo import prepare_data, prepare_model

# The same examples on every run, and no verdict from the clock.
hypothesis.settings.register_profile("batchrun", deadline=None, derandomize=True)
hypothesis.settings.load_profile("batchrun")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests run side by side, so a pool of threads would cost more than it brings; and what a test set ends with it."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, a real chat model in bfloat16."""
    return prepare_model(cache_folder())


@pytest.fixture(scope="session")
def reviews() -> Path:
    """Parquet file of 3,708 real review sentences: id, sentiment, text."""
    return prepare_data(cache_folder())

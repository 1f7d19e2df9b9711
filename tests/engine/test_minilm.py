"""all-MiniLM-L6-v2 on real sentences, against transformers: mean pooling, length 1, 256 tokens at most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from batchrun import LLM
from batchrun.assets import cache_folder
from tests.assets import prepare_minilm

CLOSE = 1e-5


@pytest.fixture(scope="module")
def minilm() -> Path:
    return prepare_minilm(cache_folder())


@pytest.fixture(scope="module")
def llm(minilm: Path) -> Any:
    with LLM(str(minilm), task="embed", dtype="float32", device="cpu", offline=True) as model:
        yield model


@pytest.fixture(scope="module")
def texts(reviews: Path) -> list[str]:
    column = pq.read_table(reviews, columns=["text"])["text"].slice(0, 96)
    return [*map(str, column.to_pylist()), "a text that is too long, and is cut off at its end " * 40]


@torch.inference_mode()
def reference(folder: Path, texts: list[str]) -> np.ndarray:
    """One text at a time, without padding."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = [tokenizer(text, truncation=True, max_length=256, return_tensors="pt") for text in texts]
    means = torch.stack([model(**inputs).last_hidden_state[0].mean(0) for inputs in given])
    return torch.nn.functional.normalize(means).numpy()


def test_vectors_are_those_of_transformers(llm: LLM, minilm: Path, texts: list[str]) -> None:
    found = llm.embed(texts)
    assert found.shape == (97, 384)
    np.testing.assert_allclose(found, reference(minilm, texts), atol=CLOSE)


def test_vectors_do_not_depend_on_the_batch(llm: LLM, texts: list[str]) -> None:
    together = llm.embed(texts)
    np.testing.assert_allclose(np.concatenate([llm.embed(text) for text in texts[:8]]), together[:8], atol=CLOSE)
    np.testing.assert_allclose(llm.embed(texts[40:60]), together[40:60], atol=CLOSE)


def test_meaning_is_near(llm: LLM) -> None:
    tuna, fish, tax = llm.embed(["The cat ate the tuna.", "A kitten eats fish.", "The tax form is due in April."])
    assert tuna @ fish > 0.5 > tuna @ tax + 0.2

"""The library door for texts that are read only: LLM(task="embed").embed and LLM(task="rank").rank."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from batchrun import LLM
from batchrun.errors import BatchrunError, ConfigError
from tests.engine.encoders import class_logits, hidden_states, make_encoder, make_tokenizer, random_texts


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder("bert", tmp_path_factory.mktemp("encoder"))


def test_embed_in_order_and_cut_to_fit(encoder: Path) -> None:
    texts = random_texts(40, 30)
    with LLM(str(encoder), task="embed", pooling="cls", normalize=False, dtype="float32", max_model_len=16) as llm:
        found = llm.embed(texts)
        assert llm.embed(texts[0]).shape == (1, 32)
        assert llm.embed([]).shape == (0, 32)
        with pytest.raises(BatchrunError, match="not made to rank: use LLM"):
            llm.rank(texts)
    tokenizer = make_tokenizer()
    rows = [tokenizer(text, truncation=True, max_length=16)["input_ids"] for text in texts]
    np.testing.assert_allclose(found, [hidden[0] for hidden in hidden_states(encoder, rows)], atol=1e-4)
    assert found.dtype == np.float32


def test_rank_takes_pairs(tmp_path: Path) -> None:
    folder, tokenizer = make_encoder("bert", tmp_path, classes=2), make_tokenizer()
    pairs = list(zip(random_texts(10, 9, seed=1), random_texts(10, 9, seed=2), strict=True))
    with LLM(str(folder), task="rank", activation="none", dtype="float32") as llm:
        found = llm.rank(pairs)
    np.testing.assert_allclose(found, class_logits(folder, [dict(tokenizer(*pair)) for pair in pairs]), atol=1e-4)


def test_options_are_those_of_the_task(encoder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no option activation: there are .*pooling"):
        LLM(str(encoder), task="embed", activation="none")
    with pytest.raises(ConfigError, match="task='guess' is not one of generate, embed, rank"):
        LLM(str(encoder), task="guess")


def test_copies_of_models_that_pool_otherwise_differ(encoder: Path) -> None:
    copies = set()
    for pooling in ("cls", "mean"):
        with LLM(str(encoder), task="embed", pooling=pooling) as llm:
            copies.add(pickle.dumps(llm))
    assert len(copies) == 2

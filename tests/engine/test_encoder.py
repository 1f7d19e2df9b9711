"""The engine for vectors, against transformers one text at a time: every family, pooling, any mix of lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchrun.config import EmbedConfig, EngineConfig, ModelConfig, RankConfig
from batchrun.engine.checkpoint import load_tokenizer, open_checkpoint
from batchrun.engine.encoder import Encoder
from batchrun.engine.encoder_config import embedding, scores
from batchrun.engine.encoder_model import EncoderModel
from batchrun.engine.loading import load_single
from batchrun.engine.params import Completion, Request
from batchrun.engine.pooler import EmbeddingPooler
from batchrun.engine.pooling import pool
from batchrun.engine.support import UnsupportedModel
from batchrun.errors import ConfigError
from tests.engine.encoders import DECODERS, ENCODERS, class_logits, hidden_states, make_encoder
from tests.engine.families import VOCABULARY

CLOSE = 1e-5


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(family, classes) -> folder of its tiny model."""
    folders: dict[tuple[str, int], Path] = {}

    def folder(family: str, classes: int = 0) -> Path:
        if (family, classes) not in folders:
            folders[family, classes] = make_encoder(family, tmp_path_factory.mktemp(family), classes)
        return folders[family, classes]

    return folder


def random_rows(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[1, *rng.integers(4, VOCABULARY, rng.integers(1, longest)).tolist(), 2] for _ in range(count)]


def load_embedder(folder: Path, dtype: str = "float32", **settings: Any) -> Encoder:
    checkpoint = open_checkpoint(ModelConfig(path=str(folder), dtype=dtype, device="cpu"), purpose="embed")
    tokenizer = load_tokenizer(checkpoint)
    pooler, _ = embedding(checkpoint, tokenizer, EmbedConfig(**settings))
    engine = load_single(checkpoint, tokenizer, EngineConfig(max_batched_tokens=256), pooler=pooler)
    assert isinstance(engine, Encoder)
    return engine


def load_ranker(folder: Path, **settings: Any) -> Encoder:
    checkpoint = open_checkpoint(ModelConfig(path=str(folder), dtype="float32", device="cpu"), purpose="rank")
    tokenizer = load_tokenizer(checkpoint)
    pooler = scores(checkpoint, tokenizer, RankConfig(**settings))
    engine = load_single(checkpoint, tokenizer, EngineConfig(max_batched_tokens=256), pooler=pooler)
    assert isinstance(engine, Encoder)
    return engine


def vectors(engine: Encoder, rows: Sequence[Sequence[int]], **types: list[list[int]]) -> np.ndarray:
    """[rows, size], all added before the first step."""
    for number, row in enumerate(rows):
        engine.add(Request(number, row, type_ids=types["types"][number] if types else None))
    engine.check_integrity()
    found: dict[Any, Completion] = {}
    while engine.has_work():
        found |= {completion.key: completion for completion in engine.step()}
    values = [found[number].values for number in range(len(rows))]
    assert all(value is not None and value.dtype == np.float32 for value in values)
    return np.stack(values)  # type: ignore[arg-type]


def pooled(hidden: np.ndarray, pooling: str) -> np.ndarray:
    places = np.arange(1, len(hidden) + 1)[:, None]
    found: np.ndarray = {
        "cls": lambda: hidden[0],
        "last": lambda: hidden[-1],
        "mean": lambda: hidden.mean(0),
        "max": lambda: hidden.max(0),
        "weighted_mean": lambda: (hidden * places).sum(0) / places.sum(),
        "mean_sqrt_len": lambda: hidden.sum(0) / len(hidden) ** 0.5,
    }[pooling]()
    return found


def unit(found: np.ndarray) -> np.ndarray:
    return found / np.linalg.norm(found, axis=-1, keepdims=True)


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_vectors_are_those_of_transformers_whatever_the_batch(encoder_folder: Callable[..., Path], family: str) -> None:
    folder = encoder_folder(family)
    rows = random_rows(40)
    engine = load_embedder(folder)
    usual = "last" if family in DECODERS else "mean"
    expected = np.stack([unit(pooled(hidden, usual)) for hidden in hidden_states(folder, rows)])
    np.testing.assert_allclose(vectors(engine, rows), expected, atol=CLOSE)
    # Alone, and in another order.
    np.testing.assert_allclose(vectors(engine, rows[:1]), expected[:1], atol=CLOSE)
    np.testing.assert_allclose(vectors(engine, rows[::-1])[::-1], expected, atol=CLOSE)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean", "max", "weighted_mean", "mean_sqrt_len"])
def test_pooling_without_normalising(encoder_folder: Callable[..., Path], pooling: str) -> None:
    folder, rows = encoder_folder("bert"), random_rows(10)
    expected = np.stack([pooled(hidden, pooling) for hidden in hidden_states(folder, rows)])
    found = vectors(load_embedder(folder, pooling=pooling, normalize=False), rows)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_prompt_that_is_not_pooled() -> None:
    hidden = torch.randn(2, 6, 4)
    found = pool(hidden, torch.tensor([6, 4]), "mean", skip=2)
    torch.testing.assert_close(found[1], hidden[1, 2:4].mean(0))


def test_dimensions_are_cut_before_the_length_is_made_1(encoder_folder: Callable[..., Path]) -> None:
    folder, rows = encoder_folder("bert"), random_rows(5)
    whole = vectors(load_embedder(folder), rows)
    cut = vectors(load_embedder(folder, dimensions=7), rows)
    assert cut.shape == (5, 7)
    np.testing.assert_allclose(cut, unit(whole[:, :7]), atol=CLOSE)
    with pytest.raises(ConfigError, match=r"embed\.dimensions=33 is more than the 32 that the model has"):
        load_embedder(folder, dimensions=33)


def test_bfloat16_gives_float32_vectors_close_by(encoder_folder: Callable[..., Path]) -> None:
    rows = random_rows(20)
    exact = vectors(load_embedder(encoder_folder("bert")), rows)
    rough = vectors(load_embedder(encoder_folder("bert"), dtype="bfloat16"), rows)
    assert np.abs(rough - exact).max() > 1e-6
    assert (exact * rough).sum(1).min() > 0.98


@pytest.mark.parametrize(("family", "classes"), [("bert", 1), ("roberta", 3), ("distilbert", 2), ("qwen3", 1)])
def test_scores_are_those_of_transformers(encoder_folder: Callable[..., Path], family: str, classes: int) -> None:
    folder, rows = encoder_folder(family, classes), random_rows(30)
    expected = class_logits(folder, [{"input_ids": row} for row in rows])
    found = vectors(load_ranker(folder, activation="none"), rows)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    if classes > 1:
        soft = torch.tensor(expected).softmax(-1).numpy()
        np.testing.assert_allclose(vectors(load_ranker(folder), rows), soft, atol=CLOSE)


def test_pairs_have_their_types(encoder_folder: Callable[..., Path]) -> None:
    folder, rows = encoder_folder("bert", 1), random_rows(12)
    types = [[0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2) for row in rows]
    given = [{"input_ids": row, "token_type_ids": kinds} for row, kinds in zip(rows, types, strict=True)]
    expected = class_logits(folder, given)
    engine = load_ranker(folder, activation="sigmoid")
    found = vectors(engine, rows, types=types)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-expected)), atol=CLOSE)
    assert np.abs(vectors(engine, rows) - found).max() > 1e-3  # they count


def test_a_decoder_without_padding_token_scores_rows_that_end_with_any_token(tmp_path: Path) -> None:
    folder = make_encoder("qwen3", tmp_path, 1, pad_token_id=None)
    rows = [[*row, token] for token, row in zip((0, 2, 5, 0), random_rows(4), strict=True)]
    expected = class_logits(folder, [{"input_ids": row} for row in rows])
    np.testing.assert_allclose(vectors(load_ranker(folder, activation="none"), rows), expected, atol=1e-4)


def test_texts_that_cannot_run_are_refused_and_the_others_are_not_touched(
    encoder_folder: Callable[..., Path],
) -> None:
    engine = load_embedder(encoder_folder("bert"))
    bad = {"empty": [], "long": [4] * 600, "outside": [4, 256]}
    for key, ids in bad.items():
        engine.add(Request(key, ids))
    engine.add(Request("good", [1, 5, 2]))
    found: dict[Any, Completion] = {}
    while engine.has_work():
        found |= {completion.key: completion for completion in engine.step()}
    assert found["good"].values is not None
    assert {key: found[key].error_type for key in bad} == {
        "empty": "empty_prompt",
        "long": "prompt_too_long",
        "outside": "invalid_row",
    }
    assert "at most 512 fit" in str(found["long"].error)


def test_what_is_aborted_or_dropped_is_gone(encoder_folder: Callable[..., Path]) -> None:
    engine = load_embedder(encoder_folder("bert"))
    room = engine.room
    for number, row in enumerate(random_rows(6, longest=5)):
        engine.add(Request(number, row))
    assert engine.room == room - 6
    engine.abort(3)
    engine.abort("unknown")
    engine.check_integrity()
    finished: list[Any] = []
    while engine.has_work():
        finished += [completion.key for completion in engine.step()]
    assert sorted(finished) == [0, 1, 2, 4, 5]
    for number, row in enumerate(random_rows(6)):
        engine.add(Request(number, row))
    assert sorted(engine.drop_waiting()) == list(range(6))
    assert not engine.has_work()
    assert engine.room == room


def test_steps_tell_what_was_padding(encoder_folder: Callable[..., Path]) -> None:
    engine = load_embedder(encoder_folder("bert"))
    rows = random_rows(50)
    vectors(engine, rows)
    steps = engine.take_steps()
    assert sum(step.tokens for step in steps) == sum(map(len, rows))
    assert all(0 <= step.padding <= 256 - step.tokens for step in steps)
    assert engine.take_steps() == []


def test_a_model_whose_vectors_depend_on_the_batch_is_refused() -> None:
    class Careless(torch.nn.Module):
        """Takes padding for tokens."""

        def __init__(self) -> None:
            super().__init__()
            from transformers import BertConfig

            self.config = BertConfig()
            self.embedding = torch.nn.Embedding(64, 8)

        def get_input_embeddings(self) -> torch.nn.Embedding:
            return self.embedding

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.embedding(input_ids)
            return type("Output", (), {"last_hidden_state": hidden + hidden.mean(1, keepdim=True)})

    model = EncoderModel(Careless(), EmbeddingPooler("mean", 8, True, 64), 0)
    with pytest.raises(UnsupportedModel, match=r"bert: the vector of a text changes by .* a longer text"):
        model.check()
    model.pooler = EmbeddingPooler("mean", 9, True, 64)
    with pytest.raises(UnsupportedModel, match="its vectors have 8 numbers, and its config says 9"):
        model.check()

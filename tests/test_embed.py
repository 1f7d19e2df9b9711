"""task=embed and rank in whole jobs: columns, resume, equal texts, long texts, and the modes around a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchrun import dry, runner
from batchrun.compose import compose_config
from batchrun.config import Config
from batchrun.data.merge import merge_parts
from batchrun.data.outputs import OutputSchema, RowResult
from batchrun.data.plan import STATE_FOLDER, Chunk
from batchrun.engine.params import Request
from batchrun.engine.support import UnsupportedModel
from batchrun.errors import BatchrunError, ConfigError, FingerprintMismatch, InputError
from tests.engine.encoders import class_logits, hidden_states, make_encoder, make_tokenizer, random_texts, write_modules
from tests.test_runner import read, write_input


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_encoder("bert", tmp_path_factory.mktemp("embedder"))
    write_modules(folder, {"pooling_mode_mean_tokens": True}, "Normalize", max_seq_length=20)
    return folder


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder("bert", tmp_path_factory.mktemp("reranker"), classes=1)


def job(name: str, model: Path, source: Path, output: Path, *more: str) -> Config:
    given = (f"job={name}", f"model={model}", "model.dtype=float32", f"input.path={source}", f"output.path={output}")
    return compose_config([*given, "engine.workers=1", "output.chunk_rows=50", "engine.max_batched_tokens=512", *more])


def expected(model: Path, texts: list[str], longest: int = 20) -> np.ndarray:
    tokenizer = make_tokenizer()
    rows = [tokenizer(text, truncation=True, max_length=longest)["input_ids"] for text in texts]
    pooled = np.stack([hidden.mean(0) for hidden in hidden_states(model, rows)])
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def table(output: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(part) for part in sorted(output.glob("part-*.parquet"))])


def embeddings(output: Path) -> np.ndarray:
    column = table(output)["embedding"].combine_chunks()
    found: np.ndarray = column.values.to_numpy().reshape(len(column), -1)
    return found


def test_embed(embedder: Path, tmp_path: Path) -> None:
    texts = random_texts(120, 40)
    source = write_input(tmp_path / "in", texts, files=2)
    assert runner.run(job("embed", embedder, source, tmp_path / "out")) == 0
    found = table(tmp_path / "out")
    assert found.schema.field("embedding").type == pa.list_(pa.float32(), 32)
    assert "completion" not in found.schema.names
    np.testing.assert_allclose(embeddings(tmp_path / "out"), expected(embedder, texts), atol=1e-5)
    lengths = [len(text.split()) + 2 for text in texts]
    assert found["prompt_tokens"].to_pylist() == [min(20, length) for length in lengths]
    assert found["truncated_tokens"].to_pylist() == [max(0, length - 20) for length in lengths]
    summary = json.loads((tmp_path / "out" / STATE_FOLDER / "summary.json").read_text())
    assert 0 < summary["padding"] < 0.5


def test_equal_texts_are_computed_once(embedder: Path, tmp_path: Path) -> None:
    texts = random_texts(10, 15) * 4
    source = write_input(tmp_path / "in", texts)
    runner.run(job("embed", embedder, source, tmp_path / "out"))
    assert sum(row["deduplicated"] for row in read(tmp_path / "out")) == 30
    np.testing.assert_allclose(embeddings(tmp_path / "out"), expected(embedder, texts), atol=1e-5)


def test_rows_without_text_have_no_vector(embedder: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", ["w5 w6", None, "w7", "  "])
    runner.run(job("embed", embedder, source, tmp_path / "out", "run.max_error_rate=1"))
    rows = read(tmp_path / "out")
    assert [row["error_type"] for row in rows] == [None, "empty_prompt", None, "empty_prompt"]
    assert [row["embedding"] is None for row in rows] == [False, True, False, True]


def test_a_text_that_is_too_long_is_an_error_if_it_may_not_be_cut(embedder: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", ["w5 " * 30, "w6"])
    runner.run(job("embed", embedder, source, tmp_path / "out", "prompt.overlong=error"))
    first, second = read(tmp_path / "out")
    assert (first["error_type"], second["error_type"]) == ("prompt_too_long", None)
    assert "32 tokens" in first["error"]
    left = tmp_path / "left"
    runner.run(job("embed", embedder, source, left, "prompt.overlong=truncate_left"))
    assert read(left)[0]["prompt_tokens"] == 20
    with pytest.raises(InputError, match=r"prompt\.overlong=truncate_middle .* use truncate_right"):
        runner.run(job("embed", embedder, source, left, "prompt.overlong=truncate_middle"))


def test_a_run_goes_on_from_its_journal(embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors of a run that failed in the middle of a chunk come back exactly."""
    texts = random_texts(60, 15)
    source = write_input(tmp_path / "in", texts)
    config = job("embed", embedder, source, tmp_path / "out", "output.chunk_rows=60", "engine.max_batched_tokens=64")
    load, steps = runner.load_engine, 0

    def failing(*arguments: Any) -> Any:
        engine = load(*arguments)
        step = engine.step

        def counted() -> Any:
            nonlocal steps
            steps += 1
            if steps == 5:
                raise BatchrunError("the lights went out")
            return step()

        engine.step = counted  # type: ignore[method-assign]
        return engine

    with pytest.raises(BatchrunError, match="lights"):
        runner.run(config, load=failing)
    done: list[int] = []

    def counting(*arguments: Any) -> Any:
        engine = load(*arguments)
        add = engine.add

        def counted(request: Request) -> None:
            done.append(1)
            add(request)

        engine.add = counted  # type: ignore[method-assign]
        return engine

    assert runner.run(config, load=counting) == 0
    assert 0 < len(done) < 60
    np.testing.assert_allclose(embeddings(tmp_path / "out"), expected(embedder, texts), atol=1e-5)


def test_results_come_back_from_a_part(tmp_path: Path) -> None:
    types = {"embedding": pa.list_(pa.float32(), 3)}
    config = job("embed", tmp_path, tmp_path, tmp_path / "out").output
    schema = OutputSchema(config, pa.schema({"text": pa.string()}), "f", task_types=types)
    vector = np.array([0.1, 2, 3], dtype=np.float32)
    results = [RowResult(values={"embedding": vector}), RowResult(status="error")]
    part = schema.table([pa.record_batch({"text": ["a", "b"]})], Chunk(0, 0, 0, 2), "in", results)
    first, second = schema.results(part)
    assert first.values is not None
    assert second.values is not None
    assert first.values["embedding"] == vector.tolist()
    assert second.values["embedding"] is None


def test_what_changes_vectors_is_in_the_fingerprint(embedder: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", random_texts(5, 10))
    runner.run(job("embed", embedder, source, tmp_path / "out"))
    # Saying what the files say changes nothing.
    runner.run(job("embed", embedder, source, tmp_path / "out", "embed.pooling=mean", "embed.normalize=true"))
    with pytest.raises(FingerprintMismatch, match=r"embed\.pooling"):
        runner.run(job("embed", embedder, source, tmp_path / "out", "embed.pooling=cls"))


def test_merge_keeps_the_vectors(embedder: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", random_texts(120, 10))
    runner.run(job("embed", embedder, source, tmp_path / "out"))
    merge_parts(tmp_path / "out", tmp_path / "merged", 512, "zstd")
    (merged,) = (tmp_path / "merged").glob("*.parquet")
    assert pq.read_table(merged)["embedding"].equals(table(tmp_path / "out")["embedding"])


def test_two_processes_give_the_same(embedder: Path, tmp_path: Path) -> None:
    texts = random_texts(80, 15)
    source = write_input(tmp_path / "in", texts)
    runner.run(job("embed", embedder, source, tmp_path / "out", "engine.workers=2"))
    np.testing.assert_allclose(embeddings(tmp_path / "out"), expected(embedder, texts), atol=1e-5)


def test_plan_and_preview(embedder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_input(tmp_path / "in", ["w5 w6", "w7"])
    assert dry.plan(job("embed", embedder, source, tmp_path / "out")) == 0
    planned = capsys.readouterr().out
    assert "KV cache" not in planned
    assert "about 7 in prompts, 7 of them to compute\n" in planned
    assert dry.preview(job("embed", embedder, source, tmp_path / "out")) == 0
    assert "[CLS] w5 w6 [SEP]" in capsys.readouterr().out


def test_a_prompt_of_the_model_comes_before_each_text(tmp_path: Path) -> None:
    model = make_encoder("bert", tmp_path / "model")
    write_modules(model, {"pooling_mode_cls_token": True}, do_lower_case=True)
    said = {"prompts": {"query": "w4 w5 "}, "default_prompt_name": None}
    (model / "config_sentence_transformers.json").write_text(json.dumps(said))
    source = write_input(tmp_path / "in", ["W6 "])
    runner.run(job("embed", model, source, tmp_path / "out", "embed.prompt=query"))
    hidden = hidden_states(model, [[1, 4, 5, 6, 2]])[0][0]
    np.testing.assert_allclose(embeddings(tmp_path / "out")[0], hidden, atol=1e-4)


def test_an_encoder_that_is_asked_to_generate(embedder: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", ["w5"])
    with pytest.raises(UnsupportedModel, match="task=embed makes embeddings of texts with it"):
        runner.run(job("generate", embedder, source, tmp_path / "out"))


def write_pairs(folder: Path, rows: int = 40) -> Path:
    folder.mkdir()
    pairs = {"query": random_texts(rows, 8, seed=1), "text": random_texts(rows, 20, seed=2)}
    pq.write_table(pa.table(pairs), folder / "pairs.parquet")
    return folder


def test_rank_scores_pairs(reranker: Path, tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "in")
    runner.run(job("rank", reranker, source, tmp_path / "out"))
    rows, tokenizer = read(tmp_path / "out"), make_tokenizer()
    given = [dict(tokenizer(row["query"], row["text"])) for row in rows]
    assert given[0]["token_type_ids"][-1] == 1
    scores = 1 / (1 + np.exp(-class_logits(reranker, given)[:, 0]))
    np.testing.assert_allclose([row["score"] for row in rows], scores, atol=1e-5)
    assert table(tmp_path / "out").schema.field("score").type == pa.float32()


def test_rank_cuts_the_longer_of_a_pair(reranker: Path, tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "in")
    runner.run(job("rank", reranker, source, tmp_path / "out", "model.max_model_len=16", "rank.activation=none"))
    rows, tokenizer = read(tmp_path / "out"), make_tokenizer()
    given = [dict(tokenizer(row["query"], row["text"], truncation=True, max_length=16)) for row in rows]
    np.testing.assert_allclose([row["score"] for row in rows], class_logits(reranker, given)[:, 0], atol=1e-4)
    assert max(row["prompt_tokens"] for row in rows) == 16
    assert any(row["truncated_tokens"] for row in rows)


def test_rank_with_a_classifier_of_single_texts(tmp_path: Path) -> None:
    model = make_encoder("roberta", tmp_path / "model", id2label={0: "bad", 1: "fair", 2: "good"}, classes=3)
    texts = random_texts(30, 20)
    source = write_input(tmp_path / "in", texts)
    alone = ("rank.query=null", "rank.text=null", "prompt.template={{ text }}")
    runner.run(job("rank", model, source, tmp_path / "out", *alone))
    rows, tokenizer = read(tmp_path / "out"), make_tokenizer()
    given = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    shares = torch.tensor(class_logits(model, given)).softmax(-1).numpy()
    np.testing.assert_allclose([list(row["scores"].values()) for row in rows], shares, atol=1e-5)
    assert list(rows[0]["scores"]) == ["bad", "fair", "good"]
    for row in rows:
        assert row["score"] == row["scores"][row["label"]] == max(row["scores"].values())


def test_rank_with_a_reward_model_scores_a_conversation(tmp_path: Path) -> None:
    model = make_encoder("qwen3", tmp_path / "model", classes=1)
    template = "{% for m in messages %}{{ m.content }} w9 {% endfor %}{% if add_generation_prompt %}w10{% endif %}"
    source = write_pairs(tmp_path / "in", 12)
    chat = ("prompt.kind=chat", f"prompt.chat_template={template}")
    runner.run(job("rank", model, source, tmp_path / "out", *chat))
    rows, tokenizer = read(tmp_path / "out"), make_tokenizer()
    texts = [f"{row['query']} w9 {row['text']} w9 " for row in rows]
    # Whatever the tokenizer puts before a text is there once.
    given = [{"input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
    given = [{"input_ids": [1, *row["input_ids"]]} for row in given]
    np.testing.assert_allclose([row["score"] for row in rows], class_logits(model, given)[:, 0], atol=1e-4)


def test_rank_needs_both_texts_of_a_pair_and_no_prompt_beside_them(reranker: Path, tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "in")
    with pytest.raises(ConfigError, match=r"rank\.query and rank\.text are a pair: set both, or neither"):
        job("rank", reranker, source, tmp_path / "out", "rank.query=null")
    with pytest.raises(InputError, match=r"rank\.query and rank\.text take the place of prompt\.template"):
        runner.run(job("rank", reranker, source, tmp_path / "out", "prompt.template={{ text }}"))

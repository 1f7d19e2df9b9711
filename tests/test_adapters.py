"""Jobs with adapters: a column chooses among several, and what an adapter's files hold is part of the job."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import runner
from batchrun.compose import compose_config
from batchrun.config import EngineConfig, ModelConfig
from batchrun.engine.checkpoint import load_tokenizer, open_checkpoint
from batchrun.engine.engine import Engine
from batchrun.engine.loading import load_single
from batchrun.errors import ConfigError, FingerprintMismatch
from tests.engine.adapters import make_adapter
from tests.engine.families import load, make_model
from tests.test_runner import job, read, words, write_input


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(make_adapter(folder / name, tiny, seed)) for seed, name in enumerate("ab", 1)}


def alone(tiny: Path, texts: list[str], **options: Any) -> list[str]:
    """What the same rows say with one adapter for all of them."""
    config = job(tiny, tiny, tiny)
    with load(tiny, **options) as llm:
        params = llm.get_default_sampling_params(temperature=0.0, max_tokens=config.sampling.max_tokens)
        return [completion.text for completion in llm.generate(texts, params)]


def with_params(folder: Path, texts: list[str], params: list[Any]) -> Path:
    folder.mkdir()
    column = pa.array([None if p is None else json.dumps(p) for p in params], pa.string())
    pq.write_table(pa.table({"text": texts, "params": column}), folder / "rows.parquet")
    return folder


def test_a_column_names_the_adapter_of_each_row(tiny: Path, adapters: dict[str, str], tmp_path: Path) -> None:
    """Equal texts too, of which each adapter gets its own answer although equal rows are computed once."""
    texts = [text for text in words(12) for _ in range(4)]
    names = [None, "a", "b", "c"] * 12
    source = with_params(tmp_path / "in", texts, [name and {"adapter": name} for name in names])
    changes = {"model__adapters": adapters, "prompt__params": "params"}
    assert runner.run(job(tiny, source, tmp_path / "out", **changes)) == 0
    expected = {name: alone(tiny, texts, adapter=adapters.get(name or "")) for name in (None, "a", "b")}
    assert len({str(answers) for answers in expected.values()}) == 3
    for i, row in enumerate(read(tmp_path / "out")):
        if names[i] == "c":
            assert (row["status"], row["error_type"]) == ("error", "invalid_row")
            assert row["error"] == "adapter='c' is not one of model.adapters=['a', 'b']"
        else:
            assert row["completion"] == expected[names[i]][i], (i, names[i])


def test_rows_that_name_none_have_that_of_the_job(tiny: Path, adapters: dict[str, str], tmp_path: Path) -> None:
    texts = words(8)
    source = with_params(tmp_path / "in", texts, [{"adapter": "b"} if i % 2 else None for i in range(8)])
    changes = {"model__adapters": adapters, "prompt__params": "params", "sampling__adapter": "a"}
    runner.run(job(tiny, source, tmp_path / "out", **changes))
    a, b = (alone(tiny, texts, adapter=adapters[name]) for name in "ab")
    assert [row["completion"] for row in read(tmp_path / "out")] == [(b if i % 2 else a)[i] for i in range(8)]


@pytest.mark.parametrize("task", ["score", "choose"])
def test_what_is_scored_is_scored_with_the_adapter_of_the_job(
    task: str, tiny: Path, adapters: dict[str, str], tmp_path: Path
) -> None:
    source = write_input(tmp_path / "in", words(8))
    changes: dict[str, Any] = {"choose__labels": ["w7", "w8 w9"]} if task == "choose" else {}
    ways: dict[str, dict[str, Any]] = {
        "base": {},
        "merged": {"model__adapter": adapters["a"]},
        "beside": {"model__adapters": adapters, "sampling__adapter": "a"},
    }
    found = {}
    for way, settings in ways.items():
        config = job(tiny, source, tmp_path / way, **changes, **settings)
        config.task = task
        runner.run(config)
        rows = read(tmp_path / way)
        labels = [one for row in rows for one in row["probabilities"]] if task == "choose" else rows
        found[way] = [one["log_likelihood"] for one in labels]
    assert found["beside"] == pytest.approx(found["merged"], rel=1e-4)
    assert found["beside"] != pytest.approx(found["base"], rel=1e-2)


def test_each_prompt_of_the_door_is_scored_with_an_adapter_of_its_own(tiny: Path, adapters: dict[str, str]) -> None:
    texts, labels = words(3), [" w7", " w8 w9"]
    names = [None, "a", "b"]

    def numbers(llm: Any, **options: Any) -> list[list[float]]:
        scores, choices = llm.score(texts, **options), llm.choose(texts, labels, **options)
        continued = llm.score(texts, [" w9 w10"] * 3, **options)
        pairs = zip(scores, continued, choices, strict=True)
        return [[a.log_likelihood, b.log_likelihood, *c.log_likelihoods] for a, b, c in pairs]

    alone = []
    for name in names:
        with load(tiny, adapter=adapters.get(name or "")) as llm:
            alone.append(numbers(llm))
    with load(tiny, adapters=adapters) as llm:
        mixed, of_b = numbers(llm, adapter=names), numbers(llm, adapter="b")
        for i in range(3):
            assert mixed[i] == pytest.approx(alone[i][i], rel=1e-4)
            assert of_b[i] == pytest.approx(alone[2][i], rel=1e-4)
        assert mixed[1] != pytest.approx(alone[0][1], rel=1e-2)
        with pytest.raises(ValueError, match=r"adapter='c' is not one of model\.adapters=\['a', 'b'\]"):
            llm.score(texts, adapter="c")
        with pytest.raises(ValueError, match="3 prompts and 2 adapters: give one for all, or one each"):
            llm.choose(texts, labels, adapter=["a", "b"])


@pytest.mark.parametrize("way", ["adapter", "adapters"])
def test_the_content_of_an_adapter_is_part_of_the_job_and_its_place_is_not(
    way: str, tiny: Path, adapters: dict[str, str], tmp_path: Path
) -> None:
    source = write_input(tmp_path / "in", words(4))

    def run(folder: Path) -> int:
        value = str(folder) if way == "adapter" else {"a": str(folder)}
        return runner.run(job(tiny, source, tmp_path / "out", **{f"model__{way}": value}))

    run(Path(adapters["a"]))
    moved = Path(shutil.copytree(adapters["a"], tmp_path / "moved"))
    assert run(moved) == 0
    weights = moved / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(FingerprintMismatch, match=rf"model\.{way}: "):
        run(moved)


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.adapter=c is none of model\.adapters=\['a'\]: give its folder"):
        compose_config(["model.adapters={a: x}", "sampling.adapter=c"])
    assert compose_config(["model.adapters.a=x", "sampling.adapter=a"]).model.adapters == {"a": "x"}


def test_engine_processes_are_sent_the_adapters(tiny: Path, adapters: dict[str, str]) -> None:
    model = ModelConfig(path=str(tiny), dtype="float32", adapters=adapters)
    sent = pickle.loads(pickle.dumps(open_checkpoint(model)))
    engine = load_single(sent, load_tokenizer(sent), EngineConfig(num_blocks=16))
    assert isinstance(engine, Engine)
    assert engine.adapters == {"a": 1, "b": 2}


def test_models_that_only_read_have_none(tiny: Path, adapters: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter is for models that generate: merge it"):
        load(tiny, task="embed", adapter=adapters["a"])

"""The page about sampling names every parameter, its range and a test; settings that the model itself gives."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import runner
from batchrun.compose import compose_config
from batchrun.config import SamplingConfig
from batchrun.config.sampling import FROM_MODEL, RANGES
from batchrun.engine.llm import LLM
from batchrun.engine.params import SamplingParams
from batchrun.errors import ConfigError
from batchrun.job import open_job
from tests.engine.families import make_model
from tests.test_runner import job, read, words, write_input

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def table() -> list[list[str]]:
    """The cells of each row of the page's table."""
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_has_every_parameter_once() -> None:
    fields = {field.name for kind in (SamplingConfig, SamplingParams) for field in dataclasses.fields(kind)}
    assert Counter(row[0].strip("`") for row in table()) == Counter(fields)


def test_each_parameter_is_pinned_by_a_test_that_there_is() -> None:
    for name, *_, pinned in table():
        match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", pinned)
        assert match, f"{name}: {pinned}"
        assert f"\ndef {match[2]}(" in (ROOT / match[1]).read_text(encoding="utf-8"), f"{name}: {pinned}"


def test_ranges_on_the_page_are_those_of_the_code() -> None:
    ranges = {row[0].strip("`"): row[2] for row in table()}
    for name, limits in RANGES.items():
        assert ranges[name].split(",")[0] == limits.text, name


@pytest.mark.parametrize("name", RANGES)
def test_each_range_is_that_of_the_job_too(name: str) -> None:
    low = RANGES[name].low
    for value in (low - 1, *([low] if RANGES[name].above else []), *([RANGES[name].high + 1] if name == "n" else [])):
        with pytest.raises(ConfigError, match=rf"sampling\.{name}={value} is out of range: it must be "):
            SamplingConfig(**{name: value})  # type: ignore[arg-type]


# As the model says.


def with_file(tiny: Path, folder: Path, said: dict[str, Any] | None) -> Path:
    model = Path(shutil.copytree(tiny, folder))
    (model / "generation_config.json").unlink()
    if said is not None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **said}))
    return model


def of_model(model: Path, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """The sampling of a job that leaves it to the model, by the keys of the fingerprint."""
    null = {f"sampling__{name}": None for name in FROM_MODEL}
    made = open_job(
        job(model, write_input(tmp_path / "in", ["w5"]), tmp_path / "out", **(null | changes)), weights=True
    )
    return {name: made.settings()[f"sampling.{name}"] for name in FROM_MODEL}


NEUTRAL = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("said", "resolved"),
    [
        (None, {}),
        ({}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_p": 0.95,
                "top_k": 20,
                "repetition_penalty": 1.05,
                "min_p": None,
            },
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05},
        ),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),  # greedy in `generate` too
    ],
)
def test_settings_that_are_null_are_the_models(
    said: dict[str, Any] | None, resolved: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    model = with_file(tiny, tmp_path / "model", said)
    assert of_model(model, tmp_path) == NEUTRAL | resolved
    own = {"sampling__temperature": 0.3, "sampling__top_k": 7}
    assert of_model(model, tmp_path, **own) == NEUTRAL | resolved | {"temperature": 0.3, "top_k": 7}


def test_sampling_model_on_the_command_line() -> None:
    config = compose_config(["sampling=model", "sampling.top_p=0.5"]).sampling
    assert [getattr(config, name) for name in FROM_MODEL] == [None, 0.5, None, None, None]
    assert compose_config([]).sampling.temperature == 0


def test_a_model_that_says_what_cannot_be_is_named(tiny: Path, tmp_path: Path) -> None:
    model = with_file(tiny, tmp_path / "model", {"do_sample": True, "top_p": 1.5})
    with pytest.raises(ConfigError, match=r"generation_config\.json of model: sampling\.top_p=1\.5 .*at most 1"):
        of_model(model, tmp_path)
    (model / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        of_model(model, tmp_path)


def test_rows_are_sampled_as_the_model_says(tiny: Path, tmp_path: Path) -> None:
    said = {"do_sample": True, "temperature": 1.5, "top_k": 40}
    model = with_file(tiny, tmp_path / "model", said)
    source = write_input(tmp_path / "in", words(5))
    null = {f"sampling__{name}": None for name in FROM_MODEL}
    written = {f"sampling__{name}": value for name, value in (NEUTRAL | said).items() if name != "do_sample"}
    for name, changes in (("model", null), ("written", written), ("greedy", {})):
        assert runner.run(job(model, source, tmp_path / name, **changes)) == 0
    texts = {name: [row["completion"] for row in read(tmp_path / name)] for name in ("model", "written", "greedy")}
    assert texts["model"] == texts["written"] != texts["greedy"]
    with LLM(str(model), dtype="float32", kv_cache_gib=0.01, workers="1") as llm:
        expected = SamplingParams(temperature=1.5, top_k=3, seed=4)
        assert llm.get_default_sampling_params(seed=4, top_k=3) == expected


# Of a job and of rows.


def test_parameters_of_rows_and_of_the_job_from_the_shell_to_the_text(tiny: Path, tmp_path: Path) -> None:
    own = [
        None,
        '{"logit_bias": {"w9": 100}}',
        '{"bad_words": "w7"}',
        '{"min_tokens": 9}',
        '{"allowed_token_ids": [12]}',
    ]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": words(1) * 5, "p": own}), tmp_path / "in" / "a.parquet")
    arguments = [
        f"model.path={tiny}", "model.dtype=float32", f"input.path={tmp_path / 'in'}", f"output.path={tmp_path / 'out'}",
        "prompt.kind=completion", "prompt.template={{ text }}", "prompt.params=p", "engine.kv_cache_gib=0.01",
        "engine.workers=1", "sampling.max_tokens=4", "sampling.ignore_eos=true",
        "sampling.logit_bias={w7: 50, 8: 49}",
    ]  # fmt: skip
    assert runner.run(compose_config(arguments)) == 0
    rows = read(tmp_path / "out")
    assert [row["completion"] for row in rows] == ["w7 w7 w7 w7", "w9 w9 w9 w9", "w8 w8 w8 w8", None, "w12 w12 w12 w12"]
    assert rows[3]["error_type"] == "invalid_row"
    assert rows[3]["error"] == "min_tokens=9 is more than max_tokens=4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {"w5 w6": 1}}, r"sampling\.logit_bias: 'w5 w6' is 2 tokens"),
        ({"logit_bias": {256: 1}}, r"sampling\.logit_bias: token 256 .*0 to 255"),
        ({"allowed_token_ids": [300]}, r"sampling\.allowed_token_ids: token 300"),
        ({"stop_token_ids": [300]}, r"sampling\.stop_token_ids: token 300"),
        ({"min_tokens": 7}, r"sampling\.min_tokens=7 .*between 0 and sampling\.max_tokens=6"),
    ],
)
def test_tokens_of_another_model_are_refused_before_it_loads(
    changes: dict[str, Any], message: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        of_model(tiny, tmp_path, **{f"sampling__{name}": value for name, value in changes.items()})

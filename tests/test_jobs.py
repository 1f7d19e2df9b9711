"""The shipped jobs that answer: each on a tiny model, on the columns that it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import runner
from batchrun.compose import compose_config
from batchrun.data.prompts import PromptBuilder
from batchrun.job import open_job
from tests.data.tiny import CHAT_WITH_BOS
from tests.engine.families import make_model
from tests.test_runner import read


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model"))


def arguments(name: str, model: Path, folder: Path, **columns: list[Any]) -> list[str]:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return [
        f"job={name}", f"model={model}", "model.dtype=float32", f"input.path={folder}", "sampling.max_tokens=4",
        f"output.path={folder}-out", "engine.workers=1", "engine.kv_cache_gib=0.05",
        f"prompt.chat_template={CHAT_WITH_BOS}",
    ]  # fmt: skip


def prompts(given: list[str]) -> list[str]:
    job = open_job(compose_config(given), weights=True)
    assert isinstance(job.prompts, PromptBuilder)
    batches = [batch for _, batch in job.source.read(job.source.files[0], [(0, job.plan.rows)], job.prompts.columns)]
    return [str(prompt.text) for batch in batches for prompt in job.prompts.build(batch)]


COLUMNS = {"qa": {"question": ["w4?", "w5?"], "context": ["w6", "w7"]}, "translate": {"text": ["w4", "w5"]}}
ANSWERS = {"qa": "answer", "translate": "translation"}


@pytest.mark.parametrize("name", COLUMNS)
def test_the_job_runs(name: str, model: Path, tmp_path: Path) -> None:
    given = arguments(name, model, tmp_path / "in", **COLUMNS[name])
    assert runner.run(compose_config(given)) == 0
    rows = read(tmp_path / "in-out")
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert all(isinstance(row[ANSWERS[name]], str) for row in rows)


def test_translate_into_the_language_that_is_set(model: Path, tmp_path: Path) -> None:
    given = arguments("translate", model, tmp_path / "in", text=["w4"])
    assert "into German.\n\nw4" in prompts(given)[0]
    assert "into French.\n\nw4" in prompts([*given, "prompt.variables.language=French"])[0]


def test_translate_into_the_language_of_each_row(model: Path, tmp_path: Path) -> None:
    given = arguments("translate", model, tmp_path / "in", text=["w4", "w5"], language=["Greek", "Thai"])
    assert [text.partition("into ")[2].partition(".")[0] for text in prompts(given)] == ["Greek", "Thai"]


def test_a_variable_that_no_template_uses_is_named(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = arguments("translate", model, tmp_path / "in", text=["w4"])
    prompts([*given, "prompt.variables.langage=French"])
    assert "prompt.variables.langage is used by no template" in caplog.text


def test_variables_are_in_the_fingerprint(model: Path, tmp_path: Path) -> None:
    given = arguments("translate", model, tmp_path / "in", text=["w4"])
    settings = open_job(compose_config(given), weights=True).settings()
    assert settings["prompt.variables"] == {"language": "German"}

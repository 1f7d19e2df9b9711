"""Log-probabilities of generated tokens in the output."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import LLM, runner
from batchrun.data.logprobs import TOKENS
from batchrun.engine.params import SamplingParams
from tests.engine.families import make_model
from tests.test_runner import job, read, words, write_input


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.mark.parametrize("k", [0, 2])
def test_columns_hold_what_the_engine_says_of_each_token(tiny: Path, tmp_path: Path, k: int) -> None:
    texts = [*words(4), None, words(1)[0]]
    source = write_input(tmp_path / "in", texts)
    config = job(tiny, source, tmp_path / "out", sampling__logprobs=k, output__prefix="p_")
    assert runner.run(config) == 0
    (part,) = (tmp_path / "out").glob("part-*")
    assert pq.read_schema(part).field("p_logprobs").type == TOKENS
    rows = read(tmp_path / "out")
    assert (rows[4]["p_logprobs"], rows[4]["p_cumulative_logprob"]) == (None, None)
    assert rows[5]["p_deduplicated"]
    assert rows[5]["p_logprobs"] == rows[0]["p_logprobs"]
    params = SamplingParams(max_tokens=6, logprobs=k)
    with LLM(str(tiny), dtype="float32", kv_cache_gib=0.05, workers="1") as llm:
        completions = llm.generate([text for text in texts if text], params)
    for row, completion in zip(rows[:4] + rows[5:], completions, strict=True):
        ids, values = completion.logprobs or pytest.fail("no log-probabilities")
        found = row["p_logprobs"]
        assert [token["token_id"] for token in found] == completion.token_ids
        assert len(found) == row["p_completion_tokens"]
        assert [token["logprob"] for token in found] == pytest.approx(values[:, 0].tolist(), abs=1e-4)
        assert row["p_cumulative_logprob"] == pytest.approx(values[:, 0].sum(), abs=1e-3)
        for place, token in enumerate(found):
            assert [top["token_id"] for top in token["top"]] == ids[place, 1:].tolist()
            assert [top["logprob"] for top in token["top"]] == pytest.approx(values[place, 1:].tolist(), abs=1e-4)


def test_a_prompt_has_its_own_column(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", ["w5 w6 w7", "w9", None])
    runner.run(job(tiny, source, tmp_path / "out", sampling__prompt_logprobs=1, run__max_error_rate=1.0))
    first, second, third = (row["prompt_logprobs"] for row in read(tmp_path / "out"))
    with LLM(str(tiny), dtype="float32", kv_cache_gib=0.05, workers="1") as llm:
        ids = llm.tokenizer("w5 w6 w7")["input_ids"]
        expected = llm.score(["w5 w6 w7"])[0].log_likelihood
    assert [token["token_id"] for token in first] == ids[1:]
    assert sum(token["logprob"] for token in first) == pytest.approx(expected, abs=1e-4)
    assert [len(token["top"]) for token in first] == [1, 1]
    assert (second, third) == ([], None)


def test_they_outlive_a_retry_of_other_rows(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", ["w5 w6", " ".join(["w7"] * 30)])
    config = job(tiny, source, tmp_path / "out", sampling__logprobs=1, model__max_model_len=20, run__max_error_rate=1.0)
    runner.run(config)
    before = read(tmp_path / "out")
    config.retry, config.model.max_model_len = ["error"], 64
    runner.run(config)
    after = read(tmp_path / "out")
    assert [row["status"] for row in before] == ["ok", "error"]
    assert after[0]["logprobs"] == before[0]["logprobs"]
    assert len(after[1]["logprobs"]) == after[1]["completion_tokens"]


def test_a_row_that_asks_for_them_in_a_job_without_their_columns_says_what_it_needs(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    params = ['{"logprobs": 1}', '{"prompt_logprobs": 0}', '{"temperature": 0}']
    pq.write_table(pa.table({"text": ["w5 w6"] * 3, "params": params}), tmp_path / "in" / "rows.parquet")
    changes = {"prompt__params": "params", "run__max_error_rate": 1.0}
    runner.run(job(tiny, tmp_path / "in", tmp_path / "out", **changes))
    errors = [row["error"] for row in read(tmp_path / "out")]
    assert errors[2] is None
    for error, name in zip(errors, ("logprobs", "prompt_logprobs"), strict=False):
        assert error == f"{name} of a row needs the columns that sampling.{name} of the job makes: 0 is enough"
    runner.run(
        job(tiny, tmp_path / "in", tmp_path / "with", sampling__logprobs=0, sampling__prompt_logprobs=0, **changes)
    )
    rows = read(tmp_path / "with")
    assert [len(row["logprobs"][0]["top"]) for row in rows] == [1, 0, 0]

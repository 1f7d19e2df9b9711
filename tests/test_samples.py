"""Several samples of each row: an output row for each, and as many as there are, whatever becomes of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import runner
from batchrun.config import Config, SamplingConfig
from batchrun.data.merge import Merged, merge_parts
from batchrun.errors import ConfigError, FingerprintMismatch
from batchrun.report.status import read_status
from tests import fake
from tests.engine.families import make_model
from tests.test_runner import job, read, words, write_input

SAMPLED: dict[str, Any] = {"sampling__temperature": 1.0}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def texts(output: Path) -> dict[tuple[str, int, int], str]:
    return {(row["source_file"], row["source_row"], row.get("sample", 0)): row["completion"] for row in read(output)}


@pytest.mark.parametrize("seed_by", ["row", "content"])
def test_more_samples_keep_those_that_fewer_would_give(tiny: Path, tmp_path: Path, seed_by: str) -> None:
    source = write_input(tmp_path / "in", words(20) * 2, files=2)
    for n in (1, 2, 5):
        config = job(tiny, source, tmp_path / str(n), sampling__n=n, sampling__seed_by=seed_by, **SAMPLED)
        assert runner.run(config) == 0
    one, two, five = (texts(tmp_path / str(n)) for n in (1, 2, 5))
    assert list(five) == [(f"rows-{f}.parquet", row, i) for f in range(2) for row in range(20) for i in range(5)]
    assert one.items() <= two.items() <= five.items()
    assert len(set(five.values())) > 90, "samples of a row are not copies"
    assert "sample" not in pq.read_schema(next((tmp_path / "1").glob("part-*"))).names
    assert len({row["run"] for row in read(tmp_path / "5")}) == 1


def test_samples_share_the_blocks_of_their_prompt(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", words(16))
    runner.run(job(tiny, source, tmp_path / "out", sampling__n=4, **SAMPLED))
    rows = read(tmp_path / "out")
    for row in rows:
        if row["sample"]:
            assert row["cached_tokens"] >= (row["prompt_tokens"] - 1) // 8 * 8, "all but the last block of 8"
    # A share of the prompts begins alike, too, so even of the first samples some tokens are cached.
    computed = sum(row["prompt_tokens"] - row["cached_tokens"] for row in rows if row["sample"] == 0)
    assert computed > 0


def test_rows_that_cannot_be_sent_fail_once_for_each_sample(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", [None, "w5", None, "w6"])
    runner.run(job(tiny, source, tmp_path / "out", sampling__n=3, run__max_error_rate=1.0, **SAMPLED))
    assert [(row["id"], row["sample"], row["error_type"]) for row in read(tmp_path / "out")] == [
        (row, sample, None if row % 2 else "empty_prompt") for row in range(4) for sample in range(3)
    ]
    status = read_status(tmp_path / "out")
    assert (status.rows, status.rows_done, dict(status.errors)) == (12, 12, {"empty_prompt": 6})
    summary = json.loads((tmp_path / "out" / "__batchrun" / "summary.json").read_text())
    assert (summary["rows"], summary["error_types"]) == (12, {"empty_prompt": 6})
    (metrics,) = (tmp_path / "out" / "__batchrun" / "metrics").glob("*/rows.parquet")
    found = pq.read_table(metrics).to_pylist()
    assert {(row["source_row"], row["sample"]) for row in found} == {(row, i) for row in range(4) for i in range(3)}


def test_a_row_of_which_some_samples_are_there_gets_the_others(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dies(fake.FakeEngine):
        """Ends with two of the first row's three samples done."""

        def step(self) -> list[Any]:
            if self.completed:
                raise KeyboardInterrupt
            return super().step()

    log = tmp_path / "log"
    monkeypatch.setenv("BATCHRUN_FAKE_LOG", str(log))
    source = write_input(tmp_path / "in", [fake.words(i) for i in range(4)])
    config = job(tiny, source, tmp_path / "out", sampling__n=3, **SAMPLED)
    monkeypatch.setattr(runner, "load_engine", lambda *_: Dies(batch=2, room=3))
    with pytest.raises(KeyboardInterrupt):
        runner.run(config)
    monkeypatch.setattr(runner, "load_engine", lambda *_: fake.FakeEngine())
    assert runner.run(config) == 0
    made = log.read_text().splitlines()
    assert len(made) == len(set(made)) == 12, "no sample is made twice"
    assert len({row["run"] for row in read(tmp_path / "out")[:3]}) == 2
    assert list(texts(tmp_path / "out")) == [("rows-0.parquet", row, i) for row in range(4) for i in range(3)]


def test_a_retry_makes_the_samples_that_failed_and_may_not_change_their_number(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(fake.FakeEngine):
        def _complete(self, request: Any) -> Any:
            completion = super()._complete(request)
            failed = self.bad_ids and request.params.seed % self.bad_ids == 0
            return fake.failure(request) if failed else completion

    source = write_input(tmp_path / "in", [fake.words(i) for i in range(30)])
    config = job(tiny, source, tmp_path / "out", sampling__n=3, run__max_error_rate=1.0, **SAMPLED)
    monkeypatch.setattr(runner, "load_engine", lambda *_: Fails())
    runner.run(config)
    whole = texts(tmp_path / "out")
    monkeypatch.setenv("BATCHRUN_FAKE_BAD", "3")
    config.output.path = str(tmp_path / "again")
    runner.run(config)
    failed = {key for key, text in texts(tmp_path / "again").items() if text is None}
    assert 0 < len(failed) < 90
    assert len({key[:2] for key in failed}) < len(failed), "some rows have a sample that failed and one that did not"
    monkeypatch.setenv("BATCHRUN_FAKE_BAD", "0")
    config.retry = ["error"]
    monkeypatch.setenv("BATCHRUN_FAKE_LOG", str(tmp_path / "log"))
    runner.run(config)
    assert texts(tmp_path / "again") == whole
    assert len((tmp_path / "log").read_text().splitlines()) == len(failed)
    config.sampling.n = 2
    with pytest.raises(FingerprintMismatch, match=r"sampling\.n: 3 -> 2"):
        runner.run(config)


def test_parts_with_samples_are_merged_in_their_order(tiny: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", words(100), files=2)
    runner.run(job(tiny, source, tmp_path / "out", sampling__n=2, output__chunk_rows=30, **SAMPLED))
    assert merge_parts(tmp_path / "out", tmp_path / "merged", 512, "zstd") == Merged(4, 1, 0)
    merged = pq.read_table(next((tmp_path / "merged").iterdir()))
    assert merged.equals(pa.concat_tables(pq.read_table(part) for part in sorted((tmp_path / "out").glob("part-*"))))


def test_samples_that_would_be_equal_are_refused_but_for_rows_with_parameters_of_their_own(
    tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.n=3 .*temperature=0"):
        Config(sampling=SamplingConfig(n=3))
    with pytest.raises(ConfigError, match=r"sampling\.n=0 is out of range"):
        SamplingConfig(n=0)
    (tmp_path / "in").mkdir()
    params = ['{"temperature": 0}', '{"temperature": 1.0, "seed": 7}', '{"n": 2}']
    pq.write_table(pa.table({"text": ["w5 w6"] * 3, "params": params}), tmp_path / "in" / "rows.parquet")
    config = job(
        tiny, tmp_path / "in", tmp_path / "out", sampling__n=3, prompt__params="params", run__max_error_rate=1.0
    )
    runner.run(config)
    rows = read(tmp_path / "out")
    greedy, seeded, refused = (rows[i : i + 3] for i in (0, 3, 6))
    assert len({row["completion"] for row in greedy}) == 1
    assert [row["deduplicated"] for row in greedy] == [False, True, True]
    assert len({row["completion"] for row in seeded}) == 3
    assert {row["error_type"] for row in refused} == {"invalid_row"}
    assert "there is no parameter n" in refused[0]["error"]

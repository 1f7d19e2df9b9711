"""Some rows of finished parts made again, and outputs that replace another job's."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import runner
from batchrun.config import Config
from batchrun.engine.params import Completion
from batchrun.errors import BatchrunError, ConfigError, FingerprintMismatch, OutputInUse
from tests import fake
from tests.engine.families import make_model
from tests.test_runner import job, read, write_input

ROWS = 60
BAD = (3, 20, 21, 59)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


class Engine(fake.FakeEngine):
    """Rows of multiples of 5 are cut at `max_tokens` below 10; rows in `bad` fail; `after` rows it breaks down."""

    bad: tuple[int, ...] = BAD
    after = 10**9
    made: list[int]

    def step(self) -> list[Completion]:
        done = [self._end(completion) for completion in super().step()]
        if len(Engine.made) >= Engine.after:
            raise BatchrunError("the engine broke down")
        return done

    def add(self, request: Any) -> None:
        self.limits = {**getattr(self, "limits", {}), request.key: request.params.max_tokens}
        super().add(request)

    def _end(self, completion: Completion) -> Completion:
        row = IDS[completion.text]
        Engine.made.append(row)
        if row in Engine.bad:
            return Completion(completion.key, "", [], "error", error_type="engine_error", error="a stray particle")
        if row % 5 == 0 and self.limits[completion.key] < 10:
            completion.finish_reason = "length"
        completion.text += f" within {self.limits[completion.key]}"
        return completion


IDS = {fake.answer(fake.words(i).replace("w", "").split()): i for i in range(ROWS)}


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    monkeypatch.setattr(Engine, "bad", BAD)
    monkeypatch.setattr(Engine, "after", 10**9)
    monkeypatch.setattr(Engine, "made", [], raising=False)
    monkeypatch.setattr(runner, "load_engine", lambda *_: Engine())
    return Engine


class Case:
    """An output of 60 rows in parts of 10, of which 4 failed and 12, less those, were cut."""

    def __init__(self, tiny: Path, folder: Path) -> None:
        self.tiny = tiny
        self.source = write_input(folder / "in", [fake.words(i) for i in range(ROWS)])
        self.out = folder / "out"

    def config(self, **changes: Any) -> Config:
        retry = changes.pop("retry", None)
        config = job(self.tiny, self.source, self.out, **{"output__chunk_rows": 10, **changes})
        config.retry = retry or []
        return config

    def run(self, **changes: Any) -> list[int]:
        """Run the job; returns the rows that the engine made, in their order."""
        Engine.made.clear()
        assert runner.run(self.config(**changes)) == 0
        return sorted(Engine.made)

    def stamps(self) -> dict[str, int]:
        return {part.name: part.stat().st_mtime_ns for part in self.out.glob("part-*")}

    def runs(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.out / "__batchrun" / "runs").iterdir())]


@pytest.fixture
def case(tiny: Path, tmp_path: Path) -> Case:
    case = Case(tiny, tmp_path)
    assert case.run() == list(range(ROWS))
    return case


def test_failed_rows_are_made_again_and_the_others_kept(case: Case, engine: type[Engine]) -> None:
    before, stamps = read(case.out), case.stamps()
    assert case.run() == [], "a plain rerun does not retry"
    engine.bad = (20,)
    assert case.run(retry=["error"]) == list(BAD)
    after = read(case.out)
    assert [row["status"] for row in after] == ["error" if i == 20 else "ok" for i in range(ROWS)]
    assert [row for i, row in enumerate(after) if i not in BAD] == [row for i, row in enumerate(before) if i not in BAD]
    touched = {name for name, stamp in case.stamps().items() if stamp != stamps[name]}
    assert touched == {f"part-00000-{i // 10:06d}.parquet" for i in BAD}
    first, second = sorted({row["run"] for row in after})
    assert [row["run"] for row in after] == [second if i in BAD else first for i in range(ROWS)]
    assert [run["run"] for run in case.runs()] == [first, second]
    assert case.run() == [], "the output is still the job's"


def test_rows_that_were_cut_can_have_more_tokens(case: Case) -> None:
    cut = [i for i in range(0, ROWS, 5) if i not in BAD]
    assert [i for i, row in enumerate(read(case.out)) if row["finish_reason"] == "length"] == cut
    assert case.run(retry=["length"], sampling__max_tokens=12) == cut
    rows = read(case.out)
    assert all(row["finish_reason"] != "length" for row in rows)
    assert [i for i, row in enumerate(rows) if (row["completion"] or "").endswith("within 12")] == cut
    record = case.runs()[-1]
    assert record["changed"] == ["sampling.max_tokens: 6 -> 12"]
    assert record["retry"] == ["length"]
    assert record["ended"]
    assert case.run(retry=["length"], sampling__max_tokens=12) == []
    with pytest.raises(FingerprintMismatch, match=r"sampling\.max_tokens"):
        runner.run(case.config(sampling__max_tokens=12))


def test_both_kinds_at_once(case: Case, engine: type[Engine]) -> None:
    engine.bad = ()
    rows = case.run(retry=["error", "length"], sampling__max_tokens=50)
    assert rows == sorted({*range(0, ROWS, 5), *BAD})
    assert {row["finish_reason"] for row in read(case.out)} == {"stop"}


def test_the_question_may_not_change_in_a_retry(case: Case) -> None:
    with pytest.raises(FingerprintMismatch, match=r"prompt\.template") as caught:
        runner.run(case.config(retry=["error"], prompt__template="w9 {{ text }}", sampling__max_tokens=9))
    assert "max_tokens" not in str(caught.value)


def test_a_retry_that_broke_off_goes_on_where_it_was(case: Case, engine: type[Engine]) -> None:
    engine.bad, engine.after = (3, 59), 8
    engine.made.clear()
    with pytest.raises(BatchrunError, match="broke down"):
        runner.run(case.config(retry=["error", "length"], sampling__max_tokens=50, output__journal_seconds=0.01))
    assert case.runs()[-1]["ended"] is None
    rows = read(case.out)
    assert len(rows) == ROWS
    first = set(engine.made)
    engine.after = 10**9
    second = case.run(retry=["error", "length"], sampling__max_tokens=50)
    assert first | set(second) == {*range(0, ROWS, 5), *BAD}
    assert len(case.runs()) == 2, "it is one run"
    assert [row["status"] for row in read(case.out)].count("error") == 2
    assert case.run(retry=["error"], sampling__max_tokens=50) == [3, 59], "a new retry tries those again"


def test_a_retry_leaves_unfinished_chunks(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    (case.out / "part-00000-000000.parquet").unlink()
    (case.out / "part-00000-000001.parquet").write_bytes(b"half")
    with caplog.at_level(logging.WARNING):
        assert case.run(retry=["error"]) == [20, 21, 59]
    assert "2 chunks are not finished" in caplog.text
    assert len(case.stamps()) == 5
    assert case.run() == list(range(20))


def test_retrying_nothing_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no output"):
        runner.run(Case(tiny, tmp_path).config(retry=["error"]))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="set one of them"):
        Config(retry="error", output=job(tiny, tmp_path, tmp_path, output__overwrite=True).output)
    with pytest.raises(ConfigError, match="retry='all'"):
        Config(retry="all")


def test_overwriting_removes_the_other_job_and_nothing_else(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    foreign = [case.out / name for name in ("notes.md", "part-00000-000099.parquet", "data/part-00000-000000.parquet")]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    mine = case.out / "part-00000-000005.parquet"
    pq.write_table(pa.table({"mine": [1]}), mine)
    (case.out / "__batchrun" / "journal" / "part-00000-000001.old.journal").write_text("x")
    with pytest.raises(FingerprintMismatch, match=r"output\.overwrite=true"):
        runner.run(case.config(output__chunk_rows=20))
    with caplog.at_level(logging.WARNING):
        assert case.run(output__chunk_rows=20, output__overwrite=True) == list(range(ROWS))
    assert f"{mine} was not made by the job" in caplog.text
    assert sorted(case.stamps()) == [
        *(f"part-00000-{i:06d}.parquet" for i in (0, 1, 2, 5)),
        "part-00000-000099.parquet",
    ]
    assert pq.read_table(mine).to_pylist() == [{"mine": 1}]
    assert all(path.read_text() == "mine" for path in foreign)
    assert len(case.runs()) == 1
    assert os.listdir(case.out / "__batchrun" / "journal") == []


def test_overwriting_the_same_job_goes_on_with_it(case: Case) -> None:
    (case.out / "part-00000-000002.parquet").unlink()
    assert case.run(output__overwrite=True) == list(range(20, 30))


def test_a_job_at_work_is_not_overwritten(case: Case, engine: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    (case.out / "part-00000-000002.parquet").unlink()
    refused = []

    def load(*_: Any) -> Engine:
        with pytest.raises(OutputInUse) as caught:
            runner.run(case.config(output__chunk_rows=20, output__overwrite=True, launch__count=2, launch__index=1))
        refused.append(caught.value)
        return Engine()

    monkeypatch.setattr(runner, "load_engine", load)
    assert case.run() == list(range(20, 30))
    assert len(refused) == 1
    assert len(read(case.out)) == ROWS


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_a_removal_that_was_cut_short_is_taken_up(case: Case, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    from batchrun.data import overwrite

    left = [parts]

    def stop(name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise BatchrunError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(overwrite, "fault", stop)
        with pytest.raises(BatchrunError, match="killed"):
            runner.run(case.config(output__chunk_rows=20, output__overwrite=True))
    with pytest.raises(FingerprintMismatch):
        runner.run(case.config(output__chunk_rows=20))
    assert case.run(output__chunk_rows=20, output__overwrite=True) == list(range(ROWS))
    assert len(case.stamps()) == 3

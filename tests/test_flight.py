"""Rows with equal prompts: asked once, answered each, and the output as if all had been asked."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import flight as flight_module
from batchrun import runner
from batchrun.config import Config, OutputConfig, SamplingConfig
from batchrun.data.buffer import ChunkBuffer
from batchrun.data.outputs import RowResult
from batchrun.data.plan import Chunk
from batchrun.data.prompt import Prompt
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.flight import Flight, Results
from batchrun.row import Row
from batchrun.tasks.generate import Generate
from tests import fake
from tests.test_runner import job, read, words, write_input

OF_THE_RUN = ("cached_tokens", "queue_s", "first_token_s", "total_s", "deduplicated", "run")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.families import make_model

    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def flight(dedup: bool = True, **sampling: Any) -> Flight:
    # As a job leaves it, which looks at the model for the format of its calls.
    output = OutputConfig(tool_calls=None)
    return Flight(Generate(Config(sampling=SamplingConfig(**sampling), output=output)), dedup)


def row(number: int, ids: list[int], params: dict[str, Any] | None = None) -> Row:
    return Row(ChunkBuffer(Chunk(0, 0, 0, 100), "a"), number, Prompt(ids, params=params))


def answer(request: Request, text: str = "yes", **values: Any) -> Completion:
    return Completion(request.key, text, [5, 6], "stop", prompt_tokens=len(request.prompt_ids), **values)


def landed(flying: Flight, completion: Completion) -> list[tuple[Row, RowResult]]:
    return [(one, result) for one, result in flying.land(completion) if isinstance(result, RowResult)]


def asked(flying: Flight, one: Row) -> Request:
    requests = flying.board(one)
    assert isinstance(requests, list)
    (request,) = requests
    return request


def test_rows_wait_for_an_equal_one_and_take_its_result() -> None:
    flying = flight()
    request, other = asked(flying, row(0, [7, 8])), asked(flying, row(1, [7, 9]))
    assert flying.board(row(2, [7, 8])) is None
    assert flying.board(row(3, [7, 8])) is None
    done = landed(flying, answer(request, cached_tokens=1, total_s=2.0))
    assert [(one.number, result.text, result.deduplicated) for one, result in done] == [
        (0, "yes", False),
        (2, "yes", True),
        (3, "yes", True),
    ]
    assert [result.cached_tokens for _, result in done] == [1, 2, 2]
    assert [result.total_s for _, result in done] == [2.0, 0.0, 0.0]
    later = flying.board(row(4, [7, 8]))
    assert isinstance(later, RowResult)
    assert (later.text, later.deduplicated, later.completion_tokens) == ("yes", True, 2)
    assert [one.number for one, _ in flying.land(answer(other))] == [1]


def test_each_row_has_a_result_of_its_own() -> None:
    flying = flight()
    request = asked(flying, row(0, [7]))
    flying.board(row(1, [7]))
    results = [result for _, result in flying.land(answer(request))]
    results.append(flying.board(row(2, [7])))  # type: ignore[arg-type]
    assert len({id(result) for result in results}) == 3


@pytest.mark.parametrize(
    ("sampling", "own", "shared"),
    [
        ({}, None, True),
        ({}, {"max_tokens": 3}, False),
        ({}, {"temperature": 0.5}, False),
        ({"temperature": 0.5}, None, False),
        ({"temperature": 0.5}, {"temperature": 0.0}, False),
        ({"temperature": 0.5, "seed_by": "content"}, None, True),
        ({"temperature": 0.5, "seed_by": "content"}, {"seed": 3}, False),
        ({"dedup": False}, None, False),
    ],
)
def test_what_must_be_equal(sampling: dict[str, Any], own: dict[str, Any] | None, shared: bool) -> None:
    flying = flight(**sampling)
    asked(flying, row(0, [7]))
    assert (flying.board(row(1, [7], own)) is None) == shared


def test_rows_with_equal_seeds_of_their_own_are_one() -> None:
    flying = flight(temperature=0.9)
    asked(flying, row(0, [7], {"seed": 4}))
    assert flying.board(row(1, [7], {"seed": 4})) is None
    asked(flying, row(2, [7], {"seed": 5}))


def test_failures_are_shared_by_those_that_wait_and_not_remembered() -> None:
    flying = flight()
    request = asked(flying, row(0, [7]))
    flying.board(row(1, [7]))
    failed = Completion(request.key, "", [], "error", error_type="engine_error", error="died")
    assert [(result.status, result.error) for _, result in landed(flying, failed)] == [("error", "died")] * 2
    asked(flying, row(2, [7]))


def test_what_is_remembered_is_bounded_by_rows_and_text() -> None:
    results = Results(rows=3, chars=10)
    params = SamplingParams()
    for number in range(4):
        results.put((bytes([number]), params), RowResult("ab"))
        results.get((bytes([0]), params))
    assert results.get((bytes([1]), params)) is None  # 0 was used since
    assert results.get((bytes([0]), params)) is not None
    results.put((bytes([9]), params), RowResult("a" * 9))
    assert len(results) == 1
    results.put((bytes([8]), params), RowResult("a" * 11))
    assert len(results) == 0


def doubled(rows: int, copies: int) -> list[str]:
    """Each text several times, some side by side and some far apart."""
    texts = words(rows)
    return [texts[i // 2 % rows] for i in range(rows * copies)]


def as_if_alone(output: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key not in OF_THE_RUN} for one in read(output)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed_by": "content"}])
def test_output_is_the_same_with_and_without(tiny: Path, tmp_path: Path, sampling: dict[str, Any]) -> None:
    source = write_input(tmp_path / "in", doubled(40, 4), files=2)
    changes = {f"sampling__{key}": value for key, value in sampling.items()}
    for dedup in (True, False):
        runner.run(job(tiny, source, tmp_path / str(dedup), run__dedup=dedup, **changes))
    assert as_if_alone(tmp_path / "True") == as_if_alone(tmp_path / "False")
    shared = "temperature" not in sampling or "seed_by" in sampling
    summaries = {
        dedup: json.loads((tmp_path / dedup / "__batchrun" / "summary.json").read_text()) for dedup in ("True", "False")
    }
    assert summaries["True"]["deduplicated"] == (120 if shared else 0)
    assert summaries["False"]["deduplicated"] == 0
    assert summaries["True"]["rows"] == summaries["False"]["rows"] == 160
    rows = read(tmp_path / "True")
    assert sum(one["deduplicated"] for one in rows) == (120 if shared else 0)
    computed = sum(one["completion_tokens"] for one in rows if not one["deduplicated"])
    assert summaries["True"]["completion_tokens"] == computed


def test_samples_seeded_by_content_follow_from_prompt_and_seed_alone(tiny: Path, tmp_path: Path) -> None:
    texts = words(30)
    changes = {"sampling__temperature": 1.0, "sampling__seed_by": "content"}
    for name, order, seed in (("a", texts * 2, 0), ("b", texts[::-1], 0), ("c", texts, 1)):
        runner.run(
            job(tiny, write_input(tmp_path / f"in-{name}", order), tmp_path / name, sampling__seed=seed, **changes)
        )
    a, b, c = ({one["text"]: one["completion"] for one in read(tmp_path / name)} for name in "abc")
    assert a == b
    assert a != c
    pairs = {(one["text"], one["completion"]) for one in read(tmp_path / "a")}
    assert len(pairs) == 30


def test_each_prompt_is_asked_once_whatever_comes_between(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("BATCHRUN_FAKE_LOG", str(log))
    monkeypatch.setattr(runner, "load_engine", lambda *_: fake.FakeEngine())
    source = write_input(tmp_path / "in", [fake.words(i % 50) for i in range(1000)])
    runner.run(job(tiny, source, tmp_path / "out", output__chunk_rows=100))
    assert Counter(Counter(log.read_text().splitlines()).values()) == {1: 50}
    rows = read(tmp_path / "out")
    assert len(rows) == 1000
    assert [one["completion"] for one in rows] == [rows[i % 50]["completion"] for i in range(1000)]


def test_rows_beyond_what_is_remembered_are_asked_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHRUN_FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(flight_module, "REMEMBERED_ROWS", 5)
    monkeypatch.setattr(runner, "load_engine", lambda *_: fake.FakeEngine())
    source = write_input(tmp_path / "in", [fake.words(i % 100) for i in range(400)])
    runner.run(job(tiny, source, tmp_path / "out", output__chunk_rows=100))
    assert len((tmp_path / "log").read_text().splitlines()) > 300
    assert [one["status"] for one in read(tmp_path / "out")] == ["ok"] * 400


def test_a_run_that_is_taken_up_again_has_the_same_rows(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dies(fake.FakeEngine):
        def step(self) -> list[Completion]:
            if self.completed > 60:
                raise KeyboardInterrupt
            return super().step()

    source = write_input(tmp_path / "in", [fake.words(i // 3 % 70) for i in range(420)])
    config = job(tiny, source, tmp_path / "out", output__journal_seconds=0.01)
    monkeypatch.setattr(runner, "load_engine", lambda *_: Dies())
    with pytest.raises(KeyboardInterrupt):
        runner.run(config)
    monkeypatch.setattr(runner, "load_engine", lambda *_: fake.FakeEngine())
    assert runner.run(config) == 0
    runner.run(job(tiny, source, tmp_path / "whole", run__dedup=False))
    assert as_if_alone(tmp_path / "out") == as_if_alone(tmp_path / "whole")


def test_cut_prompts_that_become_equal_keep_what_was_cut_of_each(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    texts = [" ".join(f"w{4 + i}" for i in range(n)) for n in (30, 50, 40)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "in" / "a.parquet")
    changes = {"model__max_model_len": 24, "prompt__overlong": "truncate_right", "sampling__max_tokens": 4}
    runner.run(job(tiny, tmp_path / "in", tmp_path / "out", **changes))
    rows = read(tmp_path / "out")
    assert [one["truncated_tokens"] for one in rows] == [10, 30, 20]
    assert sum(one["deduplicated"] for one in rows) == 2
    assert len({one["completion"] for one in rows}) == 1


def test_bad_rows_before_good_ones_are_finished_do_not_end_a_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "load_engine", lambda *_: fake.FakeEngine(batch=4, room=256))
    source = write_input(tmp_path / "in", [None if i % 3 == 0 else fake.words(i) for i in range(600)])
    assert runner.run(job(tiny, source, tmp_path / "out", run__max_error_rate=0.4, run__min_rows=20)) == 0

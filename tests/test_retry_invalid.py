"""Rows asked again where their completions do not parse: how often, with which seeds, and the same after a break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchrun import runner
from batchrun.config import Config
from batchrun.engine.params import Completion
from batchrun.engine.seeds import row_seed
from batchrun.errors import BatchrunError, ConfigError, FingerprintMismatch
from tests import fake
from tests.engine.families import make_model
from tests.test_runner import job, read, write_input

ROWS, RETRIES = 40, 2


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def said(seed: int) -> str:
    """What the engine says for a seed: JSON in one case of three."""
    return f'{{"seed": {seed}}}' if seed % 3 == 0 else f"well, {seed}"


class Engine(fake.FakeEngine):
    """Texts follow from the seed alone. After `limit` completions it breaks down."""

    limit = 10**9

    def add(self, request: Any) -> None:
        self.seeds = {**getattr(self, "seeds", {}), request.key: request.params.seed}
        super().add(request)

    def step(self) -> list[Completion]:
        done = super().step()
        for completion in done:
            completion.text = said(self.seeds[completion.key])
        Engine.limit -= len(done)
        if Engine.limit < 0:
            raise BatchrunError("the engine broke down")
        return done


def asked(tiny: Path, folder: Path, output: str, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "sampling__temperature": 1.0,
        "output__parse": "json",
        "output__retry_invalid": RETRIES,
        "output__journal_seconds": 0.01,
        "output__chunk_rows": 16,
    }
    source = folder / "in"
    if not source.exists():
        write_input(source, [f"w{4 + i}" for i in range(ROWS)])
    return job(tiny, source, folder / output, **(settings | changes))


def run(config: Config) -> list[dict[str, Any]]:
    assert runner.run(config, load=lambda *_: Engine()) == 0
    return read(Path(str(config.output.path)))


def expected(number: int) -> tuple[str, int]:
    """The text and the attempts of a row by the definition of its seeds."""
    first = row_seed(0, "rows-0.parquet", number)
    for attempt in range(1, RETRIES + 2):
        seed = first if attempt == 1 else row_seed(first, "attempt", attempt - 1)
        if seed % 3 == 0 or attempt > RETRIES:
            return said(seed), attempt
    raise AssertionError


def test_rows_are_asked_until_they_parse(tiny: Path, tmp_path: Path) -> None:
    rows = run(asked(tiny, tmp_path, "out"))
    assert [(row["completion"], row["attempts"]) for row in rows] == [expected(i) for i in range(ROWS)]
    assert {row["attempts"] for row in rows} == {1, 2, 3}
    for row in rows:
        assert (row["parsed"] is None) == row["completion"].startswith("well")
        assert (row["parse_error"] is None) == (row["parsed"] is not None)
        assert row["parsed"] is not None or row["attempts"] == RETRIES + 1


def test_a_broken_run_goes_on_with_the_same_attempts(tiny: Path, tmp_path: Path) -> None:
    whole = run(asked(tiny, tmp_path, "whole"))
    for limit in (20, 30):
        Engine.limit = limit
        with pytest.raises(BatchrunError, match="broke down"):
            runner.run(asked(tiny, tmp_path, "broken"), load=lambda *_: Engine())
    Engine.limit = 10**9
    columns = ("source_row", "completion", "attempts", "parsed", "parse_error")
    resumed = run(asked(tiny, tmp_path, "broken"))
    assert [[row[c] for c in columns] for row in resumed] == [[row[c] for c in columns] for row in whole]


def test_equal_rows_are_asked_again_together(tiny: Path, tmp_path: Path) -> None:
    write_input(tmp_path / "in", ["w5"] * 10)
    rows = run(asked(tiny, tmp_path, "out", sampling__seed_by="content"))
    assert len({(row["completion"], row["attempts"]) for row in rows}) == 1
    assert [row["deduplicated"] for row in rows].count(False) == 1


def test_no_column_of_attempts_unless_asked(tiny: Path, tmp_path: Path) -> None:
    rows = run(asked(tiny, tmp_path, "out", output__retry_invalid=0))
    assert "attempts" not in rows[0]
    assert [row["completion"] for row in rows] == [said(row_seed(0, "rows-0.parquet", i)) for i in range(ROWS)]


def test_what_is_taken_follows_from_the_schema(tiny: Path, tmp_path: Path) -> None:
    run(asked(tiny, tmp_path, "out"))
    with pytest.raises(FingerprintMismatch, match=r"output\.schema \(for output\.retry_invalid\)"):
        run(asked(tiny, tmp_path, "out", output__schema={"type": "object"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling__temperature": 0.0}, "would get the same completion again"),
        ({"output__parse": "none"}, r"set output\.parse=json too"),
        ({"output__retry_invalid": -1}, "at least 0"),
        ({"prompt__turns": ["and?"], "prompt__kind": "chat"}, r"prompt\.turns"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], message: str, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(tiny, tmp_path, "out", **changes)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.bench import choose
from batchrun.errors import ConfigError
from tests.engine.families import make_model
from tests.test_tasks import LABELS, task, texts


def config(tmp_path: Path, name: str = "choose", **changes: Any) -> Any:
    model = make_model("llama", tmp_path / "model")
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": texts(14)}), tmp_path / "in" / "rows.parquet")
    return task(name, model, tmp_path / "in", tmp_path / "out", choose__labels=LABELS, **changes)


def test_all_ways_choose_the_same_labels_of_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choose, "SLICE_ROWS", 5)
    assert choose.run(config(tmp_path, bench__rows=12)) == 0
    (path,) = (tmp_path / "out").glob("choose-*.parquet")
    rows = pq.read_table(path).to_pylist()
    assert sum(row["rows"] for row in rows if row["way"] == "batchrun") == 12
    assert [row["first"] for row in rows if row["way"] == choose.LOOPS[0]] == [0, 5, 10]
    assert [row["first"] for row in rows if row["way"] == choose.LOOPS[1]] == [0]
    assert all(row["same"] == row["rows"] and row["largest_difference"] < 1e-3 for row in rows)
    assert all(row["cpu_s"] > 0 for row in rows)
    assert "same labels" in capsys.readouterr().out


def test_another_label_is_a_failure_unless_the_two_are_tied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = choose._loop

    def wrong(model: Any, prompt: Any) -> Any:
        return right(model, prompt)[::-1]

    made = config(tmp_path)
    monkeypatch.setattr(choose, "_loop", wrong)
    assert choose.run(made) == 1
    monkeypatch.setattr(choose, "CLOSE", 1e9)
    assert choose.run(made) == 0


def test_only_a_job_that_chooses_can_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add job=classify"):
        choose.run(config(tmp_path, name="score"))

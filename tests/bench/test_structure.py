"""`bench=structure` on a tiny model: three ways, the same rows, and what they are counted by."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.bench import bench
from batchrun.bench.structure import FORCED, FORM, FREE
from batchrun.compose import compose_config
from batchrun.errors import ConfigError
from tests.engine.speller import SCHEMA, make_speller


def test_forms_beside_free_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_speller(tmp_path / "model")
    pq.write_table(pa.table({"text": [f"a cat {i}" for i in range(6)]}), tmp_path / "rows.parquet")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    settings = [
        *("mode=bench", "bench=structure", "bench.rows=5", f"output.path={tmp_path / 'out'}"),
        *(f"model={tmp_path / 'model'}", "model.dtype=float32", "model.device=cpu", "engine.kv_cache_gib=0.05"),
        *(f"input.path={tmp_path / 'rows.parquet'}", "prompt=completion", "prompt.template={{ text }}"),
        f"structure.json={tmp_path / 'schema.json'}",
        "sampling.max_tokens=90",
    ]
    assert bench.run(compose_config(settings)) == 0
    assert "valid" in capsys.readouterr().out
    (file,) = (tmp_path / "out").glob("structure-*.parquet")
    costs = {cost["way"]: cost for cost in pq.read_table(file).to_pylist()}
    assert list(costs) == [FREE, FORM, FORCED]
    free, form, forced = costs.values()
    assert free["output_tokens"] == form["output_tokens"]
    assert (free["forced_tokens"], form["forced_tokens"]) == (0, 0)
    assert 0 < forced["forced_tokens"] < forced["output_tokens"]
    assert forced["steps"] < form["steps"]
    for cost in (form, forced):
        assert (cost["rows"], cost["cut"], cost["valid"]) == (5, 0, 5)
        assert cost["mask_wait_s"] < cost["seconds"]
    assert free["mask_wait_s"] == 0


def test_a_job_without_a_form_has_nothing_to_measure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs rows and their form"):
        bench.run(compose_config(["mode=bench", "bench=structure", "model=m", f"output.path={tmp_path}"]))

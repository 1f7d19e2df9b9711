from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchrun.bench import article
from batchrun.bench.article import Claim, Side, judge, make_claims
from batchrun.bench.engines import parse_engine
from batchrun.bench.measure import Bench, Trial
from batchrun.bench.workloads import Row, Workload
from batchrun.config import Config
from tests.bench.conftest import bench_config
from tests.bench.test_table import measured

SECONDS = {
    "transformers:batch=1": 4.0,
    "transformers:batch=1:use_cache=false": 12.0,
    "batchrun": 2.0,
    "batchrun:max_num_seqs=1": 5.0,
    "batchrun:max_num_seqs=8": 3.0,
    "batchrun:max_num_seqs=8:static=8": 4.5,
}


def test_a_ratio_of_times_per_token():
    claim = Claim("c", Side("a", "w", per=10), Side("batchrun", "v", per=100))
    result = judge(claim, [*measured("a", [8.0, 6.0]), *measured("batchrun", [4.0, 3.0], "v")])
    assert result.slow_s == pytest.approx(0.7)
    assert result.fast_s == pytest.approx(0.035)
    assert result.ratio == pytest.approx(20.0)
    half = judge(claim, measured("a", [8.0, 6.0]))
    assert half.slow_s == pytest.approx(0.7)
    assert (half.fast_s, half.ratio) == (None, None)


def test_claims_name_engines_and_workloads_that_there_are():
    workloads = {name: Workload(name, [Row([1, 2], 4)]) for name in ("single", "four", "uneven", "prefill")}
    claims = make_claims(workloads)
    sides = [side for claim in claims for side in (claim.slow, claim.fast)]
    assert len(claims) == 5
    assert {side.workload for side in sides} == set(workloads)
    for side in sides:
        assert parse_engine(side.engine, Config(), "m").label == side.engine


def test_a_line_for_each_claim(
    tiny: Path, known_limits: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pairs = []

    def measure(bench: Bench, trials: list[Trial]) -> None:
        bench.path.parent.mkdir()
        for trial in trials:
            for spec in trial.engines:
                pairs.append((trial.workload.name, spec.label))
                bench.measurements += measured(spec.label, [SECONDS[spec.label]], trial.workload.name)

    monkeypatch.setattr(Bench, "measure", measure)
    assert article.run(bench_config(tiny, tmp_path / "out")) == 0
    assert len(pairs) == len(set(pairs)) == 8
    lines = capsys.readouterr().out.splitlines()
    ratios = [line.split()[-1] for line in lines if line.endswith("x")]
    assert ratios[:4] == ["3.00x", "2.00x", "2.50x", "1.50x"]
    [path] = (tmp_path / "out" / "claims").glob("*.parquet")
    claims = pq.read_table(path).to_pylist()
    assert [f"{claim['ratio']:.2f}x" for claim in claims] == ratios
    assert claims[4]["ratio"] == pytest.approx(1024 / 128)


def test_workloads_of_the_claims(tiny: Path, known_limits: None, tmp_path: Path):
    model = article.open_model(bench_config(tiny, tmp_path))
    made = article.make_workloads(model)
    assert [len(workload.rows) for workload in made.values()] == [1, 4, 32, 1]
    assert len({row.max_tokens for row in made["uneven"].rows}) > 3
    assert {row.max_tokens for row in made["four"].rows} == {128}
    assert (made["prefill"].prompt_tokens, made["prefill"].output_tokens) == (1024, 1)
    assert len(article.make_workloads(model, 5)["uneven"].rows) == 5

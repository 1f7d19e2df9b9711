from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchrun_kernels import tune, tuned
from batchrun_kernels.tune import Case, Layer, decode_case, expert_cases, prefill_case, prefix_case
from batchrun_kernels.tuned import Key, Options

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> dict[Key, Options]:
    """A table of this test's own."""
    table: dict[Key, Options] = {}
    monkeypatch.setattr(tuned, "entries", lambda: table)
    return table


def test_what_was_measured_takes_the_place_of_the_rule(
    entries: dict[Key, Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "gpu_name", lambda device: "Some GPU" if device == "cuda" else "")
    entries[Key("Some GPU", "paged_decode", "128x2x2")] = {"num_warps": 2, "of_another_version": 1}
    rule = {"num_warps": 4, "num_stages": 3}
    assert tuned.tuned("paged_decode", "128x2x2", "cuda", **rule) == {"num_warps": 2, "num_stages": 3}
    assert tuned.tuned("paged_decode", "64x2x2", "cuda", **rule) == rule
    assert tuned.tuned("paged_prefill", "128x2x2", "cuda", **rule) == rule
    assert tuned.tuned("paged_decode", "128x2x2", "cpu", **rule) == rule


def test_the_table_of_the_package_is_read_and_written(tmp_path: Path) -> None:
    table = tuned.read_table(tuned.TABLE)
    table[Key("Some GPU", "paged_decode", "64x2x2")] = {"num_warps": 8}
    tuned.write_table(tmp_path / "table.json", table)
    assert tuned.read_table(tmp_path / "table.json") == table


def small_cases() -> Iterator[Case]:
    layer = Layer(4, 2, 16, CPU, torch.float32, num_sms=2)
    yield decode_case(layer, [70, 5])
    yield prefill_case(layer, [20])
    yield prefix_case(layer, 64, 3)
    yield from expert_cases(6, 2, 3, 16, 16, CPU, torch.float32)


@pytest.mark.parametrize("number", range(5))
def test_takes_the_fastest_that_computes_the_same(number: int, entries: dict[Key, Options]) -> None:
    case = list(small_cases())[number]
    two = case._replace(candidates=[case.candidates[0], case.candidates[-1]])
    times = iter([2.0, 1.0])
    found = dict(tune.tune([two], "", lambda run: next(times)))
    assert found == {Key("", case.kernel, case.shape): two.candidates[1]}
    assert not entries


def test_a_candidate_that_computes_something_else_is_left_out(entries: dict[Key, Options]) -> None:
    key = Key("", "a_kernel", "16x4")
    entries[key] = {"num_warps": 3}

    def run() -> torch.Tensor:
        return torch.tensor([1.0 if entries[key]["num_warps"] == 8 else 1.1])

    case = Case(
        "a_kernel", "16x4", torch.float32, [{"num_warps": 4}, {"num_warps": 8}], lambda: run, lambda: torch.ones(1)
    )
    assert dict(tune.tune([case], "", lambda run: float(run()))) == {key: {"num_warps": 8}}
    assert entries == {key: {"num_warps": 3}}, "a run of this process is changed by what was tried"
    wrong = case._replace(candidates=[{"num_warps": 4}])
    assert not dict(tune.tune([wrong], "", lambda run: 1.0))


def test_without_a_gpu_there_is_nothing_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([]) == 2
    assert "no GPU" in capsys.readouterr().err

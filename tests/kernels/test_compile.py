"""Compiles every kernel for GPUs that are not here, in a subprocess: the interpreter's switch is process-wide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROBE = """
import json
from batchrun_kernels import aot, targets
for case, used in aot.compile_all():
    print(json.dumps({"case": case, **used._asdict()}))
(starved,) = targets.record(aot.cases()["decode 128 page 16"])
starved.options["maxnreg"] = 32
print(json.dumps({"case": "starved", **targets.compile_launch(starved, "sm_90")._asdict()}))
"""
TARGETS = ("sm_80", "sm_90", "gfx942")
Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_every_target(rows: list[Row]) -> None:
    kernels = {
        "_rms_norm_kernel",
        "_act_and_mul_kernel",
        "_reshape_and_cache_kernel",
        "_rope_and_cache_kernel",
        "_gather_kernel",
        "_count_kernel",
        "_penalise_kernel",
        "_sample_kernel",
        "_token_logprobs_kernel",
        "_note_kernel",
        "_feed_kernel",
        "_decode_kernel",
        "_merge_kernel",
    }
    assert {(row["kernel"], row["target"]) for row in rows} == {(k, t) for k in kernels for t in TARGETS}
    cases = [row["case"] for row in rows if row["case"] != "starved"]
    assert all(cases.count(case) % len(TARGETS) == 0 for case in cases)


def test_no_kernel_spills_registers(rows: list[Row]) -> None:
    assert [row for row in rows if row["spilled"] and row["case"] != "starved"] == []


def test_a_spill_would_be_seen(rows: list[Row]) -> None:
    (starved,) = (row for row in rows if row["case"] == "starved")
    assert starved["registers"] <= 32
    assert starved["spilled"] > 0


def test_keys_and_values_are_loaded_sixteen_bytes_at_a_time(rows: list[Row]) -> None:
    decodes = [row for row in rows if row["kernel"] == "_decode_kernel"]
    for row in decodes:
        sinks = 2 if "sinks" in row["case"] else 0  # one element per head: nothing to vectorise
        assert row["narrow_loads"] <= sinks, row
        assert row["wide_loads"] >= 16, row
    caches = [row for row in rows if row["kernel"] == "_reshape_and_cache_kernel"]
    assert caches
    assert all(row["wide_loads"] >= 2 and row["narrow_loads"] == 0 for row in caches)


def test_products_of_half_precision_use_tensor_cores(rows: list[Row]) -> None:
    decodes = [row for row in rows if row["kernel"] == "_decode_kernel" and "float32" not in row["case"]]
    assert decodes
    assert all(row["matrix_ops"] >= 16 for row in decodes)


def test_tiles_fit_shared_memory_twice_on_nvidia_and_once_on_amd(rows: list[Row]) -> None:
    limit = {"sm_80": 163 * 1024 // 2, "sm_90": 227 * 1024 // 2, "gfx942": 64 * 1024}
    assert all(row["shared"] <= limit[row["target"]] for row in rows)

"""Compiles every kernel for GPUs that are not here, in a subprocess: the interpreter's switch is process-wide."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from batchrun_kernels.roofline import shapes

PROBE = """
import json
import torch
from batchrun_kernels import aot, targets, timing
for case, used in aot.compile_all():
    print(json.dumps({"case": case, **used._asdict()}))
(starved,) = targets.record(aot.cases()["decode 128 page 16"])
starved.options["maxnreg"] = 32
print(json.dumps({"case": "starved", **targets.compile_launch(starved, "sm_90")._asdict()}))
for (kernel, shape), make in timing.launches(torch.device("meta"), 132).items():
    print(json.dumps({"timed": [kernel, shape], "kernels": [x.kernel.__name__ for x in targets.record(make())]}))
"""
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
TARGETS = ("sm_80", "sm_90", "gfx942")
Row = dict[str, Any]


@pytest.fixture(scope="module")
def lines() -> list[Row]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def rows(lines: list[Row]) -> list[Row]:
    return [line for line in lines if "case" in line]


def test_every_shape_of_the_roofline_table_has_a_launch_that_can_be_timed(lines: list[Row]) -> None:
    timed = {tuple(line["timed"]): line["kernels"] for line in lines if "timed" in line}
    assert timed.keys() == shapes().keys()
    assert all(timed.values())
    assert timed[("grouped_gemm", "64 tokens, 8 of 128 experts of 768")] == ["_grouped_gemm_kernel"] * 2


def test_every_kernel_compiles_for_every_target(rows: list[Row]) -> None:
    kernels = {
        "_rms_norm_kernel",
        "_act_and_mul_kernel",
        "_reshape_and_cache_kernel",
        "_rope_and_cache_kernel",
        "_gather_kernel",
        "_grouped_gemm_kernel",
        "_matmul_kernel",
        "_count_kernel",
        "_penalise_kernel",
        "_sample_kernel",
        "_token_logprobs_kernel",
        "_note_kernel",
        "_feed_kernel",
        "_decode_kernel",
        "_prefill_kernel",
        "_prefix_kernel",
        "_merge_kernel",
    }
    assert {(row["kernel"], row["target"]) for row in rows} == {(k, t) for k in kernels for t in TARGETS}
    cases = Counter(row["case"] for row in rows if row["case"] != "starved")
    assert {case for case, count in cases.items() if count == len(TARGETS)} >= {"decode 128 fp8 bits", "prefill 128"}


def test_no_kernel_spills_registers(rows: list[Row]) -> None:
    """Prompts have large tiles that are chosen for Hopper's: elsewhere a few registers spill. So do six at most of the
    sampler's in a Triton before the one of constraints.txt: 3.6 keeps to 128 of them."""
    spilled = [row for row in rows if row["spilled"] and row["case"] != "starved"]
    elsewhere = [row for row in spilled if row["case"].startswith("pref") and row["target"] != "sm_90"]
    sampler = [row for row in spilled if row["kernel"] == "_sample_kernel" and triton_is_older()]
    assert [row for row in spilled if row not in elsewhere + sampler] == []
    assert all(row["spilled"] <= 96 for row in elsewhere)
    assert [row["spilled"] for row in rows if row["case"] == "prefix 128"] == [0, 0, 0]
    assert all(row["spilled"] <= 24 for row in sampler)


def triton_is_older() -> bool:
    """Than what constraints.txt has."""
    pinned = re.search(r"^triton==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pinned is not None
    return Version(version("triton")) < Version(pinned[1])


def test_a_spill_would_be_seen(rows: list[Row]) -> None:
    (starved,) = (row for row in rows if row["case"] == "starved")
    assert starved["registers"] <= 32
    assert starved["spilled"] > 0


def test_keys_and_values_are_loaded_sixteen_bytes_at_a_time(rows: list[Row]) -> None:
    attention = [row for row in rows if row["kernel"] in ("_decode_kernel", "_prefill_kernel", "_prefix_kernel")]
    for row in attention:
        sinks = 2 if "sinks" in row["case"] else 0  # one element per head: nothing to vectorise
        assert row["narrow_loads"] <= sinks, row
        assert row["wide_loads"] >= 12, row
    caches = [row for row in rows if row["kernel"] == "_reshape_and_cache_kernel"]
    assert caches
    assert all(row["wide_loads"] >= 2 and row["narrow_loads"] == 0 for row in caches)


def test_products_of_half_precision_use_tensor_cores(rows: list[Row]) -> None:
    kernels = ("_decode_kernel", "_prefill_kernel", "_prefix_kernel", "_grouped_gemm_kernel", "_matmul_kernel")
    products = [row for row in rows if row["kernel"] in kernels and "32" not in row["case"].rpartition(" ")[2]]
    assert {row["kernel"] for row in products} == set(kernels)
    # One of Hopper's covers what takes many of the others.
    few = ("experts 2048", "matmul", "prefill invariant")
    assert all(row["matrix_ops"] >= (4 if row["case"].startswith(few) else 16) for row in products)


def test_float32_is_multiplied_in_full_unless_it_is_tf32(rows: list[Row]) -> None:
    """NVIDIA's tensor cores take no float32 but as TF32; those of AMD do."""
    counts = {(row["case"], row["kernel"], row["target"]): row["matrix_ops"] for row in rows}
    full = [count for (case, _, target), count in counts.items() if "float32" in case and target != "gfx942"]
    assert len(full) > 4
    assert not any(full)
    less = {(case, target): count for (case, _, target), count in counts.items() if "tf32" in case}
    expected = {"decode 128 tf32", "prefill 128 tf32", "experts 64 tf32", "matmul 4096x4096 tf32"}
    assert {case for case, _ in less} == expected
    assert {target for _, target in less} == {"sm_80", "sm_90"}
    assert all(less.values())


def test_tiles_fit_shared_memory_and_those_of_decoding_twice_on_nvidia(rows: list[Row]) -> None:
    limit = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
    for row in rows:
        twice = row["target"] != "gfx942" and not row["case"].startswith(("pref", "experts 2048"))
        assert row["shared"] * (2 if twice else 1) <= limit[row["target"]], row

from __future__ import annotations

from pathlib import Path

from batchrun_kernels.cost import Cost
from batchrun_kernels.roofline import UNMEASURED, shapes, table

PERFORMANCE = Path(__file__).parents[2] / "docs" / "performance.md"


def test_the_slower_of_bytes_and_operations_bounds_the_time() -> None:
    assert Cost(bytes=1000, flops=10).seconds(bytes_per_second=100, flops_per_second=100) == 10
    assert Cost(bytes=10, flops=1000).seconds(bytes_per_second=100, flops_per_second=100) == 10


def test_what_was_measured_stands_beside_its_bound() -> None:
    shape = ("rms_norm", "2,048 tokens, with residual")
    seconds = shapes()[shape].bytes / 1e12
    lines = list(table({shape: 2 * seconds}, bytes_per_second=1e12, flops_per_second=1e15))
    assert sum("50% of the bound" in line for line in lines) == 1
    assert sum(UNMEASURED in line for line in lines) == len(shapes()) - 1


def test_the_documented_table_is_what_the_command_prints() -> None:
    assert "\n".join(table()) in PERFORMANCE.read_text("utf-8")

from __future__ import annotations

from pathlib import Path

from batchrun_kernels.cost import Cost
from batchrun_kernels.roofline import table

PERFORMANCE = Path(__file__).parents[2] / "docs" / "performance.md"


def test_the_slower_of_bytes_and_operations_bounds_the_time() -> None:
    assert Cost(bytes=1000, flops=10).seconds(bytes_per_second=100, flops_per_second=100) == 10
    assert Cost(bytes=10, flops=1000).seconds(bytes_per_second=100, flops_per_second=100) == 10


def test_the_documented_table_is_what_the_command_prints() -> None:
    assert "\n".join(table()) in PERFORMANCE.read_text("utf-8")

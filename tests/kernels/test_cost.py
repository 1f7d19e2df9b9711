from __future__ import annotations

from batchrun_kernels.cost import Cost


def test_the_slower_of_bytes_and_operations_bounds_the_time() -> None:
    assert Cost(bytes=1000, flops=10).seconds(bytes_per_second=100, flops_per_second=100) == 10
    assert Cost(bytes=10, flops=1000).seconds(bytes_per_second=100, flops_per_second=100) == 10

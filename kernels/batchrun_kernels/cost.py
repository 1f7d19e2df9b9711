"""What a kernel must move and compute at least: the yardstick of its measured time. No torch, no Triton."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Bytes to and from device memory, each counted once, and floating-point operations (a multiply-add is two)."""

    bytes: int
    flops: int

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """The roofline bound: the slower of moving the bytes and doing the operations."""
        return max(self.bytes / bytes_per_second, self.flops / flops_per_second)

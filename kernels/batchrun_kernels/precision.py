"""How kernels multiply float32 numbers: as torch's own products on that GPU do."""

from __future__ import annotations

import torch

TF32 = "tf32"  # 10 bits of mantissa go into a product, and float32 sums come out
IEEE = "ieee"


def product_precision(dtype: torch.dtype) -> str:
    """`input_precision` of `tl.dot` for operands of this type.

    TF32 for float32 where `torch.backends.cuda.matmul.fp32_precision` has it for torch's products, on NVIDIA only.
    """
    if dtype != torch.float32 or torch.version.hip is not None:
        return IEEE
    return TF32 if torch.backends.cuda.matmul.fp32_precision == TF32 else IEEE

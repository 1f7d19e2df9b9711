"""Matrix products of bfloat16 activations with packed weights, on processors with AVX512-BF16.

For few rows a product is bound by reading its weights, and a library call by its own overhead: this kernel reads the
weights at memory speed up to about eight rows, and computes near the processor's peak from about 32 on. What follows
a product elementwise (bias, residual, gated activation) is done while its results are in the cache.

The weights are as oneDNN lays them out for its own kernels, so one copy serves both: W [N, K] in panels of 64 output
features, each panel [K / 2, 64, 2].

`product(x, x_stride, rows, depth, w, bias, add, out, features, kind, first, last, coming)` is out [rows, features] =
x [rows, depth] W^T + bias + add, all bfloat16 at addresses, x_stride in elements. features must be a multiple of 64 and
depth of 32; bias and add may be 0 for none. With `kind` SILU or GELU_TANH, W is [2 features, depth], gates first, and
out = act(gates) * ups. Sums are float32, rounded once. Only panels [first, last) of `out` are computed; with the last,
what is at `coming` is fetched. FLOPs: 2 rows x depth x rows of W; bytes: W once, x once for each panel from the cache.
"""

from __future__ import annotations

import torch

from batchrun_kernels.cpu import pairs, wide
from batchrun_kernels.cpu.emit import pairs_at_full_rate, processor_has
from batchrun_kernels.cpu.tile import PANEL

ALIGN_K = 32  # K is padded to a multiple of this in the packed layout
product = pairs.product if pairs_at_full_rate() else wide.product


def has_bfloat16_products() -> bool:
    """Whether this processor has AVX512-BF16."""
    return processor_has("avx512bf16")


def can_read(dtype: torch.dtype, features: int, depth: int) -> bool:
    """Whether `product` may take a packed weight [features, depth]: its shape has no padding, and the processor can."""
    return dtype == torch.bfloat16 and features % PANEL == 0 and depth % ALIGN_K == 0 and has_bfloat16_products()

"""Matrix products of bfloat16 activations with packed weights, on processors with AVX512-BF16, AVX512 or AVX2.

For few rows a product is bound by reading its weights, and a library call by its own overhead: this kernel reads the
weights at memory speed up to about eight rows, and computes near the processor's peak from about 32 on. What follows
a product elementwise (bias, residual, gated activation) is done while its results are in the cache.

With AVX512-BF16 the weights are as oneDNN lays them out for its own kernels, so one copy serves both: W [N, K] in
panels of 64 output features, each panel [K / 2, 64, 2]. Elsewhere the library has no bfloat16, or only a slow one, and
`pack` lays them out: panels of 64 features as [64 / S, K / 2, S, 2], S being SIDE of wide.py.

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
    """Whether this processor can take `product`."""
    return processor_has("avx512bf16") or has_own_layout()


def has_own_layout() -> bool:
    """Whether `product` takes weights as `pack` lays them out, and not oneDNN."""
    return processor_has("avx2") and processor_has("fma") and not processor_has("avx512bf16")


def can_read(dtype: torch.dtype, features: int, depth: int) -> bool:
    """Whether `product` may take a packed weight [features, depth]: its shape has no padding, and the processor can."""
    return dtype == torch.bfloat16 and fits(features, depth) and has_bfloat16_products()


def fits(features: int, depth: int) -> bool:
    """Whether a weight [features, depth] has no padding when it is packed."""
    return features % PANEL == 0 and depth % ALIGN_K == 0


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] that `fits` as [N / S, K / 2, S, 2]."""
    features, depth = weight.shape
    side = wide.SIDE
    return weight.view(features // side, side, depth // 2, 2).transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] that `pack` was given."""
    blocks, pairs_of_k, side, _ = packed.shape
    return packed.transpose(1, 2).reshape(blocks * side, 2 * pairs_of_k)

"""Matrix products with weights packed once for the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

PACK_ROWS = 256  # the batch size that the packed layout is chosen for
HEAD_ROWS = 128  # rows of the LM head at once: more, and the logits leave the cache


class PackedLinear(torch.nn.Module):
    """y [M, out] = x [M, in] W^T + b, for the rows of several `nn.Linear` stacked into one product.

    `F.linear` lays the weight out anew for each call; oneDNN can be given it laid out once.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.out_features, self.in_features = weight.shape
        self.bias = None
        if any(linear.bias is not None for linear in linears):
            biases = [weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears]
            self.bias = torch.cat(biases)
        self.packed = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self.weight = weight

    def dense(self) -> torch.Tensor:
        """The weight [out, in], laid out as usual."""
        return self.weight.to_dense() if self.packed else self.weight

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in]; `add` [..., out] is added before the result is rounded."""
        if not self.packed:
            y = F.linear(x, self.weight, self.bias)
            return y if add is None else y + add
        if add is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, add, self.weight, self.bias, "add")


class PackedHead(PackedLinear):
    """The LM head: the same product, a bounded number of rows at a time."""

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        out = x.new_empty(len(rows), self.out_features)
        for start in range(0, len(rows), HEAD_ROWS):
            out[start : start + HEAD_ROWS] = super().forward(rows[start : start + HEAD_ROWS])
        return out.view(*x.shape[:-1], self.out_features)

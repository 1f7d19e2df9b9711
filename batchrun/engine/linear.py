"""Matrix products with weights packed once for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from batchrun_kernels.cpu import matrix, product
from batchrun_kernels.cpu.after import NONE

PACK_ROWS = 256  # the batch size that the packed layout is chosen for
HEAD_ROWS = 128  # rows of the LM head at once: more, and the logits leave the cache
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
KERNELS = (matrix, product)  # which can read depends on the processor, which decides the packed layout too
PROBE_ROWS = 7
PROBE_ERROR = 0.02  # relative; both round to bfloat16


def is_plain(module: Any) -> bool:
    """Whether a module computes with a weight of ordinary floats: libraries that quantise put integers, or tensors of
    types of their own, into a `Linear`, or another forward."""
    return holds_floats(getattr(module, "weight", None)) and "forward" not in vars(module)


def holds_floats(weight: Any) -> bool:
    """Whether it is a tensor of ordinary floats, not one of a library's own type."""
    return type(weight) in PLAIN and weight.dtype in FLOATS


class PackedLinear(torch.nn.Module):
    """y [M, out] = x [M, in] W^T + b, for the rows of several `nn.Linear` stacked into one product.

    `F.linear` lays the weight out anew for each call; oneDNN can be given it laid out once, and where a kernel of ours
    can read that layout it has less overhead (see product.py and matrix.py in batchrun_kernels/cpu). On processors for
    which oneDNN has no bfloat16 that is fast, weights are laid out for our kernel alone.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.out_features, self.in_features = weight.shape
        # Name in the model, where it was given one, and outputs of each.
        self.sources = [(getattr(linear, "full_name", ""), linear.out_features) for linear in linears]
        self.bias = None
        if any(linear.bias is not None for linear in linears):
            biases = [weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears]
            self.bias = torch.cat(biases)
        on_cpu = weight.device.type == "cpu"
        # Laid out by us and for our kernel alone, or by the library.
        self.own = on_cpu and product.has_own_layout() and product.can_read(weight.dtype, *weight.shape)
        self.packed = on_cpu and not self.own and library_packs(weight.dtype)
        if self.own:
            weight = product.pack(weight)
        elif self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self.weight = weight
        self.kernel: Any = product if self.own else None
        if self.packed:
            self.kernel = self._choose_kernel()

    def dense(self) -> torch.Tensor:
        """The weight [out, in], laid out as usual."""
        if self.own:
            return product.unpack(self.weight)
        return self.weight.to_dense() if self.packed else self.weight

    def address(self) -> int:
        """Where the weight lies, as the kernel takes it."""
        return self.weight.data_ptr() if self.own else int(torch.ops.mkldnn.data_ptr(self.weight))

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in]; `add` [..., out] is added before the result is rounded."""
        if x.dim() == 2 and self._has_kernel():
            return self._own(x, add, NONE)
        if self.own:
            rows = x.reshape(-1, self.in_features)
            more = None if add is None else add.reshape(-1, self.out_features)
            return self._own(rows, more, NONE).view(*x.shape[:-1], self.out_features)
        if not self.packed:
            y = F.linear(x, self.weight, self.bias)
            return y if add is None else y + add
        if add is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, add, self.weight, self.bias, "add")

    def gated(self, x: torch.Tensor, kind: int) -> torch.Tensor | None:
        """act(gates) * ups [M, out / 2], the first half of the features being gates; None if it must be done apart."""
        if not self._has_kernel() or self.out_features % (2 * self.kernel.PANEL):
            return None
        return self._own(x, None, kind)

    def _has_kernel(self) -> bool:
        # Ours compute in one thread: where torch has more, oneDNN has them all.
        return self.own or (self.kernel is not None and torch.get_num_threads() == 1)

    def _own(self, x: torch.Tensor, add: torch.Tensor | None, kind: int) -> torch.Tensor:
        features = self.out_features if kind == NONE else self.out_features // 2
        out, weight = x.new_empty(len(x), features), self.address()
        self.kernel.product(
            x.data_ptr(),
            x.stride(0),
            len(x),
            self.in_features,
            weight,
            0 if self.bias is None else self.bias.data_ptr(),
            0 if add is None else add.data_ptr(),
            out.data_ptr(),
            features,
            kind,
            0,
            features // self.kernel.PANEL,
            weight,
        )
        return out

    def _choose_kernel(self) -> Any:
        """The first module whose `product` gives oneDNN's numbers: the layout is oneDNN's affair and may change."""
        x = torch.sin(torch.arange(PROBE_ROWS * self.in_features, dtype=torch.float32)).to(self.weight.dtype)
        x = x.view(PROBE_ROWS, self.in_features)
        expected = self(x).float()
        for self.kernel in KERNELS:
            if not self.kernel.can_read(self.weight.dtype, self.out_features, self.in_features):
                continue
            difference = self._own(x, None, NONE).float() - expected
            if float(difference.norm()) <= PROBE_ERROR * float(expected.norm()):
                return self.kernel
        return None


def library_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN can be given weights of a type laid out once, on this processor."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedHead(PackedLinear):
    """The LM head: the same product, a bounded number of rows at a time."""

    lead: Callable[[PackedLinear, torch.Tensor], torch.Tensor] | None = None  # by the threads of a team

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if self.lead is not None:
            return self.lead(self, rows).view(*x.shape[:-1], self.out_features)
        if self._has_kernel():
            return super().forward(rows).view(*x.shape[:-1], self.out_features)
        out = x.new_empty(len(rows), self.out_features)
        for start in range(0, len(rows), HEAD_ROWS):
            out[start : start + HEAD_ROWS] = super().forward(rows[start : start + HEAD_ROWS])
        return out.view(*x.shape[:-1], self.out_features)

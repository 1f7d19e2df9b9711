"""Batch invariance with the kernels of a GPU: products and norms that compute a row in one way, whatever is beside it.

Products go through matmul.py of the kernels, norms through rms_norm.py and experts through grouped_gemm.py with tiles
of one height. What torch then still computes is read off a trial step: elementwise operations, and those that give a
row to a block or a warp of its own, may stay; products and long sums, which it divides by the number of rows, may not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from batchrun.engine.experts import pack_experts
from batchrun.engine.experts_device import GroupedExperts
from batchrun.engine.layers import PROBE_TOKENS, TOLERANCE
from batchrun.engine.layers_device import DeviceNorm
from batchrun.engine.linear import PackedLinear
from batchrun.errors import ConfigError
from batchrun_kernels.matmul import matmul

SHORT = 32  # elements that torch sums in one way, however many sums there are
# Products of torch, with the place of the argument whose last dimension is summed over.
PRODUCTS = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "mv", "dot"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), 1),
}
SUMS = {"mean", "sum", "var", "std", "var_mean", "norm", "linalg_vector_norm", "logsumexp", "prod"}
SCANS = {"cumsum", "cumprod", "logcumsumexp"}
REFUSED = {
    *("_grouped_mm", "_scaled_mm", "_linear_pointwise", "einsum", "scaled_dot_product_attention", "convolution"),
    *("conv1d", "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce"),
}


def fix_modules(model: Any) -> None:
    """Let every product, RMS norm and set of experts of a PagedModel compute each row in one way, where it is known
    how; `WatchedStep` tells what is left."""
    pack_experts(model.module, GroupedExperts)
    for module in list(model.module.modules()):
        if isinstance(module, GroupedExperts):
            module.fix_tiles()
        elif isinstance(module, PackedLinear) or _holds_matrix(module):
            module.forward = _Fixed(module.forward)
        elif type(module).__name__.endswith("Norm"):
            _fix_norm(module)


class FixedProducts(TorchFunctionMode):
    """In this context the linear products of torch are computed by our kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _COMPUTED.get(func, func)(*args, **(kwargs or {}))


class WatchedStep(TorchDispatchMode):
    """Raises ConfigError in this context for what torch computes in a way that depends on the number of rows."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self._family = family

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in REFUSED or _is_product(name, args) or _is_long_sum(name, args, out):
            raise ConfigError(
                f"engine.batch_invariant=true is not there for {self._family}: it uses torch.{name}, whose sums depend "
                "on how many rows there are: use engine.batch_invariant=false"
            )
        return out


class _Fixed:
    """The forward of a module, with its products fixed."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with FixedProducts():
            return self._compute(*args, **kwargs)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = matmul(rows if rows.stride(1) == 1 else rows.contiguous(), weight, bias)
    return out.view(*x.shape[:-1], len(weight))


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _linear(x, weight.T, bias)


_COMPUTED: dict[Any, Callable[..., torch.Tensor]] = {F.linear: _linear, torch.addmm: _addmm}


def _holds_matrix(module: torch.nn.Module) -> bool:
    """Whether it may multiply by a matrix of its own, as products and routers do."""
    own = module.parameters(recurse=False)
    return not isinstance(module, torch.nn.Embedding) and any(weight.dim() == 2 for weight in own)


@torch.inference_mode()
def _fix_norm(module: Any) -> None:
    """Put our kernel in the place of an RMS norm; others stay."""
    weight = getattr(module, "weight", None)
    if isinstance(module, torch.nn.LayerNorm) or weight is None or weight.dim() != 1:
        return
    x = torch.sin(torch.arange(PROBE_TOKENS * len(weight))).view(PROBE_TOKENS, -1).to(weight)
    for unit_offset in (False, True):
        try:
            expected, norm = module(x), DeviceNorm(module, unit_offset)
            off = (norm(x).float() - expected.float()).norm()
        except (AttributeError, RuntimeError, ValueError, TypeError):
            return
        if off <= TOLERANCE[weight.dtype] * expected.float().norm() and expected.dtype == x.dtype:
            module.forward = lambda x, norm=norm: norm(x.reshape(-1, x.shape[-1])).view(x.shape)
            return


def _is_product(name: str, args: Any) -> bool:
    """Whether it sums over more than one element: a product of single ones, as RoPE's, is rounded once."""
    return name in PRODUCTS and args[PRODUCTS[name]].shape[-1] > 1


def _is_long_sum(name: str, args: Any, out: Any) -> bool:
    if name not in SUMS | SCANS or not args[0].is_floating_point():
        return False
    if name in SCANS:
        return True
    results = out if isinstance(out, torch.Tensor) else out[0]
    return bool(args[0].numel() > SHORT * results.numel())

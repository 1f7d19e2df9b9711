"""LoRA adapters into a model: one merged into the weights, or several beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from batchrun.engine.adapted import AdaptedLinear, adapted
from batchrun.engine.adapter import Adapter, features, is_product
from batchrun.engine.layers import PROBE_TOKENS, dry_logits
from batchrun.errors import ConfigError

REMEDY = "use it alone, as model.adapter"


@torch.inference_mode()
def merge(module: Any, adapter: Adapter) -> None:
    """W + scale B A in the place of W, in a transformers module on the CPU; the sum is made in float32."""
    products = dict(module.named_modules())
    for name, (a, b) in adapter.read().items():
        product = products[name]
        delta = b @ a if isinstance(product, torch.nn.Linear) else (b @ a).T
        weight = (product.weight.float() + delta).to(product.weight.dtype)
        # In a parameter of its own: an LM head's may be that of the embedding too, which is not adapted.
        product.weight = torch.nn.Parameter(weight, requires_grad=False)


def name_products(module: Any) -> None:
    """Let each product know its name, which the products it is merged into then hold as their `sources`."""
    for name, part in module.named_modules():
        if is_product(part):
            part.full_name = name


def install(model: Any, adapters: Sequence[Adapter]) -> None:
    """Put adapters beside the products of a PagedModel, whose products were named before any of them was merged.

    Rows of a batch name them by their places from 1. Raises ConfigError if a product of an adapter cannot have one.
    """
    factors = {number: adapter.read() for number, adapter in enumerate(adapters, 1)}
    left = {name: adapter.key for adapter in adapters for name in adapter.products}
    for parent in list(model.module.modules()):
        for name, child in list(parent.named_children()):
            sources = _sources(child)
            deltas = {
                number: _stacked(sources, products, model)
                for number, products in factors.items()
                if any(source in products for source, _ in sources)
            }
            if deltas:
                setattr(parent, name, AdaptedLinear(child, deltas))
            for source, _ in sources:
                left.pop(source, None)
    for name, key in left.items():
        raise ConfigError(f"{key}: this engine computes {name} in a way of its own: {REMEDY}")
    _check(model, adapters)


def _sources(child: Any) -> list[tuple[str, int]]:
    """Name and outputs of each product of the original that a module computes."""
    if is_product(child):
        return [(child.full_name, features(child)[1])]
    sources: list[tuple[str, int]] = getattr(child, "sources", [])
    return sources


def _stacked(
    sources: Sequence[tuple[str, int]], products: Mapping[str, tuple[torch.Tensor, torch.Tensor]], model: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """One A [R, in] and B [out, R] for products that are computed as one; B has a block for each of them."""
    parts = [products[name] for name, _ in sources if name in products]
    b = torch.zeros(sum(size for _, size in sources), sum(len(a) for a, _ in parts))
    row = column = 0
    for name, size in sources:
        if name in products:
            own = products[name][1]
            b[row : row + size, column : column + own.shape[1]] = own
            column += own.shape[1]
        row += size
    a = torch.cat([a for a, _ in parts])
    return a.to(model.device, model.dtype), b.to(model.device, model.dtype)


@torch.inference_mode()
def _check(model: Any, adapters: Sequence[Adapter]) -> None:
    """Try each adapter on a few tokens. Raises ConfigError for one that the model's code does not let through."""
    for number, adapter in enumerate(adapters, 1):
        try:
            with adapted(np.full(PROBE_TOKENS, number), model.device):
                finite = bool(dry_logits(model).isfinite().all())
        except (AttributeError, RuntimeError, ValueError, TypeError) as error:
            family = model.module.config.model_type
            raise ConfigError(f"{adapter.key}: {family} uses its products in other ways ({error}): {REMEDY}") from error
        if not finite:
            raise ConfigError(f"{adapter.key}={adapter.folder}: its logits are not finite: its weights are damaged")

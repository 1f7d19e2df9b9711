"""`engine.batch_invariant=true`: a row gets bitwise the same completion in whatever batch it is computed.

A library chooses by the shape of a product how it sums, so a token's numbers depend on how many tokens are computed
with it (He and Thinking Machines, "Defeating Nondeterminism in LLM Inference", 2025). Here each product gets a fixed
number of rows, padded with zeros, in one thread. Our own kernels sum every row in one order whatever is beside it, and
the attention takes the pages of a row one after the other, shared or not. That nothing else in a model looks at the
batch is tried when it is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from batchrun.config import EngineConfig
from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention.base import AttentionBackend
from batchrun.engine.linear import PackedLinear
from batchrun.engine.model import PagedModel
from batchrun.errors import ConfigError

log = logging.getLogger(__name__)

ROWS = 16  # of every product that the library computes
LENGTHS = (40, 17, 19, 33)  # of the rows that are tried: prompts beside tokens that decode
CHUNKS = (1, 7, 40)


class FixedRows:
    """A product or norm on ROWS rows at a time; `whole`: on all at once, in the two dimensions that our kernels ask."""

    def __init__(self, compute: Callable[..., torch.Tensor], whole: bool = False) -> None:
        self.compute, self.whole = compute, whole

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in] and what is added to the result, [..., out] -> [..., out]."""
        given = [each.reshape(-1, each.shape[-1]) for each in (x, add) if each is not None]
        pieces = [] if self.whole else [self._piece(given, start) for start in range(0, len(given[0]), ROWS)]
        out = torch.cat(pieces) if pieces else self.compute(*given)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _piece(self, given: list[torch.Tensor], start: int) -> torch.Tensor:
        left = len(given[0]) - start
        if left >= ROWS:
            return self.compute(*(each[start : start + ROWS] for each in given))
        full = [each.new_zeros(ROWS, each.shape[1]) for each in given]
        for each, target in zip(given, full, strict=True):
            target[:left] = each[start:]
        return self.compute(*full)[:left]


def check_setting(config: EngineConfig, device: torch.device, adapters: bool, encodes: bool) -> None:
    """Raise ConfigError for settings that batch invariance is not there for."""
    wrong = None
    if device.type != "cpu":
        wrong = f"model.device={device}", "model.device=cpu, as the products of a GPU's library depend on the batch"
    elif config.attention not in ("auto", "cpu"):
        wrong = f"engine.attention={config.attention}", "engine.attention=cpu"
    elif adapters:
        wrong = "model.adapters", "model.adapter, which is merged into the weights"
    elif encodes:
        wrong = "a model that gives vectors", "engine.batch_invariant=false"
    elif not config.fused_layers:
        wrong = "engine.fused_layers=false", "engine.fused_layers=true"
    if wrong:
        raise ConfigError(f"engine.batch_invariant=true is not there for {wrong[0]}: use {wrong[1]}")


def make_invariant(model: PagedModel) -> None:
    """Let every product and norm of the model compute a fixed number of rows, or our own kernel any number.

    Raises ConfigError for a mixture of experts, whose products have the rows that chose an expert.
    """
    if any(name.endswith("experts") for name, _ in model.module.named_modules()):
        raise ConfigError(
            f"engine.batch_invariant=true is not there for the experts of {model.module.config.model_type}, which take "
            "as many rows as choose them: use engine.batch_invariant=false"
        )
    torch.set_num_threads(1)
    for module in model.module.modules():
        if isinstance(module, PackedLinear | torch.nn.Linear) or type(module).__name__.endswith("Norm"):
            _fix_rows(module)


def _fix_rows(module: Any) -> None:
    module.forward = FixedRows(module.forward, whole=getattr(module, "kernel", None) is not None)


def check_invariance(model: PagedModel, backend: type[AttentionBackend]) -> None:
    """Raise ConfigError unless rows have the same bits alone, together, and in steps of any size."""
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, model.vocab_size, size=length, dtype=np.int32) for length in LENGTHS]
    alone = torch.cat([paged_logits(model, backend, [prompt], max(CHUNKS)) for prompt in prompts])
    for chunk in CHUNKS:
        together = paged_logits(model, backend, prompts, chunk)
        if not torch.equal(together, alone):
            off = float((together - alone).abs().max())
            raise ConfigError(
                "engine.batch_invariant=true cannot be kept on this processor: logits of a row of "
                f"{model.module.config.model_type} in {model.dtype}, alone and in a batch, differ by up to {off:.2g}. "
                "Use engine.batch_invariant=false, or another model.dtype"
            )
    log.info("rows have the same bits alone, together and in steps of %s tokens", ", ".join(map(str, CHUNKS)))

"""`engine.batch_invariant=true`: a row gets bitwise the same completion in whatever batch it is computed.

A library chooses by the shape of a product how it sums, so a token's numbers depend on how many tokens are computed
with it (He and Thinking Machines, "Defeating Nondeterminism in LLM Inference", 2025). On a CPU each product gets a
fixed number of rows, padded with zeros, in one thread; on a GPU it goes through a kernel of our own. Our own kernels
sum every row in one order whatever is beside it, and the attention takes the pages of a row one after the other, shared
or not. That nothing else in a model looks at the batch is tried when it is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from batchrun.config import EngineConfig
from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention.base import AttentionBackend
from batchrun.engine.attention.cpu import CpuAttention
from batchrun.engine.checkpoint import position_limit
from batchrun.engine.linear import PackedLinear
from batchrun.engine.model import PagedModel
from batchrun.errors import ConfigError

log = logging.getLogger(__name__)

ROWS = 16  # of every product that the library computes


class Trial(NamedTuple):
    """Rows that are computed alone and together: prompts beside tokens that decode."""

    lengths: tuple[int, ...]
    chunks: tuple[int, ...]  # most tokens of a row in a step


ON_CPU = Trial((40, 17, 19, 33), (1, 7, 40))
ON_DEVICE = Trial((150, 67, 130, 65), (13, 64, 129))  # more keys and rows than kernels have in a tile


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
    ours = "cpu" if device.type == "cpu" else "triton"
    if device.type not in ("cpu", "cuda"):
        wrong = f"model.device={device}", "model.device=cpu or cuda"
    elif config.attention not in ("auto", "triton", ours):
        wrong = f"engine.attention={config.attention}", f"engine.attention={ours}"
    elif adapters:
        wrong = "model.adapters", "model.adapter, which is merged into the weights"
    elif encodes:
        wrong = "a model that gives vectors", "engine.batch_invariant=false"
    elif device.type == "cpu" and not config.fused_layers:
        wrong = "engine.fused_layers=false", "engine.fused_layers=true"
    if wrong:
        raise ConfigError(f"engine.batch_invariant=true is not there for {wrong[0]}: use {wrong[1]}")


def make_invariant(model: PagedModel, backend: type[AttentionBackend]) -> None:
    """Let every product and norm of the model compute a fixed number of rows, or our own kernel any number.

    Raises ConfigError for a mixture of experts on a CPU, whose products have the rows that chose an expert.
    """
    if not issubclass(backend, CpuAttention):
        from batchrun.engine.invariance_device import fix_modules

        model.invariant = True
        fix_modules(model)
        return
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


def check_invariance(model: PagedModel, backend: type[AttentionBackend], block_size: int | None = None) -> None:
    """Raise ConfigError unless rows have the same bits alone, together, and in steps of any size."""
    on_cpu, family = issubclass(backend, CpuAttention), model.module.config.model_type
    trial, generator = ON_CPU if on_cpu else ON_DEVICE, np.random.default_rng(1)
    limit = position_limit(model.module.config.get_text_config(decoder=True)) or max(trial.lengths)
    lengths = [min(length, limit) for length in trial.lengths]
    prompts = [generator.integers(0, model.vocab_size, size=length, dtype=np.int32) for length in lengths]
    with nullcontext() if on_cpu else _watched(family):
        alone = torch.cat([paged_logits(model, backend, [x], max(lengths), block_size=block_size) for x in prompts])
    for chunk in trial.chunks:
        together = paged_logits(model, backend, prompts, chunk, block_size=block_size)
        if not torch.equal(together, alone):
            off = float((together - alone).abs().max())
            raise ConfigError(
                f"engine.batch_invariant=true cannot be kept on this processor: logits of a row of {family} in "
                f"{model.dtype}, alone and in a batch, differ by up to {off:.2g}. Use engine.batch_invariant=false, or "
                "another model.dtype"
            )
    log.info("rows have the same bits alone, together and in steps of %s tokens", ", ".join(map(str, trial.chunks)))


def _watched(family: str) -> Any:
    from batchrun.engine.invariance_device import WatchedStep

    return WatchedStep(family)

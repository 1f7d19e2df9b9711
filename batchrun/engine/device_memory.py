"""What the memory of a GPU is spent on, found by a trial step, and what that leaves for the KV cache."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, Protocol

import torch

from batchrun.engine import hook
from batchrun.engine.attention.base import LayerCall
from batchrun.engine.checkpoint import position_limit
from batchrun.errors import ConfigError

log = logging.getLogger(__name__)

GIB = 2**30
LEAST_TOKENS = 16  # of a step: a GPU that has no room for these has none for the model


ALWAYS = ("weights", "step", "logits")
NAMES = {
    **{name: name for name in ALWAYS},
    "penalties": "penalty table",
    "workspace": "attention workspace",
    "graph_buffers": "buffers of graphs",
    "graphs": "graphs (estimated)",
}


class DeviceMemory(NamedTuple):
    """Bytes of a device: all there are, what others hold, and what this process needs."""

    total: int
    others: int
    weights: int
    step: int  # activations of a step of the token budget
    logits: int  # of all rows that may run, with what the sampler makes of them
    penalties: int = 0  # the table of how often each row has each token
    workspace: int = 0  # of the library that attends
    graph_buffers: int = 0  # what recorded steps read
    graphs: int = 0  # what recorded steps compute in: estimated

    def left(self, utilization: float) -> int:
        """Bytes for the KV cache, if this process may use `utilization` of the device."""
        allowed = min(int(utilization * self.total), self.total - self.others)
        return allowed - sum(self[2:])

    def explain(self, utilization: float) -> str:
        """The sum, in GiB."""
        held = f"; others hold {self.others / GIB:.2f}" if self.others else ""
        sizes = {name: size for name, size in self._asdict().items() if name in ALWAYS or (name in NAMES and size)}
        parts = " + ".join(f"{NAMES[name]} {size / GIB:.2f}" for name, size in sizes.items())
        return (
            f"{self.total / GIB:.2f} GiB x engine.gpu_memory_utilization={utilization}{held}: {parts} + "
            f"KV cache {self.left(utilization) / GIB:.2f} GiB"
        )


class Meter(Protocol):
    """What a device says of its memory, in bytes."""

    def free_and_total(self) -> tuple[int, int]: ...

    def allocated(self) -> int:
        """Held by tensors of this process now."""

    def reserved(self) -> int:
        """Taken from the device by this process."""

    def peak(self) -> int:
        """The most that was allocated since `reset`."""

    def reset(self) -> None:
        """Give back what no tensor holds, and forget the peak."""


class CudaMeter:
    """The meter of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)


def measure_memory(model: Any, meter: Meter, tokens: int, rows: int) -> tuple[DeviceMemory, int]:
    """Memory of a PagedModel with its weights loaded, and how many of `tokens` a step may have; `rows` may run at once.

    A step that runs out of memory is tried with half the tokens. Raises ConfigError if there is no room for
    LEAST_TOKENS.
    """
    meter.reset()
    weights = meter.allocated()
    free, total = meter.free_and_total()
    others = max(0, total - free - meter.reserved())
    asked = tokens
    while True:
        try:
            step = _peak(model, meter, tokens, 1)
            logits = _peak(model, meter, min(tokens, rows), rows)
            break
        except torch.OutOfMemoryError as error:
            tokens //= 2
            if tokens < LEAST_TOKENS:
                raise ConfigError(
                    f"the device has {total / GIB:.2f} GiB, others hold {others / GIB:.2f}, the weights "
                    f"{weights / GIB:.2f}, and a step of a few tokens finds no room: take a smaller model or another "
                    f"device, or lower engine.max_num_seqs={rows}"
                ) from error
    if tokens < asked:
        log.warning(
            "a step of engine.max_batched_tokens=%d tokens does not fit the device: %d are taken", asked, tokens
        )
    return DeviceMemory(total, others, weights, step, logits), tokens


@torch.inference_mode()
def _peak(model: Any, meter: Meter, tokens: int, rows: int) -> int:
    """Bytes over those of the weights that a step takes, with logits of `rows` rows."""
    limit = position_limit(model.module.config.get_text_config(decoder=True)) or tokens
    places = torch.arange(tokens)
    meter.reset()
    before = meter.allocated()
    with hook.forward_context(_no_attention):
        logits = model.run(places % model.vocab_size, places % limit, torch.arange(rows) % tokens)
    if rows > 1:
        logits.float().log_softmax(dim=-1)
    return meter.peak() - before


def _no_attention(call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> torch.Tensor:
    return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

"""Our attention inside transformers' models.

`AttentionInterface.register` makes a function callable by name from every model that supports attention
backends. Models call it with the flattened batch as one row; what belongs to the step reaches it through
a context of the thread rather than keyword arguments, because not every model passes those on. No mask
function is registered under the name, which makes transformers build no mask at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

from batchrun.engine.attention.base import AttentionBackend, LayerCall

if TYPE_CHECKING:
    from batchrun_kernels.rope_and_cache import Pages

NAME = "batchrun_paged"
WINDOW_ON_EVERY_LAYER = {"phimoe"}  # these mask by their config's window, have no layer types and pass no window
_ABSENT: Any = object()

Attend = Callable[[LayerCall, torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


@dataclass(slots=True)
class ForwardContext:
    """One forward pass: who attends, and what the model did."""

    attend: Attend
    backend: AttentionBackend | None = None  # that `attend` calls, if layers of our own may call it too
    calls: int = 0  # layers that have called so far; the next call is this layer
    masked: bool = False  # whether a layer came with a mask of its own


class _Current(threading.local):
    """Of each thread: engines of several threads may compute at once."""

    context: ForwardContext | None = None


_current = _Current()


@contextmanager
def forward_context(attend: Attend, backend: AttentionBackend | None = None) -> Iterator[ForwardContext]:
    """Let the model's attention layers call `attend(call, q, k, v, module)` in this thread; not reentrant."""
    context = _current.context = ForwardContext(attend, backend)
    try:
        yield context
    finally:
        _current.context = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = _ABSENT,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention contract: q [1, Hq, T, Dk], k [1, Hkv, T, Dk], v [1, Hkv, T, Dv] -> [1, T, Hq, Dv]."""
    context = _current.context
    if context is None:
        raise RuntimeError(f"attention {NAME!r} was called outside of a batchrun forward pass")
    call = LayerCall(
        layer=context.calls,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=_layer_window(module) if sliding_window is _ABSENT else sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    context.calls += 1
    context.masked |= attention_mask is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return context.attend(call, q, k, v, module)[None], None


def attend(call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same for a layer of our own: q [T, Hq, Dk], k [T, Hkv, Dk], v [T, Hkv, Dv] -> [T, Hq, Dv]."""
    context = _current.context
    if context is None:
        raise RuntimeError("a fused layer was called outside of a batchrun forward pass")
    context.calls += 1
    return context.attend(call, q, k, v, None)


def destination(call: LayerCall) -> Pages | None:
    """Where a layer of our own may write K and V of this step itself, to call `attend_written` then; None: nowhere."""
    context = _current.context
    return None if context is None or context.backend is None else context.backend.destination(call.layer)


def attend_written(call: LayerCall, q: torch.Tensor) -> torch.Tensor:
    """Attention with q [T, Hq, Dk] -> [T, Hq, Dv], once K and V are at the `destination`."""
    context = _current.context
    assert context is not None
    assert context.backend is not None
    context.calls += 1
    return context.backend.attend_written(call, q)


def _layer_window(module: torch.nn.Module) -> int | None:
    """The window of a layer whose model passes none. A passed None means full attention and is kept:
    some models hold a window attribute on their full-attention layers too."""
    config: Any = module.config
    if getattr(config, "model_type", None) in WINDOW_ON_EVERY_LAYER:
        return config.sliding_window
    layer_types = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if layer_types is None or index is None:
        return None
    return config.sliding_window if layer_types[index] == "sliding_attention" else None


AttentionInterface.register(NAME, paged_attention)

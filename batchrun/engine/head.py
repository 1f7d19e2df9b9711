"""A model's forward in two halves: hidden states of all tokens, then logits where they are asked for.

What comes before the decoder and what stands between it and the logits (the LM head, a scale, a soft cap) differs from
family to family and is left to the model's own forward. It is called once for each half: first with a head that gets
no rows, then with a decoder that stands still.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from batchrun.engine.precision import float32_products
from batchrun_kernels.precision import IEEE


class Head:
    """`hidden` runs the model up to its decoder's output; `logits` the rest on some rows of that. The model itself, if
    called, does both as ever."""

    def __init__(self, module: Any) -> None:
        self.precision = IEEE  # of products of float32
        self._module = module
        self._decoder = _find_decoder(module)
        self._half: Literal["hidden", "logits"] | None = None  # that is being computed
        self._output: Any = None  # what the decoder returned last
        if self._decoder is not None:
            self._compute = self._decoder.forward
            self._decoder.forward = self._decode

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, ...] of the flattened tokens: ids [T], positions [T]."""
        logits = self._forward("hidden", ids, positions)
        if self._decoder is None:
            return logits
        hidden: torch.Tensor = self._output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [K, vocabulary] of hidden states [K, ...]."""
        if self._decoder is None:
            return hidden
        self._output = type(self._output)(last_hidden_state=hidden[None])
        nothing = torch.zeros(1, dtype=torch.long, device=hidden.device)
        return self._forward("logits", nothing, nothing)

    def _forward(self, half: Literal["hidden", "logits"], ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._half = half
        try:
            with float32_products(self.precision, ids.device):
                output = self._module(
                    input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False
                )
        finally:
            self._half = None
        logits: torch.Tensor = output.logits[0]
        return logits

    def _decode(self, *args: Any, **kwargs: Any) -> Any:
        if self._half == "logits":
            return self._output
        output = self._compute(*args, **kwargs)
        if self._half is None:
            return output
        self._output = output
        return type(output)(last_hidden_state=output.last_hidden_state[:, :0])


class _Reached(Exception):
    pass


def _find_decoder(module: Any) -> Any:
    """The part of the model that its forward calls for hidden states. None if that is not one of the usual: all
    logits then stand for them."""
    for part in (module.base_model, module.get_decoder()):
        if part is not module and _is_called(module, part):
            return part
    return None


def _is_called(module: Any, part: Any) -> bool:
    def reached(*_: Any, **__: Any) -> None:
        raise _Reached

    compute, part.forward = part.forward, reached
    try:
        module(input_ids=torch.zeros(1, 1, dtype=torch.long, device=next(module.parameters()).device))
    except _Reached:
        return True
    except Exception:  # whatever runs in its place cannot run here
        return False
    finally:
        part.forward = compute
    return False

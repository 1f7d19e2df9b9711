"""A model's forward in two halves: hidden states of all tokens, then logits where they are asked for.

What stands between the two (the LM head, a scale, a soft cap) differs from family to family, and is left to the
model's own forward: it is called a second time with its decoder standing still.
"""

from __future__ import annotations

from typing import Any

import torch


class Head:
    """`hidden` runs the decoder; `logits` the rest of the model's forward on some of what it gave."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._decoder = _find_decoder(module)
        self._output: type[Any] = object
        self._given: torch.Tensor | None = None
        if self._decoder is not None:
            self._compute = self._decoder.forward
            self._decoder.forward = self._decode

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, ...] of the flattened tokens: ids [T], positions [T]."""
        model = self._decoder or self._module
        output = model(input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False)
        self._output = type(output)
        hidden: torch.Tensor = output.logits[0] if self._decoder is None else output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [K, vocabulary] of hidden states [K, ...]."""
        if self._decoder is None:
            return hidden
        self._given = hidden[None]
        try:
            logits: torch.Tensor = self._module(input_ids=_a_token(hidden.device)).logits[0]
        finally:
            self._given = None
        return logits

    def _decode(self, *args: Any, **kwargs: Any) -> Any:
        if self._given is None:
            return self._compute(*args, **kwargs)
        return self._output(last_hidden_state=self._given)


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
        module(input_ids=_a_token(next(module.parameters()).device))
    except _Reached:
        return True
    except Exception:  # whatever runs in its place cannot run here
        return False
    finally:
        part.forward = compute
    return False


def _a_token(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, 1, dtype=torch.long, device=device)

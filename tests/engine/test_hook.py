"""What a model's call of the attention function becomes: shapes, scale, and the three states of the window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchrun.engine.attention.base import LayerCall
from batchrun.engine.hook import forward_context, paged_attention

Q, K, V = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 6)


def layer(index: int = 0, **config: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**config), layer_idx=index)


def called(module: Any, mask: torch.Tensor | None = None, **passed: Any) -> LayerCall:
    """The call that the backend sees."""
    calls: list[LayerCall] = []

    def attend(call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> torch.Tensor:
        calls.append(call)
        return q.new_zeros(3, 4, 6)

    with forward_context(attend):
        paged_attention(module, Q, K, V, mask, **passed)
    return calls[0]


HYBRID = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("module", "passed", "window"),
    [
        (layer(0, **HYBRID), {"sliding_window": 5}, 5),
        (layer(0, **HYBRID), {"sliding_window": None}, None),  # the layer says full, whatever its config holds
        (layer(0, **HYBRID), {}, 8),
        (layer(1, **HYBRID), {}, None),
        (layer(0, sliding_window=8), {}, None),
        (layer(0), {}, None),
        (SimpleNamespace(config=SimpleNamespace(**HYBRID)), {}, None),
    ],
    ids=["a number", "None", "absent, sliding", "absent, full", "absent, no types", "absent, no window", "no index"],
)
def test_window(module: Any, passed: dict[str, Any], window: int | None) -> None:
    assert called(module, **passed).window == window


def test_scale_softcap_and_sinks() -> None:
    assert called(layer()).scale == pytest.approx(8**-0.5)
    assert called(layer(), scaling=0.0).scale == 0.0
    sinks = torch.randn(4)
    call = called(layer(), scaling=0.3, softcap=50.0, s_aux=sinks, dropout=0.0, position_ids=None)
    assert (call.scale, call.softcap) == (0.3, 50.0)
    assert call.sinks is sinks


def test_the_flattened_batch_reaches_the_backend_token_by_token() -> None:
    def attend(call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, module: Any) -> torch.Tensor:
        assert (q.shape, k.shape, v.shape) == ((3, 4, 8), (3, 2, 8), (3, 2, 6))
        assert torch.equal(q[1, 2], Q[0, 2, 1])
        assert torch.equal(v[2, 1], V[0, 1, 2])
        return torch.arange(3 * 4 * 6, dtype=torch.float32).view(3, 4, 6)

    with forward_context(attend):
        out, weights = paged_attention(layer(), Q, K, V, None)
    assert weights is None
    assert torch.equal(out, torch.arange(3 * 4 * 6, dtype=torch.float32).view(1, 3, 4, 6))


def test_layers_are_numbered_in_the_order_of_their_calls() -> None:
    seen: list[int] = []

    def attend(call: LayerCall, q: torch.Tensor, *_: Any) -> torch.Tensor:
        seen.append(call.layer)
        return q

    with forward_context(attend) as context:
        for index in (5, 6, 7):
            paged_attention(layer(index), Q, K, V, None)
        assert not context.masked
        paged_attention(layer(8), Q, K, V, torch.ones(1, 1, 3, 3))
    assert seen == [0, 1, 2, 3]
    assert context.calls == 4
    assert context.masked


def test_a_call_outside_of_a_forward_pass_is_refused() -> None:
    with forward_context(lambda call, q, k, v, module: q):
        pass
    with pytest.raises(RuntimeError, match="outside of a batchrun forward pass"):
        paged_attention(layer(), Q, K, V, None)

"""TorchAttention against attention written out query by query in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from batchrun.engine.attention.base import LayerCall, LayerGeometry
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.batch import Batch, make_batch
from batchrun.engine.params import Request
from batchrun.engine.sequence import Sequence
from batchrun.engine.slots import Slots

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    block_size: int = 4
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    lengths: tuple[int, ...] = (1, 3, 9, 16, 21, 40)
    chunks: tuple[int, ...] = field(default=(100,))  # most query tokens per row, step after step, then again

    def geometry(self, source: int | None = None) -> LayerGeometry:
        return LayerGeometry(self.kv_heads, self.key_dim, self.value_dim, source)


SHAPES = {
    "plain": Shape(),
    "one head each": Shape(kv_heads=4),
    "one kv head": Shape(heads=6, kv_heads=1),
    "values narrower than keys": Shape(key_dim=12, value_dim=5),
    "values wider than keys": Shape(key_dim=3, value_dim=7, softcap=2.0),
    "window": Shape(window=5),
    "window of one": Shape(window=1),
    "window wider than all": Shape(window=64),
    "softcap": Shape(softcap=1.5),
    "sinks": Shape(sinks=True),
    "everything": Shape(window=6, softcap=3.0, sinks=True, key_dim=6, value_dim=10),
    "blocks of one": Shape(block_size=1, lengths=(1, 2, 5, 8)),
    "blocks longer than rows": Shape(block_size=64),
}


def naive(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: int, call: LayerCall) -> torch.Tensor:
    """One query [Hq, Dk] at position `at` over its row's keys [L, Hkv, Dk] and values [L, Hkv, Dv] -> [Hq, Dv]."""
    first = 0 if call.window is None else max(0, at - call.window + 1)
    out = []
    for head in range(len(q)):
        kv = head // (len(q) // keys.shape[1])
        logits = keys[first : at + 1, kv] @ q[head] * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        weights = logits.exp()
        total = weights.sum() + (0 if call.sinks is None else call.sinks[head].double().exp())
        out.append(weights @ values[first : at + 1, kv] / total)
    return torch.stack(out)


class Rows:
    """Rows with random q, k, v for all their positions, in blocks that lie scattered."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        per_row = [-(-length // shape.block_size) for length in shape.lengths]
        self.num_blocks = sum(per_row) + 3
        scattered = rng.permutation(self.num_blocks)
        self.slots = Slots(len(shape.lengths), shape.block_size)
        self.q, self.k, self.v = {}, {}, {}
        for length, count in zip(shape.lengths, per_row, strict=True):
            ids = np.zeros(length, dtype=np.int32)
            sequence = Sequence(Request(length, ids), 0, ids, length, length + 1, [], 0.0)
            slot = self.slots.put(sequence, list(scattered[:count]), 0)
            scattered = scattered[count:]
            self.q[slot] = torch.randn(length, shape.heads, shape.key_dim)
            self.k[slot] = torch.randn(length, shape.kv_heads, shape.key_dim)
            self.v[slot] = torch.randn(length, shape.kv_heads, shape.value_dim)
        self.call = LayerCall(
            layer=0,
            scale=0.4,
            window=shape.window,
            softcap=shape.softcap,
            sinks=torch.randn(shape.heads) if shape.sinks else None,
        )

    def batches(self, chunks: tuple[int, ...]) -> list[Batch]:
        """Steps of at most `chunks[i]` query tokens for each row, until all rows are through."""
        steps: list[Batch] = []
        while True:
            left = self.slots.num_tokens - self.slots.num_computed
            rows = np.flatnonzero(left > 0)
            if not len(rows):
                return steps
            steps.append(make_batch(self.slots, rows, np.minimum(left[rows], chunks[len(steps) % len(chunks)])))
            self.slots.num_computed[steps[-1].slots] = steps[-1].seq_lens

    def flat(self, batch: Batch, values: dict[int, torch.Tensor]) -> torch.Tensor:
        owner = np.repeat(batch.slots, np.diff(batch.query_starts))
        return torch.stack([values[slot][at] for slot, at in zip(owner.tolist(), batch.positions, strict=True)])

    def expected(self, batch: Batch, call: LayerCall) -> torch.Tensor:
        owner = np.repeat(batch.slots, np.diff(batch.query_starts))
        return torch.stack([
            naive(self.q[slot][at].double(), self.k[slot].double(), self.v[slot].double(), int(at), call)
            for slot, at in zip(owner.tolist(), batch.positions, strict=True)
        ])  # fmt: skip


@pytest.mark.parametrize("chunks", [(100,), (1,), (7,), (3, 1, 8)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_equals_naive_attention(name: str, chunks: tuple[int, ...]) -> None:
    shape = SHAPES[name]
    rows = Rows(shape, seed=len(name))
    backend = TorchAttention([shape.geometry()], rows.num_blocks, shape.block_size, torch.float32, CPU)
    steps = rows.batches(chunks)
    if len(chunks) > 1:
        assert any(0 < batch.num_decodes < len(batch.slots) for batch in steps), "no step mixes decodes and prompts"
    for batch in steps:
        backend.begin(batch)
        out = backend.attend(rows.call, *(rows.flat(batch, x) for x in (rows.q, rows.k, rows.v)))
        torch.testing.assert_close(out.double(), rows.expected(batch, rows.call), rtol=1e-4, atol=1e-5)


def test_layers_keep_their_own_pages_and_windows() -> None:
    shape = Shape()
    rows, other = Rows(shape, seed=1), Rows(replace(shape, window=4), seed=2)
    backend = TorchAttention([shape.geometry()] * 2, rows.num_blocks, shape.block_size, torch.float32, CPU)
    calls = (rows.call, replace(other.call, layer=1))
    for batch in rows.batches((7,)):
        backend.begin(batch)
        for layer, call in zip((rows, other), calls, strict=True):
            out = backend.attend(call, *(layer.flat(batch, x) for x in (layer.q, layer.k, layer.v)))
            torch.testing.assert_close(out.double(), layer.expected(batch, call), rtol=1e-4, atol=1e-5)


def test_a_sharing_layer_reads_the_pages_of_its_source_and_writes_none() -> None:
    shape = Shape()
    rows = Rows(shape, seed=3)
    layers = [shape.geometry(), shape.geometry(source=0)]
    backend = TorchAttention(layers, rows.num_blocks, shape.block_size, torch.float32, CPU)
    sharing = replace(rows.call, layer=1, window=5)
    for batch in rows.batches((7,)):
        backend.begin(batch)
        q, k, v = (rows.flat(batch, x) for x in (rows.q, rows.k, rows.v))
        backend.attend(rows.call, q, k, v)
        out = backend.attend(sharing, q, torch.full_like(k, 99.0), torch.full_like(v, 99.0))
        torch.testing.assert_close(out.double(), rows.expected(batch, sharing), rtol=1e-4, atol=1e-5)
    assert layers[1].bytes_per_token(torch.float32) == 0
    assert layers[0].bytes_per_token(torch.float32) == 2 * (8 + 8) * 4


def test_half_precision_stays_near_the_exact_result() -> None:
    shape = Shape(softcap=4.0, sinks=True)
    rows = Rows(shape, seed=4)
    backend = TorchAttention([shape.geometry()], rows.num_blocks, shape.block_size, torch.bfloat16, CPU)
    for batch in rows.batches((7,)):
        backend.begin(batch)
        out = backend.attend(rows.call, *(rows.flat(batch, x).bfloat16() for x in (rows.q, rows.k, rows.v)))
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), rows.expected(batch, rows.call), rtol=0.1, atol=0.05)

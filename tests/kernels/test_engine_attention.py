"""`engine.attention=triton`, in Triton's interpreter: each layer's attention, and the tokens of whole models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from batchrun.config import EngineConfig
from batchrun.engine.attention import registry
from batchrun.engine.attention import triton as backend_module
from batchrun.engine.attention.base import LayerGeometry
from batchrun.engine.attention.cpu import CpuAttention
from batchrun.engine.attention.registry import attention_backend, page_size
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.attention.triton import TritonAttention
from batchrun.engine.kv_layout import KvLayout
from batchrun.errors import ConfigError
from tests.engine.test_attention import CPU, SHAPES, Rows, Shape


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Groups of two rows that save one page; the rows of the groups that were made."""
    monkeypatch.setattr(backend_module, "MIN_GROUP_ROWS", 2)
    monkeypatch.setattr(backend_module, "MIN_SAVED_BLOCKS", 1)
    made: list[int] = []
    find = backend_module.shared_prefixes

    def found(*args: Any) -> Any:
        groups = find(*args)
        made.extend(len(group.rows) for group in groups)
        return groups

    monkeypatch.setattr(backend_module, "shared_prefixes", found)
    return made


@pytest.mark.parametrize("name", SHAPES)
def test_equals_naive_attention(name: str, small_groups: list[int]) -> None:
    """Prompts, pieces of them, single tokens and several together, with prefix groups where rows are short."""
    shape = replace(SHAPES[name], lengths=(24, 3, 18))
    shape = replace(shape, block_size=min(shape.block_size, 8))
    rows = Rows(shape, seed=5, shared=2)
    backend = TritonAttention([shape.geometry()], rows.num_blocks, shape.block_size, torch.float32, CPU)
    for batch in rows.batches((10, 1, 4)):
        backend.begin(batch)
        out = backend.attend(rows.call, *(rows.flat(batch, x) for x in (rows.q, rows.k, rows.v)))
        torch.testing.assert_close(out.double(), rows.expected(batch, rows.call), rtol=1e-4, atol=1e-5)
    assert bool(small_groups) == (shape.window is None)


def test_layers_keep_their_own_pages_and_windows_and_give_pages_back() -> None:
    shapes = (Shape(), Shape(window=4))
    layers = [Rows(replace(shape, lengths=(21, 40)), seed) for seed, shape in enumerate(shapes)]
    geometry = [shape.geometry() for shape in shapes]
    rows = Rows(layers[0].shape, seed=0, groups=KvLayout.of(geometry).groups)
    backend = TritonAttention(geometry, rows.num_blocks, shapes[0].block_size, torch.float32, CPU)
    for batch in rows.batches((11, 5), give_back=True):
        backend.begin(batch)
        for index, layer in enumerate(layers):
            call = replace(layer.call, layer=index)
            out = backend.attend(call, *(layer.flat(batch, x) for x in (layer.q, layer.k, layer.v)))
            torch.testing.assert_close(out.double(), layer.expected(batch, call), rtol=1e-4, atol=1e-5)
    assert (batch.block_tables[1] == -1).any()


def test_half_precision_stays_near_the_exact_result() -> None:
    shape = Shape(softcap=4.0, sinks=True, lengths=(3, 30))
    rows = Rows(shape, seed=4)
    backend = TritonAttention([shape.geometry()], rows.num_blocks, shape.block_size, torch.bfloat16, CPU)
    for batch in rows.batches((9,)):
        backend.begin(batch)
        out = backend.attend(rows.call, *(rows.flat(batch, x).bfloat16() for x in (rows.q, rows.k, rows.v)))
        torch.testing.assert_close(out.double(), rows.expected(batch, rows.call), rtol=0.1, atol=0.05)


def test_auto_is_triton_on_a_gpu_and_torch_where_its_heads_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    small, large = LayerGeometry(2, 256, 128), LayerGeometry(2, 64, 512)
    assert attention_backend("auto", cuda) is TritonAttention
    assert attention_backend("auto", cuda, [small]) is TritonAttention
    assert attention_backend("auto", cuda, [small, large]) is TorchAttention
    monkeypatch.setattr(registry, "runs_triton", lambda device: False)
    assert attention_backend("auto", cuda) is TorchAttention
    with pytest.raises(ConfigError, match=r"not installed: pip install 'batchrun\[gpu\]'"):
        attention_backend("triton", cuda)


def test_pages_hold_what_suits_the_backend_unless_a_size_is_given() -> None:
    assert [page_size(EngineConfig(), each) for each in (TorchAttention, CpuAttention, TritonAttention)] == [32, 32, 64]
    assert page_size(EngineConfig(batch_invariant=True), CpuAttention) == 128
    assert page_size(EngineConfig(block_size=48), TritonAttention) == 48


def test_refuses_a_device_and_heads_that_it_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"at most 256 dimensions, and this model has 512: set engine\.attention=torch"
    ):
        TritonAttention([LayerGeometry(1, 64, 512)], 2, 16, torch.float32, CPU)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match=r"needs a GPU, and model\.device is cpu: set engine\.attention=auto"):
        attention_backend("triton", CPU)

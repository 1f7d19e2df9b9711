from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchrun.bench import limits
from batchrun.bench.limits import Floor, Limits, ModelShape, Work, count_work, floor
from batchrun.bench.workloads import Row
from batchrun.config import ModelConfig
from batchrun.engine.checkpoint import open_checkpoint
from tests.engine.families import make_model

SHAPE = ModelShape(layers=1000, head=500, attention=32, element_bytes=2, hidden=8, feed_forward=16, vocabulary=64)
ROWS = st.lists(st.builds(Row, st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 5)), max_size=8)


@given(ROWS)
def test_work_counts_each_distinct_prefix_once(rows: list[Row]):
    prefixes = {tuple(row.prompt_ids[: n + 1]) for row in rows for n in range(len(row.prompt_ids))}
    generated = [
        len(row.prompt_ids) + place for row in rows for place in range(1, row.max_tokens)
    ]  # each sees itself and all before
    work = count_work(rows)
    assert work.tokens == len(prefixes) + len(generated)
    assert work.pairs == sum(map(len, prefixes)) + sum(generated)
    assert work.heads == sum(row.max_tokens for row in rows)
    assert work.steps == max((row.max_tokens for row in rows), default=0)


def test_floor_by_hand():
    work = Work(tokens=10, heads=4, pairs=30, steps=3)
    operations = 2 * (1000 * 10 + 500 * 4) + 4 * 32 * 30
    assert floor(work, SHAPE, Limits(flops=100.0, read=10.0)) == Floor(operations / 100, 3 * 1500 * 2 / 10)
    assert Floor(compute=2.0, weights=3.0).seconds == 3.0


def shape_of(folder: Path) -> ModelShape:
    return ModelShape.of(open_checkpoint(ModelConfig(path=str(folder)), offline=True), torch.float32)


def test_the_shape_of_a_model_is_counted_from_its_config(tiny: Path):
    hidden, inner, layers, heads, kv_heads, size, vocabulary = 32, 64, 2, 2, 1, 16, 256
    attention = 2 * hidden * heads * size + 2 * hidden * kv_heads * size
    norms = (2 * layers + 1) * hidden
    assert shape_of(tiny) == ModelShape(
        layers=layers * (attention + 3 * hidden * inner) + norms,
        head=hidden * vocabulary,
        attention=layers * heads * size,
        element_bytes=4,
        hidden=hidden,
        feed_forward=inner,
        vocabulary=vocabulary,
    )


def test_sliding_layers_do_not_count_as_full_attention(tmp_path: Path):
    assert shape_of(make_model("gemma3_text", tmp_path)).attention == 4 * 8  # one full layer of three


def test_a_tied_head_is_counted_as_the_head_alone(smollm2: Path):
    shape = shape_of(smollm2)
    assert (shape.head, shape.vocabulary) == (576 * 49152, 49152)
    assert round(shape.layers / 1e6, 1) == 106.2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rates_are_measured(dtype: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "SECONDS", 0.0)
    monkeypatch.setattr(limits, "READ_SECONDS", 0.0)
    monkeypatch.setattr(limits, "READ_BYTES", (2**16, 2**16))
    monkeypatch.setattr(limits, "SQUARE", 64)
    measured = limits._measure(SHAPE, dtype, "cpu", 1)
    assert measured.flops > 0
    assert measured.read > 0

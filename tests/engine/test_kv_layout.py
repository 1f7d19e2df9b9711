"""Which layers share a block table and which share memory, and what that saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchrun.config import EngineConfig
from batchrun.engine.attention.base import LayerGeometry
from batchrun.engine.kv_cache import KvGroup, blocks_for
from batchrun.engine.kv_layout import KvLayout
from batchrun.engine.memory import GIB, KvShape, kv_budget, make_pool
from batchrun.errors import ConfigError

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def layers(*windows: int | None, shape: tuple[int, int, int] = (2, 8, 8)) -> list[LayerGeometry]:
    return [LayerGeometry(*shape, window=window) for window in windows]


def pattern(full: int, windowed: int, window: int = 512) -> list[LayerGeometry]:
    """Layers with a window, then as many without as `full` says."""
    return layers(*[window] * windowed, *[None] * full)


def gemma_3_27b() -> Any:
    """What the config of Gemma 3 27B says of its layers: five with a window, then one without, and so on."""
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(62)]
    return SimpleNamespace(
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        hidden_size=5376,
        sliding_window=1024,
        layer_types=kinds,
    )


def test_layers_that_all_see_everything_have_one_table_and_their_own_pages() -> None:
    layout = KvLayout.of([*layers(None, None), LayerGeometry(4, 16, 6)])
    assert layout.groups == (KvGroup(None, 1),)
    assert layout.tables == (0, 0, 0)
    assert layout.places == (0, 1, 2)
    assert layout.block_bytes(4, torch.float32) == 4 * 4 * (2 * 2 * 16 + 4 * 22)


@pytest.mark.parametrize(
    ("full", "windowed", "pages", "tables"),
    [(13, 13, 13, (1, 1)), (3, 15, 3, (1, 5)), (4, 22, 4, (1, 6)), (5, 29, 5, (1, 6)), (10, 52, 5, (2, 11))],
    ids=["Gemma 2 2B", "Gemma 3 270M", "Gemma 3 1B", "Gemma 3 4B", "Gemma 3 27B"],
)
def test_a_larger_group_has_several_tables(full: int, windowed: int, pages: int, tables: tuple[int, int]) -> None:
    given = pattern(full, windowed)
    layout = KvLayout.of(given)
    assert len(layout.pages) == pages
    assert layout.groups == (KvGroup(None, tables[0]), KvGroup(512, tables[1]))
    assert layout.num_tables * pages <= 1.1 * len(given)
    used = list(zip(layout.tables, layout.places, strict=True))
    assert len(set(used)) == len(given), "two layers write to one place"
    assert all(table >= tables[0] for table in layout.tables[:windowed])
    assert all(table < tables[0] for table in layout.tables[windowed:])


def test_each_window_is_a_group() -> None:
    layout = KvLayout.of(layers(16, None, 8, 16))
    assert layout.groups == (KvGroup(None, 1), KvGroup(8, 1), KvGroup(16, 2))
    assert layout.tables == (2, 0, 1, 3)


def test_a_layer_that_reads_another_ones_pages_has_its_table_and_place() -> None:
    given = [*layers(8, None), LayerGeometry(2, 8, 8, source=0, window=8), LayerGeometry(2, 8, 8, source=1)]
    layout = KvLayout.of(given)
    assert layout.groups == (KvGroup(None, 1), KvGroup(8, 1))
    assert layout.tables == (1, 0, 1, 0)
    assert layout.places == (0, 0, 0, 0)


def test_pages_are_kept_as_long_as_the_layer_that_looks_back_farthest_needs_them() -> None:
    given = [*layers(8), LayerGeometry(2, 8, 8, source=0, window=20)]
    assert KvLayout.of(given).groups == (KvGroup(20, 1),)
    assert KvLayout.of([*layers(8), LayerGeometry(2, 8, 8, source=0)]).groups == (KvGroup(None, 1),)


def test_pages_of_different_sizes_keep_to_one_table() -> None:
    layout = KvLayout.of([*layers(8, None), *layers(8, shape=(2, 16, 16))])
    assert layout.groups == (KvGroup(None, 1),)
    assert KvLayout.of([*layers(8, 16), *layers(4, shape=(2, 16, 16))]).groups == (KvGroup(16, 1),)


def test_what_windows_save_at_32k_tokens() -> None:
    shape = KvShape.of(gemma_3_27b(), BF16)
    layout = KvLayout.of(shape.layers)
    row = blocks_for(layout.groups, 32, 32_768) * layout.block_bytes(32, BF16)
    assert 32_768 * shape.bytes_per_token / GIB == 15.5
    assert row / GIB == pytest.approx(2.94, abs=0.01)
    # Rows that no window can cut take no more than the padding.
    short = blocks_for(layout.groups, 32, 1024) * layout.block_bytes(32, BF16)
    assert short / (1024 * shape.bytes_per_token) == pytest.approx(65 / 62)


def test_the_cache_is_no_larger_than_its_rows_can_use() -> None:
    layout = KvLayout.of(pattern(4, 22))
    config = EngineConfig(kv_cache_gib=1e6, max_num_seqs=10, block_size=32, max_batched_tokens=256)
    pool = make_pool(config, layout, BF16, 4096, CPU)
    assert pool.num_blocks == 10 * (128 + 6 * 17) + 6 * 8  # a prompt's chunk is written before it is left behind
    assert pool.longest_row(4096, 256) == 4096
    assert pool.blocks_for(4096) == 128 + 6 * 17
    by_number = EngineConfig(num_blocks=50, block_size=32)
    assert kv_budget(by_number, layout, BF16, 4096, CPU) == 50 * 7 * layout.block_bytes(32, BF16)


def test_a_cache_without_room_for_two_blocks_in_each_table_is_refused() -> None:
    layout = KvLayout.of(pattern(4, 22))
    least = 14 * layout.block_bytes(32, BF16) / GIB
    make_pool(EngineConfig(kv_cache_gib=1.01 * least, block_size=32), layout, BF16, 4096, CPU)
    with pytest.raises(ConfigError, match=r"fewer than 14 blocks.*raise engine\.kv_cache_gib"):
        make_pool(EngineConfig(kv_cache_gib=0.99 * least, block_size=32), layout, BF16, 4096, CPU)

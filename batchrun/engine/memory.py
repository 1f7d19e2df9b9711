"""What the KV cache of a model costs, and how many blocks a job gets."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

import psutil
import torch

from batchrun.config import EngineConfig
from batchrun.engine.attention.base import SCALE, LayerGeometry
from batchrun.engine.kv_cache import BlockPool, blocks_for
from batchrun.engine.kv_layout import KvLayout
from batchrun.errors import ConfigError

log = logging.getLogger(__name__)

CPU_SHARE = 0.25  # of the free memory: the rest is for activations, input rows and the page cache
GIB = 2**30


@dataclass(frozen=True, slots=True)
class KvShape:
    """KV of one token as a model's config tells it. The engine itself counts what its layers really store."""

    layers: tuple[LayerGeometry, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, text_config: Any, dtype: torch.dtype) -> Self:
        each = zip(_layer_configs(text_config), _windows(text_config), strict=True)
        return cls(tuple(_geometry(config, window) for config, window in each), dtype)

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token(self.dtype) for layer in self.layers)

    def formula(self) -> str:
        shapes = Counter((layer.num_kv_heads, layer.key_dim) for layer in self.layers)
        terms = [f"{count} layers x {heads} KV heads x {dim} dimensions" for (heads, dim), count in shapes.items()]
        total = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
        if self.dtype == torch.int8:
            heads = sum(layer.num_kv_heads for layer in self.layers)
            return f"2 (K and V) x ({total} x 1 byte + {heads} scales x {SCALE.itemsize} bytes)"
        return f"2 (K and V) x {total} x {self.dtype.itemsize} byte{'s' if self.dtype.itemsize > 1 else ''}"


def _layer_configs(text_config: Any) -> list[Any]:
    """Each layer's own config; where all are alike transformers has only one."""
    if getattr(text_config, "is_heterogeneous", False):
        return list(text_config.per_layer_config)
    return [text_config] * text_config.num_hidden_layers


def _geometry(layer_config: Any, window: int | None) -> LayerGeometry:
    heads = layer_config.num_attention_heads
    dim = getattr(layer_config, "head_dim", None) or layer_config.hidden_size // heads
    return LayerGeometry(getattr(layer_config, "num_key_value_heads", None) or heads, dim, dim, window=window)


def _windows(text_config: Any) -> list[int | None]:
    window = getattr(text_config, "sliding_window", None)
    if getattr(text_config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(text_config, "layer_types", None) or ["sliding_attention"] * text_config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def kv_budget(
    config: EngineConfig,
    layout: KvLayout,
    dtype: torch.dtype,
    max_model_len: int,
    device: torch.device,
    sharers: int = 1,
    left: float | None = None,
) -> float:
    """Bytes for the KV cache: as configured, else this process's share of what the free memory allows and the job
    can use. `left` is what the memory of a device was found to allow."""
    size = _block_size(config)
    block_bytes = layout.block_bytes(size, dtype)
    if config.num_blocks is not None:
        return config.num_blocks * layout.num_tables * block_bytes
    if config.kv_cache_gib is not None:
        allowed = config.kv_cache_gib * GIB
    elif left is not None:
        allowed = left
    elif device.type == "cuda":
        allowed = config.gpu_memory_utilization * torch.cuda.mem_get_info(device)[0]
    else:
        allowed = CPU_SHARE / sharers * psutil.virtual_memory().available
    each, prefilling = (blocks_for(layout.groups, size, max_model_len, step) for step in (1, config.max_batched_tokens))
    return min(allowed, (config.max_num_seqs * each + prefilling - each) * block_bytes)


def make_pool(
    config: EngineConfig,
    layout: KvLayout,
    dtype: torch.dtype,
    max_model_len: int,
    device: torch.device,
    sharers: int = 1,
    left: float | None = None,
) -> BlockPool:
    """The blocks of the KV cache, with the arguments of `kv_budget`.

    Raises ConfigError if there is no room for two in each table.
    """
    budget = kv_budget(config, layout, dtype, max_model_len, device, sharers, left)
    size = _block_size(config)
    block_bytes = layout.block_bytes(size, dtype)
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total
    if budget > memory:
        asked = _size_setting(config)
        raise ConfigError(
            f"engine.{asked}={getattr(config, asked)} asks for {budget / GIB:.1f} GiB of KV cache, and {device} has "
            f"{memory / GIB:.1f} GiB of memory: lower it"
        )
    blocks = int(budget // block_bytes)
    if blocks < 2 * layout.num_tables:
        raise ConfigError(
            f"{budget / GIB:.3f} GiB for the KV cache hold fewer than {2 * layout.num_tables} blocks of "
            f"{block_bytes / GIB:.3f} GiB: raise engine.{_size_setting(config)} or lower engine.block_size"
        )
    log.info("KV cache: %d blocks of %d tokens, %.2f GiB", blocks, size, blocks * block_bytes / GIB)
    pool = BlockPool(blocks, size, config.prefix_caching, layout.groups)
    if (longest := pool.longest_row(max_model_len, config.max_batched_tokens)) < max_model_len:
        log.warning(
            "the KV cache holds rows of %d tokens, fewer than the model's %d: longer rows are cut or refused; "
            "raise engine.%s", longest, max_model_len, _size_setting(config),
        )  # fmt: skip
    return pool


def _size_setting(config: EngineConfig) -> str:
    """Which setting the size of the cache follows."""
    return "kv_cache_gib" if config.num_blocks is None else "num_blocks"


def _block_size(config: EngineConfig) -> int:
    assert config.block_size is not None  # attention/registry.py has put in what suits the backend
    return config.block_size

"""What the KV cache of a model costs, and how many blocks a job gets."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Self

import psutil
import torch

from batchrun.config import EngineConfig
from batchrun.errors import ConfigError

log = logging.getLogger(__name__)

CPU_SHARE = 0.25  # of the free memory: the rest is for activations, input rows and the page cache
GPU_SHARE = 0.8  # of the free device memory, once the weights are loaded
GIB = 2**30


@dataclass(frozen=True, slots=True)
class KvShape:
    """KV of one token as a model's config tells it. The engine itself counts what its layers really store."""

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    @classmethod
    def of(cls, text_config: Any, dtype: torch.dtype) -> Self:
        heads = text_config.num_attention_heads
        return cls(
            layers=text_config.num_hidden_layers,
            kv_heads=getattr(text_config, "num_key_value_heads", None) or heads,
            head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
            element_bytes=dtype.itemsize,
        )

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes

    def formula(self) -> str:
        return (
            f"2 (K and V) x {self.layers} layers x {self.kv_heads} KV heads x {self.head_dim} dimensions "
            f"x {self.element_bytes} bytes"
        )


def kv_budget(
    config: EngineConfig, bytes_per_token: int, max_model_len: int, device: torch.device, sharers: int = 1
) -> float:
    """Bytes for the KV cache: as configured, else this process's share of what the free memory allows and the job
    can use."""
    if config.num_blocks is not None:
        return config.num_blocks * config.block_size * bytes_per_token
    if config.kv_cache_gib is not None:
        allowed = config.kv_cache_gib * GIB
    elif device.type == "cuda":
        allowed = GPU_SHARE * torch.cuda.mem_get_info(device)[0]
    else:
        allowed = CPU_SHARE / sharers * psutil.virtual_memory().available
    per_sequence = -(-max_model_len // config.block_size) * config.block_size
    return min(allowed, config.max_num_seqs * per_sequence * bytes_per_token)


def num_kv_blocks(
    config: EngineConfig, bytes_per_token: int, max_model_len: int, device: torch.device, sharers: int = 1
) -> int:
    """Blocks in the KV cache. Raises ConfigError if there is no room for two."""
    budget = kv_budget(config, bytes_per_token, max_model_len, device, sharers)
    block_bytes = bytes_per_token * config.block_size
    blocks = int(budget // block_bytes)
    if blocks < 2:
        raise ConfigError(
            f"{budget / GIB:.3f} GiB for the KV cache hold fewer than two blocks of {block_bytes / GIB:.3f} GiB: "
            "raise engine.kv_cache_gib or lower engine.block_size"
        )
    log.info("KV cache: %d blocks of %d tokens, %.2f GiB", blocks, config.block_size, blocks * block_bytes / GIB)
    if blocks * config.block_size < max_model_len:
        log.warning(
            "the KV cache holds %d tokens, fewer than the model's %d: longer rows are cut or refused; "
            "raise engine.kv_cache_gib", blocks * config.block_size, max_model_len,
        )  # fmt: skip
    return blocks

"""How many KV blocks a job gets."""

from __future__ import annotations

import logging

import psutil
import torch

from batchrun.config import EngineConfig
from batchrun.errors import ConfigError

log = logging.getLogger(__name__)

CPU_SHARE = 0.25  # of the free memory: the rest is for activations, input rows and the page cache
GPU_SHARE = 0.8  # of the free device memory, once the weights are loaded
GIB = 2**30


def num_kv_blocks(config: EngineConfig, bytes_per_token: int, max_model_len: int, device: torch.device) -> int:
    """Blocks in the KV cache: as configured, else what the free memory allows and the job can use.

    Raises ConfigError if there is no room for two blocks.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = bytes_per_token * config.block_size
    budget = config.kv_cache_gib * GIB if config.kv_cache_gib is not None else _free_share(device)
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    blocks = min(int(budget // block_bytes), useful)
    if blocks < 2:
        raise ConfigError(
            f"{budget / GIB:.2f} GiB for the KV cache hold fewer than two blocks of {block_bytes / GIB:.3f} GiB: "
            "raise engine.kv_cache_gib or lower engine.block_size"
        )
    log.info(
        "KV cache: %d blocks of %d tokens x %d bytes = %.2f GiB",
        blocks, config.block_size, bytes_per_token, blocks * block_bytes / GIB,
    )  # fmt: skip
    return blocks


def _free_share(device: torch.device) -> float:
    if device.type == "cuda":
        return GPU_SHARE * torch.cuda.mem_get_info(device)[0]
    return CPU_SHARE * psutil.virtual_memory().available

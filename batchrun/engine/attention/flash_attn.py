"""`engine.attention=flash_attn`: FlashAttention over our pages (Dao, 2023; Shah et al., 2024).

Signatures are those of flash-attn 2.8 (`flash_attn.flash_attn_varlen_func`, whose pages are of a multiple of 256
tokens) and of FlashAttention-3 for Hopper (`flash_attn_interface.flash_attn_with_kvcache`, pages of any size). Neither
knows prefix groups: pages that rows share are read once for each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from batchrun.engine.attention.base import LayerCall
from batchrun.engine.attention.library import LibraryAttention, Part
from batchrun.engine.staging import Put


class _Rows(NamedTuple):
    """Arrays int32, on the device."""

    block_table: torch.Tensor  # [R, B]
    seq_lens: torch.Tensor  # [R]
    query_starts: torch.Tensor  # [R + 1]
    key_starts: torch.Tensor  # [R + 1]
    longest_query: int
    longest: int


class FlashAttention2(LibraryAttention):
    """For NVIDIA GPUs from Ampere on."""

    name = "flash_attn"
    page_size = 256
    page_multiple = 256
    head_dims = range(8, 257, 8)

    def prepare(self, part: Part, put: Put) -> _Rows:
        return _Rows(
            put(part.blocks, np.int32),
            put(part.seq_lens, np.int32),
            put(part.query_starts, np.int32),
            put(np.concatenate([[0], np.cumsum(part.seq_lens)]), np.int32),
            int(np.diff(part.query_starts).max()),
            int(part.seq_lens.max()),
        )

    def compute(
        self, call: LayerCall, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prepared: _Rows
    ) -> Any:
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=prepared.query_starts,
            cu_seqlens_k=prepared.key_starts,
            max_seqlen_q=prepared.longest_query,
            max_seqlen_k=prepared.longest,
            softmax_scale=call.scale,
            causal=True,
            window_size=_window(call),
            softcap=call.softcap or 0.0,
            block_table=prepared.block_table,
        )


class FlashAttention3(FlashAttention2):
    """For Hopper."""

    page_multiple = 1

    def compute(
        self, call: LayerCall, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prepared: _Rows
    ) -> Any:
        from flash_attn_interface import flash_attn_with_kvcache

        return flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=prepared.seq_lens,
            page_table=prepared.block_table,
            cu_seqlens_q=prepared.query_starts,
            max_seqlen_q=prepared.longest_query,
            softmax_scale=call.scale,
            causal=True,
            window_size=_window(call),
            softcap=call.softcap or 0.0,
        )


def _window(call: LayerCall) -> tuple[int, int]:
    """How far a query sees to the left and to the right of itself; -1: without end."""
    return (-1, -1) if call.window is None else (call.window - 1, 0)

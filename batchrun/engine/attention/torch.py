"""Attention in plain torch operations, on any device: the oracle for the other backends.

Rows that decode are gathered together, padded to a common length; a prompt chunk is attended row by
row, so that no dense mask over the whole batch is ever made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from batchrun.engine.attention.base import AttentionBackend, LayerCall, LayerGeometry, zero_pages
from batchrun.engine.batch import Batch

PADDING_WASTE = 2.0  # a padded group of decode rows may gather this many times the positions it needs


@dataclass(slots=True)
class _Group:
    """Query tokens that are attended in one call: R rows of Q queries over L gathered positions."""

    start: int  # first query token in the batch
    num_rows: int
    query_len: int
    blocks: torch.Tensor  # int64 [R, B]
    query_positions: torch.Tensor  # int64 [R, Q]
    key_positions: torch.Tensor  # int64 [L], L = B * block size
    whole: bool  # one row from position 0: its keys are the batch's own, causal


class TorchAttention(AttentionBackend):
    """Pages are [blocks, block size, kv heads, dim] per layer."""

    def __init__(
        self, layers: list[LayerGeometry], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        self.block_size = block_size
        self.device = device
        self.pages: list[tuple[torch.Tensor, torch.Tensor] | None] = [
            None
            if layer.source is not None
            else (
                zero_pages((num_blocks, block_size, layer.num_kv_heads, layer.key_dim), dtype, device),
                zero_pages((num_blocks, block_size, layer.num_kv_heads, layer.value_dim), dtype, device),
            )
            for layer in layers
        ]
        self._groups: list[_Group] = []
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._slot_mapping = torch.empty(0, dtype=torch.int64)

    def begin(self, batch: Batch) -> None:
        self._slot_mapping = torch.from_numpy(batch.slot_mapping).to(self.device)
        self._masks.clear()
        self._groups = [self._decode_group(batch, a, b) for a, b in _length_runs(batch)]
        self._groups += [self._prompt_group(batch, row) for row in range(batch.num_decodes, len(batch.slots))]

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        source = self.layers[call.layer].source
        pages = self.pages[call.layer if source is None else source]
        assert pages is not None
        if source is None:
            for page, new in zip(pages, (k, v), strict=True):
                page.flatten(0, 1).index_copy_(0, self._slot_mapping, new.to(page.dtype))
        out = q.new_empty(q.shape[0], q.shape[1], pages[1].shape[-1])
        for index, group in enumerate(self._groups):
            stop = group.start + group.num_rows * group.query_len
            out[group.start : stop] = self._attend_group(call, index, q[group.start : stop], pages)
        return out

    def _attend_group(
        self, call: LayerCall, index: int, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        group = self._groups[index]
        rows, count = group.num_rows, group.query_len
        keys, values = (page[group.blocks].flatten(1, 2).transpose(1, 2).to(q.dtype) for page in pages)
        queries = q.view(rows, count, *q.shape[1:]).transpose(1, 2)  # [R, Hq, Q, D]
        if group.whole and call.softcap is None and call.sinks is None and _sees_all(call.window, count):
            keys, values = keys[:, :, :count], values[:, :, :count]
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=call.scale, enable_gqa=keys.shape[1] != queries.shape[1]
            )
        else:
            out = masked_attention(queries, keys, values, self._mask(index, call.window), call)
        return out.transpose(1, 2).reshape(rows * count, *out.shape[1:2], out.shape[-1])

    def _mask(self, index: int, window: int | None) -> torch.Tensor:
        """bool [R, 1, Q, L]: which gathered positions each query sees. Made once per step and window."""
        if (index, window) not in self._masks:
            group = self._groups[index]
            distance = group.query_positions[:, None, :, None] - group.key_positions
            self._masks[index, window] = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return self._masks[index, window]

    def _decode_group(self, batch: Batch, start: int, stop: int) -> _Group:
        width = -(-int(batch.seq_lens[start:stop].max()) // self.block_size)
        return self._group(batch, start, stop, start, 1, width, whole=False)

    def _prompt_group(self, batch: Batch, row: int) -> _Group:
        first, last = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
        width = -(-int(batch.seq_lens[row]) // self.block_size)
        whole = int(batch.seq_lens[row]) == last - first
        return self._group(batch, row, row + 1, first, last - first, width, whole)

    def _group(self, batch: Batch, row: int, stop: int, start: int, count: int, width: int, whole: bool) -> _Group:
        positions = batch.positions[start : start + (stop - row) * count].reshape(stop - row, count)
        return _Group(
            start=start,
            num_rows=stop - row,
            query_len=count,
            blocks=torch.from_numpy(batch.block_tables[row:stop, :width].astype(np.int64)).to(self.device),
            query_positions=torch.from_numpy(positions).to(self.device),
            key_positions=torch.arange(width * self.block_size, device=self.device),
            whole=whole,
        )


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, call: LayerCall
) -> torch.Tensor:
    """q [R, Hq, Q, Dk], k [R, Hkv, L, Dk], v [R, Hkv, L, Dv], mask bool [R, 1, Q, L] -> [R, Hq, Q, Dv].

    The query heads of a kv head are folded into the query axis, so keys are never repeated.
    """
    rows, heads, count, _ = q.shape
    group = heads // k.shape[1]
    folded = q.reshape(rows, k.shape[1], group * count, q.shape[-1])
    mask = mask.expand(rows, 1, count, mask.shape[-1]).repeat(1, 1, group, 1)
    if call.softcap is None and call.sinks is None:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=call.scale)
    else:
        logits = (folded @ k.transpose(-1, -2)).float() * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        logits = logits.masked_fill(~mask, float("-inf"))
        if call.sinks is not None:
            sinks = call.sinks.float().view(1, k.shape[1], group, 1, 1).expand(rows, -1, -1, count, 1)
            logits = torch.cat([logits, sinks.reshape(rows, k.shape[1], group * count, 1)], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : k.shape[2]]
        out = weights.to(v.dtype) @ v
    return out.reshape(rows, heads, count, v.shape[-1])


def _sees_all(window: int | None, length: int) -> bool:
    return window is None or window >= length


def _length_runs(batch: Batch) -> list[tuple[int, int]]:
    """Cut the decode rows into runs whose padding stays below PADDING_WASTE, in the order they lie."""
    runs: list[tuple[int, int]] = []
    lengths = batch.seq_lens[: batch.num_decodes]
    start, total, longest = 0, 0, 0
    for row, length in enumerate(lengths.tolist()):
        wide = max(longest, length)
        if row > start and wide * (row - start + 1) > PADDING_WASTE * (total + length):
            runs.append((start, row))
            start, total, wide = row, 0, length
        total, longest = total + length, wide
    if len(lengths):
        runs.append((start, len(lengths)))
    return runs

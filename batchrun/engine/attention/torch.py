"""Attention in plain torch operations, on any device: the oracle for the other backends.

Rows that decode are gathered together, padded to a common length; a prompt chunk is attended row by
row, so that no dense mask over the whole batch is ever made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from batchrun.engine.attention.base import AttentionBackend, LayerCall, LayerGeometry, distinct_tensors, pages_of_heads
from batchrun.engine.batch import Batch
from batchrun.engine.kv_cache import HOLE, KvGroup
from batchrun.engine.kv_layout import KvLayout
from batchrun.engine.staging import Staging

PADDING_WASTE = 2.0  # a padded group of decode rows may gather this many times the positions it needs


@dataclass(slots=True)
class _Group:
    """Query tokens that are attended in one call: R rows of Q queries over L gathered positions."""

    start: int  # first query token in the batch
    num_rows: int
    query_len: int
    blocks: torch.Tensor  # int64 [R, B], in order of position from the first that any query sees
    query_positions: torch.Tensor  # int64 [R, Q]
    key_positions: torch.Tensor  # int64 [L], L = B * block size
    whole: bool  # one row from position 0: its keys are the batch's own, causal
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # by window: layers may narrow their group's

    def mask(self, window: int | None) -> torch.Tensor:
        """bool [R, 1, Q, L]: which gathered positions each query sees."""
        if window not in self.masks:
            distance = self.query_positions[:, None, :, None] - self.key_positions
            self.masks[window] = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return self.masks[window]


@dataclass(slots=True)
class _Plan:
    """What the layers of one block table share in a step."""

    slot_mapping: torch.Tensor  # int64 [T]
    groups: list[_Group]


@dataclass(frozen=True, slots=True)
class _Part:
    """A batch as the layers of one block table see it."""

    batch: Batch
    tables: np.ndarray  # int32 [R, B]
    kv_group: KvGroup


class TorchAttention(AttentionBackend):
    """Pages are [blocks, block size, kv heads, dim] per layer."""

    name = "torch"

    def __init__(
        self, layers: list[LayerGeometry], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        self.layout = KvLayout.of(layers)
        self.block_size = block_size
        self.device = device
        self.pages = pages_of_heads(self.layout, num_blocks, block_size, dtype, device)
        self._plans: list[_Plan] = []

    def begin(self, batch: Batch, staging: Staging | None = None) -> None:
        runs = _length_runs(batch)
        self._plans = []
        for kv_group in self.layout.groups:
            for _ in range(kv_group.tables):
                table = len(self._plans)
                part = _Part(batch, batch.block_tables[table], kv_group)
                groups = [self._decode_group(part, a, b) for a, b in runs]
                groups += [self._prompt_group(part, row) for row in range(batch.num_decodes, len(batch.slots))]
                self._plans.append(_Plan(torch.from_numpy(batch.slot_mapping[table]).to(self.device), groups))

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        plan, pages = self._plans[self.layout.tables[call.layer]], self.pages[call.layer]
        if self.layers[call.layer].source is None:
            for page, new in zip(pages, (k, v), strict=True):
                page.flatten(0, 1).index_copy_(0, plan.slot_mapping, new.to(page.dtype))
        out = q.new_empty(q.shape[0], q.shape[1], pages[1].shape[-1])
        for group in plan.groups:
            stop = group.start + group.num_rows * group.query_len
            out[group.start : stop] = self._attend_group(call, group, q[group.start : stop], pages)
        return out

    def page_tensors(self) -> list[torch.Tensor]:
        return distinct_tensors(self.pages)

    def _attend_group(
        self, call: LayerCall, group: _Group, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        rows, count = group.num_rows, group.query_len
        keys, values = (page[group.blocks].flatten(1, 2).transpose(1, 2).to(q.dtype) for page in pages)
        queries = q.view(rows, count, *q.shape[1:]).transpose(1, 2)  # [R, Hq, Q, D]
        if group.whole and call.softcap is None and call.sinks is None and _sees_all(call.window, count):
            keys, values = keys[:, :, :count], values[:, :, :count]
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=call.scale, enable_gqa=keys.shape[1] != queries.shape[1]
            )
        else:
            out = masked_attention(queries, keys, values, group.mask(call.window), call)
        return out.transpose(1, 2).reshape(rows * count, *out.shape[1:2], out.shape[-1])

    def _decode_group(self, part: _Part, start: int, stop: int) -> _Group:
        return self._group(part, start, stop, start, 1, whole=False)

    def _prompt_group(self, part: _Part, row: int) -> _Group:
        first, last = (int(start) for start in part.batch.query_starts[row : row + 2])
        whole = int(part.batch.seq_lens[row]) == last - first
        return self._group(part, row, row + 1, first, last - first, whole)

    def _group(self, part: _Part, row: int, stop: int, start: int, count: int, whole: bool) -> _Group:
        size = self.block_size
        positions = part.batch.positions[start : start + (stop - row) * count].reshape(stop - row, count)
        low = int(part.kv_group.first_seen(positions[:, 0]).min()) // size
        high = -(-int(part.batch.seq_lens[row:stop].max()) // size)
        blocks = part.tables[row:stop, low:high].astype(np.int64)
        return _Group(
            start=start,
            num_rows=stop - row,
            query_len=count,
            # Rows of other lengths have holes there, which the mask hides: any page will do.
            blocks=torch.from_numpy(np.where(blocks == HOLE, 0, blocks)).to(self.device),
            query_positions=torch.from_numpy(positions).to(self.device),
            key_positions=torch.arange(low * size, high * size, device=self.device),
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

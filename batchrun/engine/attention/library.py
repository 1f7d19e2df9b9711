"""What backends share that leave the attention itself to a library: pages as libraries want them, and a step in parts.

A step is at most two calls of the library for each layer: one for the rows with a single query token, which come first
in a batch, and one for the others, as libraries choose their kernels by the longest row of a call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch

from batchrun.engine.attention.base import AttentionBackend, LayerCall, LayerGeometry, distinct_tensors, pages_of_heads
from batchrun.engine.batch import Batch
from batchrun.engine.kv_cache import HOLE
from batchrun.engine.kv_layout import KvLayout
from batchrun.engine.staging import Put, Staging
from batchrun.errors import ConfigError
from batchrun_kernels.reshape_and_cache import reshape_and_cache
from batchrun_kernels.rope_and_cache import Pages


@dataclass(slots=True)
class Part:
    """R rows of a batch that one call takes, as the layers of one block table see them."""

    table: int
    tokens: slice  # of the batch
    seq_lens: np.ndarray  # int64 [R]
    query_starts: np.ndarray  # int64 [R + 1], from 0
    blocks: np.ndarray  # int32 [R, B]; any block where one was given back, which no query sees
    decodes: bool  # whether each row has one query


@dataclass(slots=True)
class _Table:
    slot_mapping: torch.Tensor  # int64 [T]
    prepared: list[tuple[slice, Any]]  # tokens of each part, and what `prepare` made of it


class LibraryAttention(AttentionBackend):
    """Pages are [blocks, block size, kv heads, dim] per layer. Raises ConfigError for what the library cannot take."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    head_dims: ClassVar[Sequence[int]]

    def __init__(
        self, layers: list[LayerGeometry], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._check(layers, dtype)
        self.layers = layers
        self.layout = KvLayout.of(layers)
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.pages = pages_of_heads(self.layout, num_blocks, block_size, dtype, device)
        self._tables: list[_Table] = []
        self._staging = Staging(device)

    @abstractmethod
    def prepare(self, part: Part, put: Put) -> Any:
        """What calls for a part need, with arrays `put` on the device."""

    @abstractmethod
    def compute(self, call: LayerCall, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prepared: Any) -> Any:
        """The library's call for a part: contiguous q [T, Hq, D] of it over the pages -> [T, Hq, D]."""

    def page_tensors(self) -> list[torch.Tensor]:
        return distinct_tensors(self.pages)

    def begin(self, batch: Batch, staging: Staging | None = None) -> None:
        put = (staging or self._staging).put
        self._tables = [
            _Table(
                put(batch.slot_mapping[number]),
                [(part.tokens, self.prepare(part, put)) for part in _parts(batch, number)],
            )
            for number in range(self.layout.num_tables)
        ]
        if staging is None:
            self._staging.send()

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        to = self.destination(call.layer)
        if to is not None:
            keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
            reshape_and_cache(keys, values, to.keys, to.values, to.slot_mapping)
        return self.attend_written(call, q)

    def destination(self, layer: int) -> Pages | None:
        if self.layers[layer].source is not None:
            return None
        return Pages(*self.pages[layer], self._tables[self.layout.tables[layer]].slot_mapping)

    def attend_written(self, call: LayerCall, q: torch.Tensor) -> torch.Tensor:
        if call.sinks is not None:
            raise ConfigError(
                f"engine.attention={self.name} has no sinks, and this model has: set engine.attention=auto"
            )
        keys, values = self.pages[call.layer]
        queries, parts = q.to(self.dtype), self._tables[self.layout.tables[call.layer]].prepared
        outs = [self.compute(call, queries[tokens].contiguous(), keys, values, prepared) for tokens, prepared in parts]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).to(q.dtype)

    @classmethod
    def _check(cls, layers: list[LayerGeometry], dtype: torch.dtype) -> None:
        wrong = None
        odd = [layer for layer in layers if layer.key_dim != layer.value_dim or layer.key_dim not in cls.head_dims]
        if dtype not in cls.dtypes:
            wrong = f"computes in float16 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
        elif odd:
            keys, values = odd[0].key_dim, odd[0].value_dim
            few = len(cls.head_dims) < 5
            sizes = ", ".join(map(str, cls.head_dims)) if few else f"a multiple of 8 up to {max(cls.head_dims)}"
            wrong = f"takes heads of {sizes} dimensions, not keys of {keys} and values of {values}"
        if wrong:
            raise ConfigError(f"engine.attention={cls.name} {wrong}: set engine.attention=auto")


def _parts(batch: Batch, table: int) -> list[Part]:
    blocks = batch.block_tables[table]
    blocks = np.where(blocks == HOLE, 0, blocks)
    cuts = [0, batch.num_decodes, len(batch.slots)]
    parts = []
    for first, last in pairwise(cuts):
        if first < last:
            starts = batch.query_starts[first : last + 1]
            tokens = slice(int(starts[0]), int(starts[-1]))
            decodes = last == batch.num_decodes
            parts.append(
                Part(table, tokens, batch.seq_lens[first:last], starts - starts[0], blocks[first:last], decodes)
            )
    return parts

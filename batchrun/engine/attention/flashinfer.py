"""`engine.attention=flashinfer`: FlashInfer's kernels over our pages (Ye et al., 2025).

Signatures are those of flashinfer 0.2 to 0.6: `BatchDecodeWithPagedKVCacheWrapper` for rows with one query and
`BatchPrefillWithPagedKVCacheWrapper` for the others, each planned once a step for the layers that are alike. Rows
decode with `use_tensor_cores=True`, which takes any number of query heads for a key-value head. Prefix groups are not
made: pages that rows share are read once for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from batchrun.engine.attention.base import LayerCall, LayerGeometry
from batchrun.engine.attention.library import LibraryAttention, Part
from batchrun.engine.staging import Put

WORKSPACE = 128 * 2**20  # bytes, as its documentation has it


class _Kind(NamedTuple):
    """Calls that are alike have the same plan."""

    table: int
    decodes: bool
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(slots=True)
class _Rows:
    """Where the pages of R rows are: `indices` on the device; the rest on the host, where plans are made."""

    part: Part
    indices: torch.Tensor  # int32: the pages of each row, one row after the other
    index_starts: torch.Tensor  # int32 [R + 1]
    last_lens: torch.Tensor  # int32 [R]: positions in a row's last page
    query_starts: torch.Tensor  # int32 [R + 1]
    planned: dict[_Kind, Any] = field(default_factory=dict)


class FlashInferAttention(LibraryAttention):
    """For NVIDIA GPUs from Turing on."""

    name = "flashinfer"
    page_size = 64
    workspace_bytes = WORKSPACE
    head_dims = (64, 128, 256)

    def __init__(
        self, layers: list[LayerGeometry], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers, num_blocks, block_size, dtype, device)
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Kind, Any] = {}

    def prepare(self, part: Part, put: Put) -> _Rows:
        counts = -(-part.seq_lens // self.block_size)
        held = np.arange(part.blocks.shape[1]) < counts[:, None]
        index_starts = np.concatenate([[0], np.cumsum(counts)])
        last_lens = part.seq_lens - (counts - 1) * self.block_size
        on_host = [torch.from_numpy(x.astype(np.int32)) for x in (index_starts, last_lens, part.query_starts)]
        return _Rows(part, put(part.blocks[held], np.int32), on_host[0], on_host[1], on_host[2])

    def compute(
        self, call: LayerCall, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prepared: _Rows
    ) -> Any:
        part, (kv_heads, head_dim) = prepared.part, keys.shape[2:]
        kind = _Kind(part.table, part.decodes, q.shape[1], kv_heads, head_dim, call.scale, call.window, call.softcap)
        if kind not in prepared.planned:
            prepared.planned[kind] = self._plan(kind, prepared)
        return prepared.planned[kind].run(q, (keys, values))

    def _plan(self, kind: _Kind, rows: _Rows) -> Any:
        import flashinfer

        common = {
            "sm_scale": kind.scale,
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }
        where = (rows.index_starts, rows.indices, rows.last_lens)
        sizes = (kind.heads, kind.kv_heads, kind.head_dim, self.block_size)
        if kind.decodes:
            if kind not in self._wrappers:
                self._wrappers[kind] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, "NHD", use_tensor_cores=True
                )
            self._wrappers[kind].plan(*where, *sizes, **common)
        else:
            if kind not in self._wrappers:
                self._wrappers[kind] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[kind].plan(rows.query_starts, *where, *sizes, causal=True, **common)
        return self._wrappers[kind]

"""What an attention backend must do, and what a model layer asks of it."""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from batchrun.engine.batch import Batch
from batchrun.engine.staging import Staging

if TYPE_CHECKING:
    from batchrun.engine.kv_layout import KvLayout
    from batchrun_kernels.rope_and_cache import Pages

SCALE = torch.float32  # of K and V of each token and head, beside pages of int8


def kv_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """What pages hold with `engine.kv_cache_dtype`, for a model of `dtype`."""
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kv_cache_dtype, dtype)


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Shape of one attention layer's KV, as seen in a dry forward: never read from the model's config,
    because heads and sizes differ between layers in several families."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    source: int | None = None  # layer whose pages this one reads (KV-shared layers), else its own
    window: int | None = None  # positions that its queries see, their own included; None: all
    num_heads: int | None = field(default=None, compare=False)  # of its queries; None: not known

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """K and V of one position: kv heads x ((key dim + value dim) x element size + two scales if it is int8)."""
        if self.source is not None:
            return 0
        scales = 2 * SCALE.itemsize if dtype == torch.int8 else 0
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scales)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a model layer passes beside q, k and v."""

    layer: int
    scale: float
    window: int | None = None  # keys at distance < window are seen; None: all earlier keys
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks: torch.Tensor | None = None  # [query heads]: one more logit per head in the softmax, without a value


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros for a KV cache. Unwritten positions are read under a mask, so they must be finite.

    On a CPU the system hands out the memory when it is first touched: filling gigabytes that a short job never uses
    took longer than the job. In huge pages, where there are any, it does so some hundred times less often.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def pages_of_heads(
    layout: KvLayout, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer, [blocks, block size, kv heads, dim] and filled with zeros; layers may have the same."""
    pages = [
        (
            zero_pages((num_blocks, block_size, page.num_kv_heads, page.key_dim), dtype, device),
            zero_pages((num_blocks, block_size, page.num_kv_heads, page.value_dim), dtype, device),
        )
        for page in layout.pages
    ]
    return [pages[place] for place in layout.places]


def distinct_tensors(pages: Iterable[Iterable[Any]]) -> list[torch.Tensor]:
    """The tensors among the parts of each layer's pages, each piece of memory once."""
    held = (part for parts in pages for part in parts if isinstance(part, torch.Tensor))
    return list({part.data_ptr(): part for part in held}.values())


class AttentionBackend(ABC):
    """Owns the KV pages of all layers and attends over them where they lie."""

    name: ClassVar[str]  # in `engine.attention`
    page_size: ClassVar[int] = 32  # tokens of a page, if `engine.block_size` says nothing
    page_multiple: ClassVar[int] = 1  # which every page size must be a multiple of
    workspace_bytes: ClassVar[int] = 0  # that it holds on the device beside the pages

    @abstractmethod
    def __init__(
        self, layers: list[LayerGeometry], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None: ...

    def page_tensors(self) -> list[torch.Tensor]:
        """All memory of the pages, as contiguous tensors [blocks, ...]; none where other code cannot move them."""
        return []

    @abstractmethod
    def begin(self, batch: Batch, staging: Staging | None = None) -> None:
        """Prepare what all layers of this step share. Arrays for the device may be put into `staging`, which is sent
        before the first layer attends."""

    def destination(self, layer: int) -> Pages | None:
        """Where this step's K and V go, for a layer that writes them itself and then calls `attend_written`; None:
        `attend` writes them."""
        return None

    def attend_written(self, call: LayerCall, q: torch.Tensor) -> torch.Tensor:
        """`attend` once K and V are in the pages, of a backend that has a `destination`."""
        raise NotImplementedError

    @abstractmethod
    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k [T, Hkv, Dk] and v [T, Hkv, Dv] to their pages, then attend with q [T, Hq, Dk].

        Returns [T, Hq, Dv]. Query head h uses kv head h // (Hq // Hkv). A query at position p sees the
        keys of its own row at positions <= p, and > p - window if there is a window.
        """

"""Sequences whose visible keys lie in pages in random order, with NaN everywhere else, for the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchrun_kernels.paged import FP8, KvPages, Rows, Scoring, paged_attention_torch

HOLE = -1
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(slots=True)
class Case:
    q: Tensor
    pages: KvPages
    rows: Rows
    scoring: Scoring

    def reference(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp in float64."""
        keys, values, *factors = self.pages
        wide = self.pages if keys.dtype in (FP8, torch.uint8) else KvPages(keys.double(), values.double(), *factors)
        return paged_attention_torch(self.q.double(), wide, self.rows, self.scoring)

    def check(self, out: Tensor, lse: Tensor | None = None) -> None:
        """Compare `out` [T, Hq, Dv] and `lse` [T, Hq], which must be NaN where no sequence has its query."""
        expected, expected_lse = self.reference()
        taken = torch.zeros(len(self.q), dtype=torch.bool)
        for start, count in zip(self.rows.query_starts.tolist(), self.rows.query_lens.tolist(), strict=True):
            taken[start : start + count] = True
        atol = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(out[taken].double(), expected[taken], rtol=atol, atol=atol)
        assert out[~taken].isnan().all()
        if lse is not None:
            torch.testing.assert_close(lse[taken].double(), expected_lse[taken], rtol=1e-6, atol=1e-5)

    def poisoned(self) -> tuple[Tensor, Tensor]:
        """Places for the output and the log-sum-exp, all NaN."""
        shape = (*self.q.shape[:2], self.pages.values.shape[3])
        return torch.full(shape, torch.nan, dtype=self.q.dtype), torch.full(shape[:2], torch.nan)


def make_case(
    heads: int = 4,
    kv_heads: int = 2,
    dk: int = 64,
    dv: int = 64,
    *,
    lengths: list[int],
    counts: list[int] | None = None,
    block_size: int = 64,
    scoring: Scoring = Scoring(0.2),  # noqa: B008
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    heads_first: bool = False,
    first_keys: list[int] | None = None,
) -> Case:
    """Sequences of `lengths` positions whose last `counts` are queries (None: one each); two tokens are of no sequence.
    KvPages that no query sees are holes."""
    counts = [1] * len(lengths) if counts is None else counts
    used = [-(-n // block_size) for n in lengths]
    numbers = torch.randperm(sum(used) + 1)
    poison, free = int(numbers[0]), numbers[1:].tolist()
    k = torch.full((len(numbers), block_size, kv_heads, dk), torch.nan)
    v = torch.full((len(numbers), block_size, kv_heads, dv), torch.nan)
    tables = torch.full((len(lengths), max(used) + 2), poison, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        start = max(0, length - count - (scoring.window or length) + 1)
        start = max(start, first_keys[row] if first_keys else 0)
        tables[row, : start // block_size] = HOLE
        for position in range(start, length):
            index = position // block_size
            if tables[row, index] == poison:
                tables[row, index] = free.pop()
            k[tables[row, index], position % block_size] = torch.randn(kv_heads, dk)
            v[tables[row, index], position % block_size] = torch.randn(kv_heads, dv)
    kv_dtype = kv_dtype or dtype
    k, v = (x.to(FP8).view(torch.uint8) if kv_dtype == torch.uint8 else x.to(kv_dtype) for x in (k, v))
    if heads_first:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    scaled = (0.7, 1.3) if kv_dtype != dtype else (1.0, 1.0)
    starts = torch.tensor([1, *counts]).cumsum(0)[:-1]  # the first token and the last are nobody's
    ints = [torch.tensor(x, dtype=torch.int32) for x in (lengths, starts.tolist(), counts, first_keys or [])]
    rows = Rows(tables, ints[0], ints[1], ints[2], ints[3] if first_keys else None)
    q = torch.randn(sum(counts) + 2, heads, dk).to(dtype)
    return Case(q, KvPages(k, v, *scaled), rows, scoring)

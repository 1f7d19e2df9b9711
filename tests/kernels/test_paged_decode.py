from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from batchrun_kernels.paged_decode import paged_decode, paged_decode_cost, paged_decode_torch

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
LENGTHS = [70, 0, 1, 133]  # ragged, with an empty row and a single token


@dataclass(slots=True)
class Case:
    """A batch whose visible keys lie in pages in random order, with NaN everywhere else."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_tables: Tensor
    seq_lens: Tensor

    def run(self, **kwargs: Any) -> Tensor:
        return paged_decode(self.q, self.k_pages, self.v_pages, self.block_tables, self.seq_lens, **kwargs)

    def reference(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        q, k_pages, v_pages = (x.double() for x in (self.q, self.k_pages, self.v_pages))
        return paged_decode_torch(q, k_pages, v_pages, self.block_tables, self.seq_lens, **kwargs)


def make_case(
    heads: int = 4,
    kv_heads: int = 2,
    dk: int = 64,
    dv: int = 64,
    *,
    lengths: list[int] = LENGTHS,
    block_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    heads_first: bool = False,
) -> Case:
    used = [-(-n // block_size) for n in lengths]
    pages = torch.randperm(sum(used) + 1)
    poison, free = int(pages[0]), pages[1:].tolist()
    shape = (len(pages), block_size, kv_heads)
    k, v = torch.full((*shape, dk), torch.nan, dtype=dtype), torch.full((*shape, dv), torch.nan, dtype=dtype)
    if heads_first:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    tables = torch.full((len(lengths), max(used) + 2), poison, dtype=torch.int32)
    for row, length in enumerate(lengths):
        start = max(0, length - (window or length))
        for position in range(start, length):
            index = position // block_size
            if tables[row, index] == poison:
                tables[row, index] = free.pop()
            k[tables[row, index], position % block_size] = torch.randn(kv_heads, dk).to(dtype)
            v[tables[row, index], position % block_size] = torch.randn(kv_heads, dv).to(dtype)
    return Case(torch.randn(len(lengths), heads, dk).to(dtype), k, v, tables, torch.tensor(lengths, dtype=torch.int32))


def check(case: Case, num_splits: int = 1, **kwargs: Any) -> None:
    batch, heads, _ = case.q.shape
    out = torch.full((batch, heads, case.v_pages.shape[3]), torch.nan, dtype=case.q.dtype)
    lse = torch.full((batch, heads), torch.nan)
    assert case.run(scale=0.2, num_splits=num_splits, out=out, lse=lse, **kwargs) is out
    expected, expected_lse = case.reference(scale=0.2, **kwargs)
    atol = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("block_size", [16, 64, 12])  # smaller than a tile, one tile, not a power of two
def test_equals_the_reference_in_double(dtype: torch.dtype, num_splits: int, block_size: int) -> None:
    check(make_case(block_size=block_size, dtype=dtype), num_splits)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dk", "dv"),
    [
        (4, 4, 64, 64),
        (6, 2, 80, 80),
        (5, 1, 128, 128),
        (4, 2, 192, 128),
        (2, 1, 64, 256),
        (2, 1, 96, 32),
        (71, 1, 64, 64),
    ],
)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_every_grouping_and_head_size(heads: int, kv_heads: int, dk: int, dv: int, num_splits: int) -> None:
    check(make_case(heads, kv_heads, dk, dv, lengths=[37, 66], dtype=torch.bfloat16), num_splits)


@pytest.mark.parametrize("window", [1, 20, 64, 1000])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("block_size", [16, 64])
def test_window_reads_nothing_before_it(window: int, num_splits: int, block_size: int) -> None:
    check(make_case(window=window, block_size=block_size), num_splits, window=window)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap_bends_the_scores(num_splits: int, dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype)
    check(case, num_splits, softcap=1.5)
    plain, capped = case.run(scale=0.2), case.run(scale=0.2, softcap=1.5)
    assert (plain - capped).abs().max() > 0.05


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_join_the_softmax_once(num_splits: int, dtype: torch.dtype) -> None:
    check(make_case(dtype=dtype), num_splits, sinks=torch.tensor([-3.0, 0.0, 2.0, 30.0]).to(dtype))


def test_all_flags_together() -> None:
    case = make_case(6, 2, 96, 64, window=50, dtype=torch.bfloat16)
    check(case, 2, window=50, softcap=3.0, sinks=torch.randn(6))


def test_pages_with_heads_first_and_a_strided_query() -> None:
    case = make_case(heads_first=True)
    case.q = torch.randn(4, 8 * 64)[:, 128:384].view(4, 4, 64)
    check(case, 2)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_writes_a_strided_output_and_nothing_else(num_splits: int) -> None:
    case = make_case()
    canvas = torch.full((4, 6, 80), torch.nan)
    case.run(scale=0.2, num_splits=num_splits, out=canvas[:, 1:5, 8:72])
    torch.testing.assert_close(canvas[:, 1:5, 8:72].double(), case.reference(scale=0.2)[0], rtol=0, atol=5e-6)
    assert canvas.isnan().sum() == canvas.numel() - 4 * 4 * 64


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    case = make_case(dtype=torch.bfloat16)
    together = case.run(scale=0.2, num_splits=2)
    for row in range(len(LENGTHS)):
        one = slice(row, row + 1)
        alone = Case(case.q[one], case.k_pages, case.v_pages, case.block_tables[one], case.seq_lens[one])
        assert torch.equal(alone.run(scale=0.2, num_splits=2), together[one])


def test_more_splits_than_tiles() -> None:
    check(make_case(lengths=[5, 66]), 11)


def test_large_scores_do_not_overflow() -> None:
    case = make_case(lengths=[40])
    out = case.run(scale=100.0)
    torch.testing.assert_close(out.double(), case.reference(scale=100.0)[0], rtol=0, atol=1e-2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the NaN
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_broken_query_is_not_hidden(num_splits: int) -> None:
    case = make_case()
    case.q[3, 1] = torch.nan
    lse = torch.zeros(4, 4)
    broken = case.run(scale=0.2, num_splits=num_splits, lse=lse).isnan()
    assert broken[3, 1].all()
    assert broken.sum() == 64
    assert lse.isnan().nonzero().tolist() == [[3, 1]]


def test_an_empty_batch_and_an_empty_row() -> None:
    case = make_case(lengths=[0])
    assert torch.equal(case.run(scale=1.0), torch.zeros(1, 4, 64))
    empty = Case(case.q[:0], case.k_pages, case.v_pages, case.block_tables[:0], case.seq_lens[:0])
    assert empty.run(scale=1.0).shape == (0, 4, 64)


def test_reference_is_dense_attention() -> None:
    case = make_case(lengths=[45])
    blocks = case.block_tables[0, :3].long()
    k, v = (x[blocks].flatten(0, 1)[:45].transpose(0, 1)[None].double() for x in (case.k_pages, case.v_pages))
    q = case.q.double()[:, :, None]
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.2, enable_gqa=True)
    out, lse = case.reference(scale=0.2)
    torch.testing.assert_close(out, dense[:, :, 0])
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(2, 1)) * 0.2
    torch.testing.assert_close(lse, scores.logsumexp(-1)[:, :, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 3, 64)}, "Hq a multiple of Hkv"),
        ({"q": torch.zeros(4, 4, 32)}, r"must be \[B, Hq, Dk\]"),
        ({"q": torch.zeros(4, 64, 4).transpose(1, 2)}, "contiguous along the head size"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, r"seq_lens \(3,\)"),
        ({"sinks": torch.zeros(2)}, r"sinks of shape \(2,\)"),
        ({"lse": torch.zeros(4, 4, dtype=torch.float64)}, "lse torch.float64"),
        ({"out": torch.zeros(4, 4, 32)}, r"out of shape \(4, 4, 32\)"),
        ({"num_splits": 0}, "num_splits=0"),
        ({"window": 0}, "window=0"),
        ({"softcap": 0.0}, "softcap=0.0"),
    ],
)
def test_refuses_what_it_cannot_take(change: dict[str, Any], message: str) -> None:
    case = make_case()
    inputs = {name: getattr(case, name) for name in Case.__slots__}
    with pytest.raises(ValueError, match=message):
        paged_decode(**inputs | {"scale": 1.0} | change)


def test_refuses_head_sizes_out_of_range() -> None:
    with pytest.raises(ValueError, match="head sizes 288 and 288 must be between 16 and 256"):
        make_case(1, 1, 288, 288, lengths=[1]).run(scale=1.0)


def test_cost_reads_visible_keys_once_per_kv_head() -> None:
    cost = paged_decode_cost([100, 10], 32, 8, 128, 64, 2)
    assert cost.bytes == 2 * (110 * 8 * 192 + 2 * 32 * 192)
    assert cost.flops == 2 * 110 * 32 * 192
    assert paged_decode_cost([100, 10], 32, 8, 128, 64, 2, window=20).flops == 2 * 30 * 32 * 192
    split = paged_decode_cost([100, 10], 32, 8, 128, 64, 2, num_splits=4)
    assert split.bytes - cost.bytes == 2 * 32 * (2 * 4 * 4 * 65)  # fp32 runs and their log-sum-exp, written and read

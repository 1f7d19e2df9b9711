from __future__ import annotations

import pytest
import torch

from batchrun_kernels.merge_runs import merge_runs
from batchrun_kernels.paged import FP8, Scoring
from batchrun_kernels.paged_decode import paged_decode
from batchrun_kernels.prefix_group import (
    Groups,
    PrefixPlan,
    plan_prefix,
    prefix_group,
    prefix_group_cost,
    prefix_group_torch,
)
from tests.kernels.paged_cases import TOLERANCE, Case, make_case
from tests.kernels.test_paged_decode import plan_of

COUNTS = [1, 3, 1, 1, 2]
SHARED = [192, 64]  # of the first three sequences, and of the other two
LENGTHS = [200, 230, 193, 70, 130]


def sharing_case(heads: int = 4, kv_heads: int = 2, dk: int = 64, dv: int = 64, **options: object) -> Case:
    """Sequences whose tables begin with the same pages; what they would have had there instead is NaN."""
    case = make_case(heads, kv_heads, dk, dv, lengths=LENGTHS, counts=COUNTS, **options)  # type: ignore[arg-type]
    tables, size = case.rows.block_tables, case.pages.keys.shape[1]
    for first, rows, shared in ((0, range(1, 3), SHARED[0]), (3, range(4, 5), SHARED[1])):
        for row in rows:
            for own in tables[row, : shared // size].tolist():
                for stored in case.pages[:2]:
                    stored[own] = 127 if stored.dtype == torch.uint8 else torch.nan
            tables[row, : shared // size] = tables[first, : shared // size]
    return case


def groups_of(case: Case) -> Groups:
    starts, lengths = case.rows.query_starts.tolist(), case.rows.seq_lens.tolist()
    tokens = [start + i for start, count in zip(starts, COUNTS, strict=True) for i in range(count)]
    positions = [length - count + i for length, count in zip(lengths, COUNTS, strict=True) for i in range(count)]
    ints = (torch.tensor(x, dtype=torch.int32) for x in (SHARED, [0, 5, 8], tokens, positions))
    return Groups(case.rows.block_tables[[0, 3]], *ints)


def prefix_plan(case: Case, chunk: int | None = 128) -> PrefixPlan:
    return plan_prefix(SHARED, [5, 3], case.q.shape[1], case.pages, case.q.element_size(), num_sms=4, chunk=chunk)


def check(case: Case, chunk: int | None = 128) -> None:
    groups, dtype = groups_of(case), case.q.dtype
    runs, run_lse = prefix_group(
        case.q, case.pages, groups, case.scoring._replace(sinks=None), prefix_plan(case, chunk)
    )
    wide = case.pages
    if wide.keys.dtype not in (FP8, torch.uint8):
        wide = wide._replace(keys=wide.keys.double(), values=wide.values.double())
    out, lse = prefix_group_torch(case.q.double(), wide, groups, case.scoring._replace(sinks=None))
    torch.testing.assert_close(run_lse.logsumexp(2).double(), lse, rtol=1e-6, atol=1e-5)
    weights = (run_lse.double() - lse[..., None]).exp().nan_to_num(0.0)[..., None]
    whole = (weights * runs.double().masked_fill(weights == 0, 0.0)).sum(2)
    torch.testing.assert_close(whole, out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    # Merged with each sequence's own keys it is attention over all of them.
    merged, own_lse = case.poisoned()
    first_keys = torch.tensor([192, 192, 192, 64, 64], dtype=torch.int32)
    rows, case.rows = case.rows, case.rows._replace(first_keys=first_keys)
    paged_decode(case.q, case.pages, case.rows, case.scoring, plan_of(case), out=merged, lse=own_lse)
    merge_runs(merged, own_lse, groups.tokens, runs, run_lse)
    case.rows = rows
    case.check(merged)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [16, 64])
def test_with_the_own_part_equals_attention_over_all_keys(dtype: torch.dtype, block_size: int) -> None:
    check(sharing_case(dtype=dtype, block_size=block_size))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dk", "dv"), [(6, 2, 80, 80), (4, 2, 192, 128), (2, 1, 256, 256), (40, 1, 64, 12)]
)
def test_every_grouping_and_head_size(heads: int, kv_heads: int, dk: int, dv: int) -> None:
    check(sharing_case(heads, kv_heads, dk, dv, dtype=torch.bfloat16), chunk=None)


@pytest.mark.parametrize("window", [10, 40, 100, 1000])
def test_a_window_hides_shared_keys(window: int) -> None:
    # Made without the window, so that no page of a prefix is a hole.
    case = sharing_case()
    case.scoring = Scoring(0.2, window=window)
    check(case)


def test_softcap_and_sinks() -> None:
    check(sharing_case(scoring=Scoring(0.2, softcap=1.5, sinks=torch.tensor([-3.0, 0.0, 2.0, 30.0]))))


@pytest.mark.parametrize("kv_dtype", [FP8, torch.uint8])
def test_pages_in_fp8(kv_dtype: torch.dtype) -> None:
    check(sharing_case(dtype=torch.bfloat16, kv_dtype=kv_dtype))


def test_a_few_rows_over_many_keys_are_cut_into_chunks() -> None:
    pages = make_case(lengths=[1]).pages
    plan = plan_prefix([4096, 100], [8, 40], 4, pages, 2, num_sms=8)
    assert (plan.chunk, plan.splits, plan.block_m) == (576, 8, 128)
    assert plan.units.tolist() == [[0, 0, split] for split in range(8)] + [[1, 0, 0]]
    assert plan_prefix([4096] * 40, [8] * 40, 4, pages, 2, num_sms=8).splits == 1


def test_no_groups() -> None:
    case = sharing_case()
    empty = Groups(case.rows.block_tables[:0], *(torch.zeros(n, dtype=torch.int32) for n in (0, 1, 0, 0)))
    runs, lse = prefix_group(case.q, case.pages, empty, case.scoring, plan_prefix([], [], 4, case.pages, 4, num_sms=4))
    assert (runs.shape, lse.shape) == ((0, 4, 1, 64), (0, 4, 1))


def test_refuses_sinks_and_shapes_that_do_not_fit() -> None:
    case = sharing_case()
    plan, groups = prefix_plan(case), groups_of(case)
    with pytest.raises(ValueError, match="sinks must be None"):
        prefix_group(case.q, case.pages, groups, Scoring(1.0, sinks=torch.zeros(4)), plan)
    cut = groups._replace(token_starts=groups.token_starts[:2])
    with pytest.raises(ValueError, match=r"token_starts \(2,\) must be \[N\], \[N\] and \[G \+ 1\]"):
        prefix_group(case.q, case.pages, cut, case.scoring, plan)


def test_cost_reads_shared_keys_once() -> None:
    cost = prefix_group_cost([1000], [64], 32, 8, 128, 64, 2, splits=3)
    assert cost.flops == 2 * 1000 * 64 * 32 * 192
    assert cost.bytes == 2 * 1000 * 8 * 192 + 64 * 32 * (2 * 128 + 4 * 3 * 65)

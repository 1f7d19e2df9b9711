from __future__ import annotations

import numpy as np
import pytest
import torch

from batchrun_kernels.merge_runs import merge_runs
from batchrun_kernels.paged import FP8, Scoring
from batchrun_kernels.paged_decode import paged_decode
from batchrun_kernels.prefix_group import Groups, prefix_group, prefix_group_cost, prefix_group_torch
from batchrun_kernels.prefix_plan import PrefixPlan, PrefixSizes, cut_prefixes, plan_prefix
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
    ints = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3], SHARED, [0, 5, 8], tokens, positions))
    return Groups(case.rows.block_tables, *ints)


def prefix_plan(case: Case, chunk: int | None = 128) -> PrefixPlan:
    return plan_prefix(SHARED, [5, 3], case.q.shape[1], case.pages, case.q.element_size(), num_sms=4, chunk=chunk)


def check(case: Case, chunk: int | None = 128, padding: int = 0) -> None:
    """With room for so many more groups, queries and units of work, which hold numbers that would be seen."""
    groups, plan, dtype = groups_of(case), prefix_plan(case, chunk), case.q.dtype
    plan.runs.fill_(torch.nan)
    plan.run_lse.fill_(torch.nan)
    if padding:
        groups, plan = padded(groups, plan, padding)
    prefix_group(case.q, case.pages, groups, case.scoring._replace(sinks=None), plan)
    wide = case.pages
    if wide.keys.dtype not in (FP8, torch.uint8):
        wide = wide._replace(keys=wide.keys.double(), values=wide.values.double())
    out, lse = prefix_group_torch(case.q.double(), wide, groups_of(case), case.scoring._replace(sinks=None))
    bounds = plan.run_starts.tolist()
    for n in range(len(out)):
        mine = slice(bounds[n], bounds[n + 1])
        run_lse, runs = plan.run_lse[mine].double(), plan.runs[mine].double()
        torch.testing.assert_close(run_lse.logsumexp(0), lse[n], rtol=1e-6, atol=1e-5)
        weights = (run_lse - lse[n]).exp().nan_to_num(0.0)[..., None]
        whole = (weights * runs.masked_fill(weights == 0, 0.0)).sum(0)
        torch.testing.assert_close(whole, out[n], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert plan.runs[bounds[-1] :].isnan().all()

    # Merged with each sequence's own keys it is attention over all of them.
    merged, own_lse = case.poisoned()
    first_keys = torch.tensor([192, 192, 192, 64, 64], dtype=torch.int32)
    rows, case.rows = case.rows, case.rows._replace(first_keys=first_keys)
    paged_decode(case.q, case.pages, case.rows, case.scoring, plan_of(case), out=merged, lse=own_lse)
    merge_runs(merged, own_lse, groups.tokens, plan.run_starts, plan.runs, plan.run_lse)
    case.rows = rows
    case.check(merged)


def padded(groups: Groups, plan: PrefixPlan, padding: int) -> tuple[Groups, PrefixPlan]:
    def longer(x: torch.Tensor, value: float = 2**30) -> torch.Tensor:
        return torch.cat([x, x.new_full((padding, *x.shape[1:]), value)])

    tables, *ints = groups
    plan = plan._replace(
        units=longer(plan.units),
        run_starts=longer(plan.run_starts, int(plan.run_starts[-1])),
        runs=longer(plan.runs, torch.nan),
        run_lse=longer(plan.run_lse, torch.nan),
    )
    return Groups(tables, *map(longer, ints)), plan


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [16, 64])
def test_with_the_own_part_equals_attention_over_all_keys(dtype: torch.dtype, block_size: int) -> None:
    check(sharing_case(dtype=dtype, block_size=block_size))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dk", "dv"), [(6, 2, 80, 80), (4, 2, 192, 128), (2, 1, 256, 256), (40, 1, 64, 12)]
)
def test_every_grouping_and_head_size(heads: int, kv_heads: int, dk: int, dv: int) -> None:
    check(sharing_case(heads, kv_heads, dk, dv, dtype=torch.bfloat16), chunk=None)


@pytest.mark.parametrize("chunk", [64, None])
def test_what_is_not_counted_is_not_read(chunk: int | None) -> None:
    check(sharing_case(), chunk, padding=5)


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
    assert (plan.counts.tolist(), plan.block_m) == ([9, 576], 128)
    assert plan.units.tolist() == [[0, 0, split] for split in range(8)] + [[1, 0, 0]]
    assert plan.run_starts.tolist() == [*range(0, 64, 8), *range(64, 105)]
    assert plan.runs.shape == (104, 4, 64)
    assert plan_prefix([4096] * 40, [8] * 40, 4, pages, 2, num_sms=8).run_starts.tolist() == list(range(321))


def test_there_is_room_for_every_grouping() -> None:
    """As few rows in a group as there may be, and as many, over few keys and many."""
    random = np.random.default_rng(0)
    for sizes in (PrefixSizes(4, 8, 128, 264), PrefixSizes(1, 2, 64, 8), PrefixSizes(8, 1, 64, 264)):
        for tokens in (4, 31, 256, 1000):
            counts = [4] * (tokens // 4)
            for groups in (counts, [tokens], [*counts[::2], *[4 * len(counts[1::2])] * (len(counts) > 1)]):
                for most in (64, 5000, 100_000):
                    work = cut_prefixes(random.integers(1, most, len(groups)), groups, sizes)
                    assert work.counts[0] == len(work.units) <= sizes.most_units(tokens // 4, tokens)
                    assert work.run_starts[-1] <= sizes.most_runs(tokens)


def test_no_groups() -> None:
    case = sharing_case()
    empty = Groups(case.rows.block_tables, *(torch.zeros(n, dtype=torch.int32) for n in (0, 0, 1, 0, 0)))
    plan = plan_prefix([], [], 4, case.pages, 4, num_sms=4)
    prefix_group(case.q, case.pages, empty, case.scoring, plan)
    assert (plan.runs.shape, plan.run_starts.tolist()) == ((0, 4, 64), [0])


def test_refuses_sinks_and_shapes_that_do_not_fit() -> None:
    case = sharing_case()
    plan, groups = prefix_plan(case), groups_of(case)
    with pytest.raises(ValueError, match="sinks must be None"):
        prefix_group(case.q, case.pages, groups, Scoring(1.0, sinks=torch.zeros(4)), plan)
    cut = groups._replace(token_starts=groups.token_starts[:2])
    with pytest.raises(ValueError, match=r"token_starts of shape \(2,\) must be a contiguous \[3\]"):
        prefix_group(case.q, case.pages, cut, case.scoring, plan)


def test_cost_reads_shared_keys_once() -> None:
    cost = prefix_group_cost([1000], [64], 32, 8, 128, 64, 2, splits=3)
    assert cost.flops == 2 * 1000 * 64 * 32 * 192
    assert cost.bytes == 2 * 1000 * 8 * 192 + 64 * 32 * (2 * 128 + 4 * 3 * 65)

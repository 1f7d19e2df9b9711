from __future__ import annotations

from typing import Any

import pytest
import torch

from batchrun_kernels.paged import FP8, KvPages, Rows, Scoring, paged_attention_torch
from batchrun_kernels.paged_prefill import PrefillPlan, paged_prefill, paged_prefill_cost, plan_prefill
from tests.kernels.paged_cases import TOLERANCE, Case, make_case

LENGTHS, COUNTS = [70, 1, 133, 40], [70, 1, 9, 0]  # a whole prompt, one token, the end of a long one, none at all


def plan_of(case: Case) -> PrefillPlan:
    group = case.q.shape[1] // case.pages.keys.shape[2]
    head_dim = max(case.pages.keys.shape[3], case.pages.values.shape[3])
    lens = case.rows.seq_lens.tolist(), case.rows.query_lens.tolist()
    sizes = group, head_dim, case.q.element_size()
    return plan_prefill(*lens, *sizes, window=case.scoring.window, device=case.q.device)


def check(case: Case) -> None:
    out, _ = case.poisoned()
    assert paged_prefill(case.q, case.pages, case.rows, case.scoring, plan_of(case), out=out) is out
    case.check(out)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [64, 16, 12, 128])  # one tile, smaller, not a power of two, larger
def test_equals_the_reference_in_double(dtype: torch.dtype, block_size: int) -> None:
    check(make_case(lengths=LENGTHS, counts=COUNTS, block_size=block_size, dtype=dtype))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dk", "dv"),
    [
        (2, 2, 80, 80),
        (6, 2, 96, 96),
        (5, 1, 128, 128),
        (4, 2, 192, 128),
        (2, 1, 256, 256),
        (2, 1, 12, 6),
        (71, 1, 8, 8),
    ],
)
def test_every_grouping_and_head_size(heads: int, kv_heads: int, dk: int, dv: int) -> None:
    check(make_case(heads, kv_heads, dk, dv, lengths=[75, 20], counts=[70, 11], dtype=torch.bfloat16))


@pytest.mark.parametrize("window", [1, 20, 64, 100, 1000])
@pytest.mark.parametrize("block_size", [16, 64])
def test_window_reads_nothing_before_it(window: int, block_size: int) -> None:
    # More queries than a program has rows, so that later programs begin behind the first pages.
    lengths, counts = [230, 200, 66], [150, 10, 66]
    check(make_case(lengths=lengths, counts=counts, block_size=block_size, scoring=Scoring(0.2, window=window)))


def test_softcap_bends_the_scores() -> None:
    case = make_case(lengths=LENGTHS, counts=COUNTS, scoring=Scoring(0.2, softcap=1.5))
    check(case)
    plain = paged_prefill(case.q, case.pages, case.rows, Scoring(0.2), plan_of(case))
    capped = paged_prefill(case.q, case.pages, case.rows, case.scoring, plan_of(case))
    assert (plain - capped)[1:71].abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_join_the_softmax(dtype: torch.dtype) -> None:
    scoring = Scoring(0.2, sinks=torch.tensor([-3.0, 0.0, 2.0, 30.0]).to(dtype))
    check(make_case(lengths=LENGTHS, counts=COUNTS, scoring=scoring, dtype=dtype))


@pytest.mark.parametrize("kv_dtype", [FP8, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pages_in_fp8(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    check(make_case(lengths=LENGTHS, counts=COUNTS, dtype=dtype, kv_dtype=kv_dtype))


def test_all_flags_together_with_heads_first_and_a_strided_query() -> None:
    scoring = Scoring(0.2, window=50, softcap=3.0, sinks=torch.randn(6))
    case = make_case(
        6, 2, 96, 64, lengths=[90, 133], counts=[80, 9], scoring=scoring, dtype=torch.bfloat16, heads_first=True
    )
    wide = torch.randn(len(case.q), 8 * 96).bfloat16()
    case.q = wide[:, 96:672].view(-1, 6, 96)
    check(case)


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    case = make_case(lengths=LENGTHS, counts=COUNTS, dtype=torch.bfloat16)
    together = paged_prefill(case.q, case.pages, case.rows, case.scoring, plan_of(case))
    case.rows = case.rows._replace(query_lens=torch.tensor([0, 0, 9, 0], dtype=torch.int32))
    alone = paged_prefill(case.q, case.pages, case.rows, case.scoring, plan_of(case))
    assert torch.equal(alone[72:81], together[72:81])


# Lengths of a tile and around it; more queries than a program has rows; windows that begin in later tiles.
@pytest.mark.usefixtures("sums_in_one_order")
@pytest.mark.parametrize(
    ("scoring", "dtype"),
    [
        (Scoring(0.2), torch.float32),
        (Scoring(0.2), torch.bfloat16),
        (Scoring(0.2, window=20, softcap=3.0), torch.float32),
        (Scoring(0.2, window=70, sinks=torch.tensor([-2.0, 0.0, 1.0, 9.0])), torch.float32),
    ],
    ids=str,
)
def test_a_query_has_the_same_bits_however_many_come_with_it(scoring: Scoring, dtype: torch.dtype) -> None:
    case = make_case(lengths=[200, 65], counts=[200, 65], block_size=16, scoring=scoring, dtype=dtype)
    whole = paged_prefill(case.q, case.pages, case.rows, scoring, plan_of(case), invariant=True)
    case.check(torch.full_like(whole, torch.nan).index_copy(0, torch.arange(1, 266), whole[1:266]))
    tables = case.rows.block_tables
    for first, last in ((0, 1), (199, 200), (63, 70), (128, 200), (0, 65), (90, 140)):
        for row, start in ((0, 1), (1, 201)):
            stop = min(last, (200, 65)[row])
            if first >= stop:
                continue
            ints = [torch.tensor([x], dtype=torch.int32) for x in (stop, start + first, stop - first)]
            case.rows = Rows(tables[row : row + 1], *ints)
            piece = paged_prefill(case.q, case.pages, case.rows, scoring, plan_of(case), invariant=True)
            at = slice(start + first, start + stop)
            assert torch.equal(piece[at], whole[at]), (row, first, stop)


def test_the_programs_with_the_most_keys_come_first() -> None:
    plan = plan_prefill([300, 1000, 10], [300, 64, 10], group=2, head_dim=64, itemsize=2)
    assert plan.block_m == 128
    assert plan.tiles.tolist() == [[1, 0], [0, 4], [0, 3], [0, 2], [0, 1], [0, 0], [2, 0]]


def test_no_queries_at_all() -> None:
    case = make_case(lengths=[5], counts=[0])
    out, _ = case.poisoned()
    paged_prefill(case.q, case.pages, case.rows, case.scoring, plan_of(case), out=out)
    assert out.isnan().all()


def test_reference_is_dense_causal_attention() -> None:
    case = make_case(lengths=[45], counts=[45], block_size=16)
    k, v = (x[case.rows.block_tables[0, :3].long()].flatten(0, 1)[:45].transpose(0, 1)[None] for x in case.pages[:2])
    q = case.q[1:46].transpose(0, 1)[None].double()
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, k.double(), v.double(), scale=0.2, is_causal=True, enable_gqa=True
    )
    out, lse = case.reference()
    torch.testing.assert_close(out[1:46], dense[0].transpose(0, 1))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.double().repeat_interleave(2, 1)) * 0.2
    hidden = torch.ones(45, 45, dtype=torch.bool).triu(1)
    torch.testing.assert_close(lse[1:46].T, scores.masked_fill(hidden, -torch.inf).logsumexp(-1)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 3, 64)}, "Hq a multiple of Hkv"),
        ({"q": torch.zeros(4, 4, 32)}, r"must be \[T, Hq, Dk\]"),
        ({"q": torch.zeros(4, 64, 4).transpose(1, 2)}, "contiguous along the head size"),
        (
            {"q": torch.zeros(4, 4, 64).half()},
            r"keys torch.float32 and values torch.float32 must both be torch.float16",
        ),
        ({"scoring": Scoring(1.0, sinks=torch.zeros(2))}, r"sinks of shape \(2,\)"),
        ({"scoring": Scoring(1.0, window=0)}, "window=0"),
        ({"scoring": Scoring(1.0, softcap=0.0)}, "softcap=0.0"),
        ({"out": torch.zeros(4, 4, 32)}, r"out of shape \(4, 4, 32\)"),
    ],
)
def test_refuses_what_it_cannot_take(change: dict[str, Any], message: str) -> None:
    case = make_case(lengths=[2], counts=[2])
    inputs = {name: getattr(case, name) for name in Case.__slots__} | {"plan": plan_of(case)}
    with pytest.raises(ValueError, match=message):
        paged_prefill(**inputs | change)


def test_refuses_sequences_and_sizes_that_do_not_fit() -> None:
    case = make_case(lengths=[2], counts=[2])
    rows, rest = case.rows, (case.scoring, plan_of(case))
    three, one = (torch.zeros(n, dtype=torch.int32) for n in (3, 1))
    with pytest.raises(ValueError, match=r"query_lens of shape \(3,\) must be a contiguous \[1\]"):
        paged_prefill(case.q, case.pages, rows._replace(query_lens=three), *rest)
    with pytest.raises(ValueError, match="first_keys must be None"):
        paged_prefill(case.q, case.pages, rows._replace(first_keys=one), *rest)
    large = torch.zeros(1, 64, 1, 288)
    with pytest.raises(ValueError, match="head sizes 288 and 288 must be at most 256"):
        paged_prefill(large[0, :4], KvPages(large, large), rows, *rest)


def test_reference_takes_no_notice_of_tokens_between_sequences() -> None:
    case = make_case(lengths=[3], counts=[2])
    out, lse = paged_attention_torch(case.q, case.pages, case.rows, case.scoring)
    assert out[[0, 3]].abs().sum() == 0
    assert (lse[[0, 3]] == -torch.inf).all()


def test_cost_counts_pairs_that_are_seen() -> None:
    cost = paged_prefill_cost([100, 10], [4, 10], 32, 8, 128, 64, 2)
    assert cost.flops == 2 * (97 + 98 + 99 + 100 + 55) * 32 * 192
    assert cost.bytes == 2 * (14 * 32 * 192 + 110 * 8 * 192)
    windowed = paged_prefill_cost([100, 10], [4, 10], 32, 8, 128, 64, 2, window=20, kv_itemsize=1)
    assert windowed.flops == 2 * (80 + 55) * 32 * 192
    assert windowed.bytes == 2 * 14 * 32 * 192 + (23 + 10) * 8 * 192

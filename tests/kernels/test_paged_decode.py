from __future__ import annotations

from typing import Any

import pytest
import torch

from batchrun_kernels.decode_plan import DecodePlan, plan_decode
from batchrun_kernels.paged import FP8, Scoring
from batchrun_kernels.paged_decode import paged_decode, paged_decode_cost
from tests.kernels.paged_cases import TOLERANCE, Case, make_case

LENGTHS = [70, 0, 1, 133]  # ragged, with an empty row and a single token
COUNTS = [4, 1, 1, 8]


def plan_of(case: Case, chunk: int | None = 64, num_sms: int = 3) -> DecodePlan:
    rows = case.rows
    return plan_decode(
        rows.seq_lens.tolist(),
        rows.query_lens.tolist(),
        case.q.shape[1],
        case.pages,
        case.q.element_size(),
        num_sms=num_sms,
        first_keys=None if rows.first_keys is None else rows.first_keys.tolist(),
        window=case.scoring.window,
        chunk=chunk,
    )


def run(case: Case, plan: DecodePlan, **kwargs: Any) -> torch.Tensor:
    return paged_decode(case.q, case.pages, case.rows, case.scoring, plan, **kwargs)


def check(case: Case, chunk: int | None = 64, num_sms: int = 3) -> None:
    plan = plan_of(case, chunk, num_sms)
    plan.runs.fill_(torch.nan)
    plan.run_lse.fill_(torch.nan)
    out, lse = case.poisoned()
    assert run(case, plan, out=out, lse=lse) is out
    case.check(out, lse)
    assert not plan.arrived.any()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [16, 64, 12])  # smaller than a tile, one tile, not a power of two
def test_equals_the_reference_in_double(dtype: torch.dtype, block_size: int) -> None:
    check(make_case(lengths=LENGTHS, counts=COUNTS, block_size=block_size, dtype=dtype))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dk", "dv"),
    [
        (4, 4, 64, 64),
        (6, 2, 80, 80),
        (5, 1, 128, 128),
        (4, 2, 192, 128),
        (2, 1, 64, 256),
        (2, 1, 96, 32),
        (2, 1, 12, 6),
        (71, 1, 64, 64),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_every_grouping_and_head_size(heads: int, kv_heads: int, dk: int, dv: int, count: int) -> None:
    check(make_case(heads, kv_heads, dk, dv, lengths=[37, 66], counts=[count, 1], dtype=torch.bfloat16), chunk=32)


@pytest.mark.parametrize("window", [1, 20, 64, 1000])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("counts", [None, [1, 1, 1, 8]])
def test_window_reads_nothing_before_it(window: int, block_size: int, counts: list[int] | None) -> None:
    check(make_case(lengths=LENGTHS, counts=counts, block_size=block_size, scoring=Scoring(0.2, window=window)))


@pytest.mark.parametrize("window", [None, 50])
def test_keys_that_another_pass_attends_to_are_left_out(window: int | None) -> None:
    lengths, first_keys = [70, 5, 133, 300], [64, 0, 128, 32]
    check(make_case(lengths=lengths, counts=COUNTS, scoring=Scoring(0.2, window), first_keys=first_keys))


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap_bends_the_scores(chunk: int | None, dtype: torch.dtype) -> None:
    case = make_case(lengths=LENGTHS, dtype=dtype, scoring=Scoring(0.2, softcap=1.5))
    check(case, chunk)
    capped = run(case, plan_of(case))
    case.scoring = Scoring(0.2)
    assert (run(case, plan_of(case)) - capped)[1:-1].abs().max() > 0.05


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_join_the_softmax_once(chunk: int | None, dtype: torch.dtype) -> None:
    scoring = Scoring(0.2, sinks=torch.tensor([-3.0, 0.0, 2.0, 30.0]).to(dtype))
    check(make_case(lengths=LENGTHS, counts=COUNTS, dtype=dtype, scoring=scoring), chunk)


@pytest.mark.parametrize("kv_dtype", [FP8, torch.uint8])
def test_pages_in_fp8(kv_dtype: torch.dtype) -> None:
    check(make_case(lengths=LENGTHS, counts=COUNTS, dtype=torch.bfloat16, kv_dtype=kv_dtype))


def test_all_flags_together_with_heads_first_and_a_strided_query() -> None:
    scoring = Scoring(0.2, window=100, softcap=3.0, sinks=torch.randn(6))
    case = make_case(
        6, 2, 96, 64, lengths=LENGTHS, counts=COUNTS, scoring=scoring, dtype=torch.bfloat16, heads_first=True
    )
    case.q = torch.randn(len(case.q), 8 * 96).bfloat16()[:, 96:672].view(-1, 6, 96)
    check(case)


@pytest.mark.parametrize("chunk", [None, 64])
def test_writes_a_strided_output_and_nothing_else(chunk: int | None) -> None:
    case = make_case(lengths=LENGTHS)
    canvas = torch.full((6, 6, 80), torch.nan)
    run(case, plan_of(case, chunk), out=canvas[:, 1:5, 8:72])
    case.check(canvas[:, 1:5, 8:72])
    assert canvas.isnan().sum() == canvas.numel() - 4 * 4 * 64


@pytest.mark.parametrize("num_sms", [1, 50])
def test_a_row_does_not_depend_on_its_neighbours_or_on_the_grid(num_sms: int) -> None:
    case = make_case(lengths=LENGTHS, counts=COUNTS, dtype=torch.bfloat16)
    together = run(case, plan_of(case))
    tables, *ints = case.rows[:4]
    for row, count in enumerate(COUNTS):
        one = slice(row, row + 1)
        case.rows = case.rows._replace(
            block_tables=tables[one], seq_lens=ints[0][one], query_starts=ints[1][one], query_lens=ints[2][one]
        )
        start = int(ints[1][row])
        alone = run(case, plan_of(case, num_sms=num_sms))
        assert torch.equal(alone[start : start + count], together[start : start + count])


def test_a_plan_serves_sequences_that_have_grown() -> None:
    case = make_case(lengths=[150, 40, 130])
    case.rows.seq_lens.sub_(torch.tensor([60, 39, 1]))
    plan = plan_of(case)
    case.rows.seq_lens.add_(torch.tensor([60, 39, 1]))
    out, lse = case.poisoned()
    case.check(run(case, plan, out=out, lse=lse), lse)


def test_chunks_are_as_many_as_keep_the_multiprocessors_busy() -> None:
    case = make_case(8, 2, lengths=[1])
    alone = plan_decode([8192], [1], 8, case.pages, 2, num_sms=4)
    assert alone.counts.tolist() == [8, 16]  # 2 heads x 8 chunks, two for each of 8 programs
    assert alone.chunk_starts.tolist() == [0, 8]
    many = plan_decode([8192] * 16, [1] * 16, 8, case.pages, 2, num_sms=4)
    assert many.counts.tolist() == [16, 256]
    assert many.runs.shape[0] == 0
    short = plan_decode([300, 10], [1, 1], 8, case.pages, 2, num_sms=132)
    assert short.unit_sequences.tolist() == [0, 0, 1]  # no chunk below 256 keys
    assert short.programs == 6
    assert plan_decode([8192], [1], 8, case.pages, 2, num_sms=4, window=512).counts.tolist() == [2, 4]


def test_large_scores_do_not_overflow() -> None:
    case = make_case(lengths=[100], scoring=Scoring(100.0))
    out = run(case, plan_of(case))
    torch.testing.assert_close(out[1:2].double(), case.reference()[0][1:2], rtol=0, atol=1e-2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the NaN
@pytest.mark.parametrize("chunk", [None, 64])
def test_a_broken_query_is_not_hidden(chunk: int | None) -> None:
    case = make_case(lengths=LENGTHS)
    case.q[4, 1] = torch.nan
    lse = torch.zeros(6, 4)
    broken = run(case, plan_of(case, chunk), out=torch.zeros(6, 4, 64), lse=lse).isnan()
    assert broken[4, 1].all()
    assert broken.sum() == 64
    assert lse.isnan().nonzero().tolist() == [[4, 1]]


def test_an_empty_batch_and_an_empty_row() -> None:
    case = make_case(lengths=[0])
    assert torch.equal(run(case, plan_of(case))[1], torch.zeros(4, 64))
    case.rows = case.rows._replace(**{name: getattr(case.rows, name)[:0] for name in case.rows._fields[:4]})
    out, _ = case.poisoned()
    assert run(case, plan_of(case), out=out).isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 3, 64)}, "Hq a multiple of Hkv"),
        ({"lse": torch.zeros(3, 4, dtype=torch.float64)}, "lse torch.float64"),
        ({"out": torch.zeros(4, 4, 32)}, r"out of shape \(4, 4, 32\)"),
    ],
)
def test_refuses_what_it_cannot_take(change: dict[str, Any], message: str) -> None:
    case = make_case(lengths=[2])
    inputs = {name: getattr(case, name) for name in Case.__slots__} | {"plan": plan_of(case)}
    with pytest.raises(ValueError, match=message):
        paged_decode(**inputs | change)


def test_refuses_more_queries_than_it_is_for() -> None:
    with pytest.raises(ValueError, match="9 queries of a sequence are more than 8: use paged_prefill"):
        plan_of(make_case(lengths=[20], counts=[9]))


def test_cost_reads_visible_keys_once_per_kv_head() -> None:
    cost = paged_decode_cost([100, 10], 32, 8, 128, 64, 2)
    assert cost.bytes == 2 * (110 * 8 * 192 + 2 * 32 * 192)
    assert cost.flops == 2 * 110 * 32 * 192
    windowed = paged_decode_cost([100, 10], 32, 8, 128, 64, 2, queries=3, window=20, kv_itemsize=1)
    assert windowed.flops == 2 * (60 + 10 + 9 + 8) * 32 * 192
    assert windowed.bytes == (22 + 10) * 8 * 192 + 2 * 6 * 32 * 192

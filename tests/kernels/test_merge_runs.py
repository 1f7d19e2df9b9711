from __future__ import annotations

import pytest
import torch

from batchrun_kernels.merge_runs import merge_runs, merge_runs_cost, merge_runs_torch


@pytest.mark.parametrize("count", [1, 2, 8, 11])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference_and_reads_no_empty_run(count: int, dim: int, dtype: torch.dtype) -> None:
    runs, run_lse = torch.randn(2, 3, count, dim), 20 * torch.randn(2, 3, count)
    run_lse[0, 1, ::2] = -torch.inf
    run_lse[1, 2] = -torch.inf
    runs[run_lse == -torch.inf] = torch.nan
    out, lse = torch.full((2, 3, dim), torch.nan, dtype=dtype), torch.full((2, 3), torch.nan)
    assert merge_runs(runs, run_lse, out=out, lse=lse) is out
    expected, expected_lse = merge_runs_torch(runs.double(), run_lse.double())
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)
    assert torch.equal(out[1, 2], torch.zeros(dim, dtype=dtype))


def test_reference_merges_attention_over_two_halves_into_the_whole() -> None:
    scores, values = torch.randn(10, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64)
    halves = [(scores[part].softmax(0) @ values[part], scores[part].logsumexp(0)) for part in (slice(3), slice(3, 10))]
    runs, run_lse = torch.stack([half[0] for half in halves]), torch.stack([half[1] for half in halves])
    out, lse = merge_runs_torch(runs[None, None], run_lse[None, None])
    torch.testing.assert_close(out[0, 0], scores.softmax(0) @ values)
    torch.testing.assert_close(lse[0, 0], scores.logsumexp(0))


def test_refuses_other_dtypes_and_shapes() -> None:
    runs, run_lse = torch.zeros(1, 2, 3, 64), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match=r"float16.*must be a contiguous float32"):
        merge_runs(runs.half(), run_lse, out=torch.empty(1, 2, 64))
    with pytest.raises(ValueError, match=r"\(1, 2, 4\) must be a contiguous float32 \[1, 2, 3\]"):
        merge_runs(runs, torch.zeros(1, 2, 4), out=torch.empty(1, 2, 64))
    with pytest.raises(ValueError, match=r"out of shape \(1, 2, 32\)"):
        merge_runs(runs, run_lse, out=torch.empty(1, 2, 32))


def test_cost_reads_runs_in_float32() -> None:
    assert merge_runs_cost(2, 4, 8, 128, 2).bytes == 8 * (4 * 8 * 129 + 128 * 2)

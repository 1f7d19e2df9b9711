from __future__ import annotations

import numpy as np
import pytest
import torch

from batchrun_kernels.merge_runs import merge_runs, merge_runs_cost, merge_runs_torch


@pytest.mark.parametrize("starts", [[0, 1, 2, 3], [0, 2, 2, 7], [0, 5, 6, 6]])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference_and_reads_no_empty_run(starts: list[int], dim: int, dtype: torch.dtype) -> None:
    out, lse = torch.randn(6, 3, dim).to(dtype), 20 * torch.randn(6, 3)
    runs, run_lse = torch.randn(starts[-1] + 1, 3, dim), 20 * torch.randn(starts[-1] + 1, 3)
    tokens, run_starts = (torch.tensor(x, dtype=torch.int32) for x in ([4, 0, 3], starts))
    # No shared keys, no own ones, none at all; and runs that are no row's.
    run_lse[0, 1] = lse[0, 2] = lse[3, 0] = -torch.inf
    run_lse[starts[2] : starts[3], 0] = -torch.inf
    runs[run_lse == -torch.inf] = torch.nan
    runs[-1] = run_lse[-1] = torch.nan
    out[lse == -torch.inf] = torch.nan
    expected = out.double()
    merge_runs_torch(expected, lse.double(), tokens, run_starts, runs.double(), run_lse.double())
    before = out.clone()
    merge_runs(out, lse, tokens, run_starts, runs, run_lse)
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-5, equal_nan=True)
    alone = [token for token in range(6) if token not in (4, 0, 3)]
    alone += [token for token, runs_of in zip((4, 0, 3), np.diff(starts), strict=True) if not runs_of]
    assert torch.equal(out[alone].nan_to_num(7), before[alone].nan_to_num(7))
    if starts[2] < starts[3]:
        assert torch.equal(out[3, 0], torch.zeros(dim, dtype=dtype))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the NaN
def test_a_broken_run_is_not_hidden() -> None:
    out, lse, tokens = torch.zeros(1, 2, 16), torch.zeros(1, 2), torch.zeros(1, dtype=torch.int32)
    run_starts = torch.tensor([0, 1], dtype=torch.int32)
    merge_runs(out, lse, tokens, run_starts, torch.ones(1, 2, 16), torch.tensor([[torch.nan, 0.0]]))
    assert out[0].isnan().any(1).tolist() == [True, False]


def test_reference_merges_attention_over_three_parts_into_the_whole() -> None:
    scores, values = torch.randn(10, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64)
    parts = [(scores[at].softmax(0) @ values[at], scores[at].logsumexp(0)) for at in map(slice, (0, 3, 4), (3, 4, 10))]
    out, lse = parts[0][0][None, None].clone(), parts[0][1][None, None]
    runs, run_lse = (torch.stack([part[i] for part in parts[1:]])[:, None] for i in (0, 1))
    merge_runs_torch(out, lse, torch.tensor([0]), torch.tensor([0, 2]), runs, run_lse)
    torch.testing.assert_close(out[0, 0], scores.softmax(0) @ values)


def test_refuses_other_dtypes_and_shapes() -> None:
    out, lse, tokens = torch.zeros(5, 2, 64), torch.zeros(5, 2), torch.zeros(1, dtype=torch.int32)
    runs, run_lse, starts = torch.zeros(3, 2, 64), torch.zeros(3, 2), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"float16.*must be a contiguous float32"):
        merge_runs(out, lse, tokens, starts, runs.half(), run_lse)
    with pytest.raises(ValueError, match=r"\(3, 4\) must be a contiguous float32 \[3, 2\]"):
        merge_runs(out, lse, tokens, starts, runs, torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"out of shape \(5, 2, 32\)"):
        merge_runs(out[..., :32], lse, tokens, starts, runs, run_lse)
    with pytest.raises(ValueError, match=r"tokens \(2,\) and run_starts \(2,\)"):
        merge_runs(out, lse, torch.zeros(2, dtype=torch.int32), starts, runs, run_lse)


def test_cost_reads_runs_in_float32() -> None:
    assert merge_runs_cost(2, 4, 8, 128, 2).bytes == 8 * (4 * 8 * 129 + 2 * 128 * 2 + 4)

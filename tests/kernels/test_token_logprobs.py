from __future__ import annotations

import pytest
import torch

from batchrun_kernels.token_logprobs import TILE, token_logprobs, token_logprobs_cost, token_logprobs_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [7, TILE, 2 * TILE + 100])
def test_equals_the_log_softmax_in_double(dtype: torch.dtype, vocabulary: int) -> None:
    logits = (20 * torch.randn(3, vocabulary + 5)).to(dtype)[:, 5:]
    logits[1, : vocabulary // 2] = -torch.inf
    tokens = torch.tensor([0, vocabulary - 1, vocabulary // 2])
    out = token_logprobs(logits, tokens, out=torch.full((3,), torch.nan))
    torch.testing.assert_close(out.double(), token_logprobs_torch(logits.double(), tokens), rtol=1e-6, atol=1e-5)


def test_a_row_has_the_same_bits_alone() -> None:
    logits, tokens = 20 * torch.randn(5, TILE + 30), torch.arange(5)
    together = token_logprobs(logits, tokens)
    for row in range(5):
        assert torch.equal(token_logprobs(logits[row : row + 1], tokens[row : row + 1]), together[row : row + 1])


def test_a_forbidden_token_has_none() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    assert token_logprobs(logits, torch.tensor([1])).item() == -torch.inf


def test_takes_no_rows_and_refuses_what_does_not_fit() -> None:
    assert token_logprobs(torch.empty(0, 5), torch.empty(0, dtype=torch.int64)).shape == (0,)
    with pytest.raises(ValueError, match=r"logits of shape \(2, 5\) and tokens of shape \(3,\)"):
        token_logprobs(torch.zeros(2, 5), torch.arange(3))


def test_cost_counts_a_reading_of_each_logit() -> None:
    assert token_logprobs_cost(2, 100, 2).bytes == 2 * (200 + 12)

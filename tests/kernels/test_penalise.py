from __future__ import annotations

import pytest
import torch

from batchrun_kernels.penalise import IN_PROMPT, TILE, count_tokens, penalise, penalise_cost, penalise_torch

VOCABULARY = TILE + 200
SLOTS = torch.tensor([4, 0, 2])
NUM_PROMPT, NUM_TOKENS = torch.tensor([3, 9, 40, 9, 0]), torch.tensor([3, 9, 70, 9, 25])


def counted() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [5, 80] with many repeats, and the table of slots 4, 0 and 2."""
    token_ids = torch.randint(0, 30, (5, 80), dtype=torch.int32) * 40
    counts = torch.full((5, VOCABULARY), -7, dtype=torch.int32)
    count_tokens(token_ids, SLOTS, NUM_PROMPT, NUM_TOKENS, counts)
    return token_ids, counts


def test_counts_generated_tokens_and_marks_those_of_the_prompt() -> None:
    token_ids, counts = counted()
    for slot in SLOTS.tolist():
        prompt, generated = token_ids[slot, : NUM_TOKENS[slot]].long().tensor_split([int(NUM_PROMPT[slot])])
        expected = torch.bincount(generated, minlength=VOCABULARY).int()
        expected[prompt.unique()] += IN_PROMPT
        assert torch.equal(counts[slot], expected)
    assert (counts[[1, 3]] == -7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalises_as_the_reference(dtype: torch.dtype) -> None:
    _, counts = counted()
    canvas = torch.full((3, VOCABULARY + 9), torch.nan, dtype=dtype)
    logits = canvas[:, 5:-4]
    logits.copy_(4 * torch.randn(3, VOCABULARY))
    penalties = torch.tensor([1.3, 1.0, 0.7]), torch.tensor([0.1, 0.0, -0.35]), torch.tensor([0.5, 0.25, 0.0])
    before, expected = logits.clone(), penalise_torch(logits, counts, SLOTS, *penalties)
    penalise(logits, counts, SLOTS, *penalties)
    assert torch.equal(logits, expected)
    assert torch.equal(logits[1], before[1])  # a prompt alone has no frequency, and a repetition of 1 is none
    assert (logits[[0, 2]] != before[[0, 2]]).any(dim=1).all()
    assert canvas.isnan().sum() == 3 * 9


def test_forbidden_tokens_stay_forbidden() -> None:
    counts = torch.full((1, 40), 2, dtype=torch.int32)
    logits = torch.full((1, 40), -torch.inf)
    penalise(logits, counts, torch.tensor([0]), torch.tensor([1.5]), torch.tensor([0.5]), torch.tensor([0.5]))
    assert (logits == -torch.inf).all()


def test_takes_no_rows_and_refuses_what_does_not_fit() -> None:
    counts, none, ids = torch.zeros(2, 10, dtype=torch.int32), torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    penalise(torch.zeros(0, 10), counts, ids, none, none, none)
    count_tokens(torch.zeros(2, 5, dtype=torch.int32), ids, ids, ids, counts)
    with pytest.raises(ValueError, match=r"logits of shape \(2, 9\) and counts of shape \(2, 10\)"):
        penalise(torch.zeros(2, 9), counts, torch.arange(2), torch.ones(2), torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"shape \(3,\) must be a contiguous \[2\]"):
        penalise(torch.zeros(2, 10), counts, torch.arange(3), torch.ones(2), torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"token_ids of shape \(3, 5\) and counts of shape \(2, 10\)"):
        count_tokens(torch.zeros(3, 5, dtype=torch.int32), ids, ids, ids, counts)


def test_cost_counts_a_logit_twice_and_its_count_once() -> None:
    assert penalise_cost(3, 100, 2).bytes == 3 * 100 * 8

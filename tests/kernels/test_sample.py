from __future__ import annotations

import numpy as np
import pytest
import torch

from batchrun.engine import sampler
from batchrun_kernels.sample import TILE, gumbel_torch, sample, sample_cost, sample_torch

Parameters = dict[str, torch.Tensor]


def parameters(rows: int, **given: float | list[float]) -> Parameters:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    kinds = {"top_k": torch.int64}
    values = {
        name: torch.as_tensor(value, dtype=kinds.get(name, torch.float32)).expand(rows).contiguous()
        for name, value in defaults.items()
    }
    return values | {"seeds": torch.randint(-(2**62), 2**62, (rows,)), "positions": torch.randint(0, 9999, (rows,))}


def by_engine(logits: torch.Tensor, values: Parameters) -> torch.Tensor:
    return sampler.sample(logits.clone(), *(np.asarray(value) for value in values.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": [0.0, 0.3, 1.0, 5.0]},
        {"top_k": [1, 7, 600, 5000]},
        {"top_p": [0.05, 0.5, 0.9, 0.999]},
        {"min_p": [0.01, 0.2, 0.9, 1.0]},
        {"temperature": 1.7, "top_k": [40, 300, 2, 0], "top_p": [0.8, 0.95, 0.99, 0.3], "min_p": [0.0, 0.02, 0.1, 0.0]},
    ],
    ids=str,
)
def test_draws_the_tokens_of_the_reference_and_of_the_engine(
    dtype: torch.dtype, given: dict[str, float | list[float]]
) -> None:
    logits = (3 * torch.randn(4, TILE + 76)).to(dtype)  # bf16 has many ties
    values = parameters(4, **given)
    tokens = sample(logits, **values, out=torch.full((4,), -7))
    assert torch.equal(tokens, sample_torch(logits, **values))
    assert torch.equal(tokens, by_engine(logits, values))


def test_noise_is_that_of_the_engine() -> None:
    seeds, positions = torch.tensor([0, -5, 2**62]), torch.tensor([0, 3, 100_000])
    tokens = torch.arange(50).expand(3, -1)
    keys = sampler.noise_keys(seeds.numpy(), positions.numpy(), torch.device("cpu"))
    assert torch.equal(gumbel_torch(seeds, positions, tokens), sampler.gumbel_noise(keys, tokens))


def test_frequencies_are_the_filtered_softmax() -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, -1.0]).expand(3000, -1).contiguous()
    values = parameters(3000, temperature=0.8, top_p=0.9)
    values["positions"] = torch.arange(3000)
    values["seeds"] = torch.full((3000,), 5)
    shares = torch.bincount(sample_torch(logits, **values), minlength=5) / 3000
    expected = torch.softmax(logits[0] / 0.8, 0)
    expected[3:] = 0  # the first three reach 0.9
    torch.testing.assert_close(shares, expected / expected.sum(), rtol=0, atol=0.03)
    some = {name: value[:12] for name, value in values.items()}
    assert torch.equal(sample(logits[:12], **some), sample_torch(logits[:12], **some))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_equal_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 2 * TILE + 30).to(dtype)
    logits[0, [TILE + 5, 5, 2 * TILE + 1]] = 50.0
    logits[1, [2 * TILE + 29, TILE + 9, TILE + 8]] = 50.0
    logits[2] = -torch.inf
    tokens = sample(logits, **parameters(3, temperature=[0.0, 0.0, 1.0]))
    assert tokens.tolist() == [5, TILE + 8, 0]


def test_of_equal_tokens_top_p_keeps_those_with_smaller_ids_and_top_k_all() -> None:
    logits = torch.full((4, 620), -20.0)
    logits[:, 90::100] = 2.0  # six equal ones
    nucleus = sample(logits, **parameters(4, top_p=0.4))  # reached by three
    assert set(nucleus.tolist()) <= {90, 190, 290}
    values = parameters(4, top_k=2)
    values["seeds"] = torch.arange(4)
    tokens = sample(logits, **values)
    assert torch.equal(tokens, sample_torch(logits, **values))
    assert set(tokens.tolist()) - {90, 190}


def test_a_row_draws_the_same_token_alone() -> None:
    logits = torch.randn(3, 500)
    values = parameters(3, top_k=[0, 40, 0], top_p=[1, 0.9, 0.9])
    together = sample(logits, **values)
    for row in range(3):
        own = {name: value[row : row + 1] for name, value in values.items()}
        assert torch.equal(sample(logits[row : row + 1], **own), together[row : row + 1])


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((4, 700), -torch.inf)
    logits[:, [3, 650]] = torch.tensor([0.0, -2.0])
    values = parameters(4, temperature=100.0, top_k=[0, 5, 0, 5], top_p=[1, 1, 0.999, 0.99])
    assert set(sample(logits, **values).tolist()) <= {3, 650}


def test_takes_strided_rows_and_no_rows() -> None:
    logits = torch.randn(3, 900)[:, 100:800]
    values = parameters(3, top_k=5)
    assert torch.equal(sample(logits, **values), sample_torch(logits, **values))
    assert sample(torch.empty(0, 700), **parameters(0)).shape == (0,)


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="need contiguous rows"):
        sample(torch.zeros(5, 4).t(), **parameters(4))
    with pytest.raises(ValueError, match=r"shape \(3,\) must be a contiguous \[4\]"):
        sample(torch.zeros(4, 5), **parameters(3))


def test_cost_counts_a_pass_for_each_reading() -> None:
    assert sample_cost(2, 1000, 2).bytes == 2 * 2 * 1000 * 2
    assert sample_cost(2, 1000, 2, filters=1).bytes == 11 * 2 * 1000 * 2

"""int8 weights: that they compute what was asked for, on both paths, and are refused where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from batchrun.engine import quantized
from batchrun.engine.linear import PackedLinear
from batchrun.engine.params import SamplingParams
from batchrun.engine.quantized import QuantizedLinear, check_int8
from batchrun.errors import ConfigError
from batchrun_kernels.cpu.quantized import has_matrix_unit, quantize_rows
from batchrun_kernels.cpu.scalar import elements
from tests.engine.families import engine_of, load, random_prompt

EXACT = quantized.has_vnni() or quantized._library_is_exact()
needs_exact = pytest.mark.skipif(not EXACT, reason="this processor's 8-bit products are not exact")


def own_kernel(linear: QuantizedLinear, rounded: torch.Tensor) -> None:
    if linear.packed is not None:
        pytest.skip("this processor multiplies with oneDNN")


def library(linear: QuantizedLinear, rounded: torch.Tensor) -> None:
    if not quantized._library_is_exact():
        pytest.skip("oneDNN's 8-bit products are not exact here")
    linear.use_library(rounded)
    linear.tiles = None


def library_and_own_kernel_for_few_rows(linear: QuantizedLinear, rounded: torch.Tensor) -> None:
    linear.use_library(rounded)
    if linear.tiles is None:
        pytest.skip("oneDNN has another layout here")


@pytest.mark.parametrize("path", [own_kernel, library, library_and_own_kernel_for_few_rows])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_products_are_those_of_the_rounded_numbers(
    path: Callable[[QuantizedLinear, torch.Tensor], None], dtype: torch.dtype
) -> None:
    weight, bias = torch.randn(100, 70).to(dtype), torch.randn(100).to(dtype)
    linear = QuantizedLinear(weight, bias)
    rounded = (weight.float() / linear.scales[:, None]).round()
    path(linear, rounded.to(torch.int8))
    assert linear(torch.empty(0, 70, dtype=dtype)).shape == (0, 100)  # a step in which no row ends its prompt
    for rows in (1, 6, 50):
        x, add = torch.randn(2, rows, 70).to(dtype), torch.randn(2, rows, 100).to(dtype)
        bytes_, steps = np.empty((2 * rows, 70), dtype=np.uint8), np.empty(2 * rows, dtype=np.float32)
        quantize_rows(elements(x.view(-1, 70)), bytes_, steps)
        near = torch.from_numpy((bytes_ - 128.0) * steps[:, None]).view(2, rows, 70)
        exact = near @ (rounded * linear.scales[:, None]).double().T + bias
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
        torch.testing.assert_close(linear(x).double(), exact, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(linear(x, add).double(), exact + add, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def test_threads_share_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = QuantizedLinear(torch.randn(300, 64), None), torch.randn(9, 64)
    whole = linear(x)
    monkeypatch.setattr(quantized, "WORTH_THREADS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(linear(x), whole)


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    linear, x = QuantizedLinear(torch.randn(64, 64), None), torch.randn(20, 64)
    alone = linear(x[7:8] * 1)[0]
    assert torch.equal(linear(x[6:8])[1], alone)
    # With a matrix unit many rows are the library's, which multiplies the same whole sums in another order.
    torch.testing.assert_close(linear(x)[7], alone, rtol=1e-6 if has_matrix_unit() else 0, atol=0)


def test_weights_take_half_of_bfloat16() -> None:
    linear = QuantizedLinear(torch.randn(3072, 576, dtype=torch.bfloat16), None)
    held = linear.tiles.nbytes if linear.tiles is not None else torch.ops.mkldnn._nbytes(linear.packed)
    assert held <= 1.05 * 3072 * 576


@needs_exact
@pytest.mark.parametrize(
    ("family", "products"),
    [("llama", 3 * 4 + 1), ("qwen2_moe", 3 * (2 + 4 * 2 + 3) + 1), ("gpt_neox", 3 * 4 + 1)],  # the last is not fused
)
def test_a_model_runs_with_all_its_products_rounded(
    family: str, products: int, family_folder: Callable[[str], Path]
) -> None:
    llm = load(family_folder(family), quantization="int8")
    modules = list(engine_of(llm).model.module.modules())
    assert not any(isinstance(module, PackedLinear) for module in modules)
    assert sum(isinstance(module, QuantizedLinear) for module in modules) == products
    prompts = [random_prompt(i, 30) for i in range(5)]
    together = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    alone = [llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0] for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


@needs_exact
def test_a_model_without_linear_products_is_refused(family_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="none of the layers of gpt2"):
        load(family_folder("gpt2"), quantization="int8")


@needs_exact
def test_refuses_what_cannot_be_before_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cuda:1"):
        check_int8(torch.device("cuda:1"), fused_layers=True)
    with pytest.raises(ConfigError, match=r"engine\.fused_layers=true"):
        check_int8(torch.device("cpu"), fused_layers=False)
    check_int8(torch.device("cpu"), fused_layers=True)
    monkeypatch.setattr(quantized, "has_vnni", lambda: False)
    monkeypatch.setattr(quantized, "_library_is_exact", lambda: False)
    with pytest.raises(ConfigError, match="not exact"):
        check_int8(torch.device("cpu"), fused_layers=True)


def test_the_library_is_exact_where_we_use_it() -> None:
    if quantized.has_vnni():
        assert quantized._library_is_exact()

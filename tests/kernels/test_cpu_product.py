"""Products of bfloat16 activations with packed weights, against torch in float64."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from batchrun.engine.linear import PackedHead, PackedLinear
from batchrun_kernels.cpu import pairs, product, wide
from batchrun_kernels.cpu.after import GELU_TANH, NONE, SILU
from batchrun_kernels.cpu.amx import has_matrix_unit
from batchrun_kernels.cpu.emit import processor_has

ROUNDING = 2**-8  # of bfloat16, relative to the largest result

needs_bfloat16 = pytest.mark.skipif(
    not product.has_bfloat16_products(), reason="this processor has neither AVX512 nor AVX2"
)


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16()


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    features, depth = weight.shape
    linear = torch.nn.Linear(depth, features, bias=bias is not None, dtype=torch.bfloat16)
    linear.weight.data = weight
    if bias is not None:
        linear.bias.data = bias
    return PackedLinear([linear])


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert (result.double() - expected).abs().max() <= ROUNDING * expected.abs().max()


@pytest.fixture(params=[pairs, wide], ids=["pairs", "wide"])
def in_panels_of_64(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by one of the two ways that vectors have, whichever is this processor's."""
    if has_matrix_unit():
        pytest.skip("a processor with AMX lays weights out in other panels")
    if request.param is pairs and not processor_has("avx512bf16"):
        pytest.skip("this processor has no AVX512-BF16")
    monkeypatch.setattr(product, "product", request.param.product)


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 24, 55, 130])
@pytest.mark.parametrize(("features", "depth"), [(64, 32), (192, 96), (576, 1536)])
def test_product(rows: int, features: int, depth: int, in_panels_of_64: None) -> None:
    x, w, add, bias = random(rows, depth), random(features, depth), random(rows, features), random(features)
    linear = packed(w, bias)
    assert linear.kernel is product
    expected = x.double() @ w.double().T + bias.double()
    assert_close(linear._own(x, None, NONE), expected)
    assert_close(linear._own(x, add, NONE), expected + add.double())


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_gated_product(rows: int, in_panels_of_64: None) -> None:
    x, w, bias = random(rows, 64), random(256, 64), random(256)
    linear = packed(w, bias)
    gate, up = (x.double() @ w.double().T + bias.double()).chunk(2, dim=1)
    silu, gelu = linear.gated(x, SILU), linear.gated(x, GELU_TANH)
    assert silu is not None
    assert gelu is not None
    assert_close(silu, F.silu(gate) * up)
    assert_close(gelu, F.gelu(gate, approximate="tanh") * up)


@needs_bfloat16
def test_rows_may_lie_apart(in_panels_of_64: None) -> None:
    x, w = random(9, 200), random(64, 96)
    assert_close(packed(w)._own(x[:, 50:146], None, NONE), x[:, 50:146].double() @ w.double().T)


@needs_bfloat16
@pytest.mark.parametrize("rows", [*range(1, 14), 23, 97])
def test_a_row_has_the_same_bits_beside_any_others(rows: int, in_panels_of_64: None) -> None:
    x, w = random(130, 96), random(128, 96)
    linear = packed(w)
    whole = linear._own(x, None, NONE)
    for start in (0, 5, 130 - rows):
        assert torch.equal(linear._own(x[start : start + rows], None, NONE), whole[start : start + rows])


@needs_bfloat16
def test_head_takes_any_rows() -> None:
    w = random(640, 32)
    linear = torch.nn.Linear(32, 640, bias=False, dtype=torch.bfloat16)
    linear.weight.data = w
    x = random(1, 300, 32)
    assert_close(PackedHead([linear])(x), x.double() @ w.double().T)


@needs_bfloat16
def test_a_packed_weight_can_be_had_back_and_takes_rows_of_any_shape() -> None:
    x, w = random(2, 5, 96), random(128, 96)
    linear = packed(w)
    assert torch.equal(linear.dense(), w)
    assert_close(linear(x), x.double() @ w.double().T)


def test_layout_has_features_side_by_side_and_pairs_of_depth() -> None:
    w = random(128, 96)
    laid = product.pack(w)
    assert torch.equal(product.unpack(laid), w)
    assert laid[1, 3, 5].tolist() == w[wide.SIDE + 5, 6:8].tolist()


FEATURES = "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt"
WIDER = FEATURES + ",+avx512f,+avx512bw,+avx512dq,+avx512vl"
GENERATE = """
from numba import types
from batchrun_kernels.cpu import product
product.product.compile((types.int64,) * 13)
code = product.product.inspect_asm(product.product.signatures[0])
print(code.count("vfmadd"), code.count("zmm"), code.count("vdpbf16ps"))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="code for x86")
@pytest.mark.parametrize(
    ("processor", "features", "floats", "wide_registers", "pairs_of_bfloat16"),
    [
        ("haswell", FEATURES, True, False, False),
        ("skylake-avx512", WIDER, True, True, False),
        ("sapphirerapids", WIDER + ",+avx512bf16", True, True, False),
        ("znver4", WIDER + ",+avx512bf16", False, True, True),
    ],
)
def test_code_for_other_processors(
    processor: str, features: str, floats: bool, wide_registers: bool, pairs_of_bfloat16: bool, tmp_path: Path
) -> None:
    """Compiled and not run."""
    other = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", GENERATE], env={**os.environ, **other}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    multiplied, wider, paired = map(int, done.stdout.split())
    assert (multiplied > 50, wider > 0, paired > 0) == (floats, wide_registers, pairs_of_bfloat16)


@pytest.mark.parametrize(("features", "depth"), [(63, 32), (64, 33), (100, 96)])
def test_a_shape_that_is_padded_is_left_to_the_library(features: int, depth: int) -> None:
    x, w = random(3, depth), random(features, depth)
    linear = packed(w)
    assert linear.kernel is None
    assert_close(linear(x), x.double() @ w.double().T)

"""`engine.batch_invariant` with the kernels of a GPU, in Triton's interpreter: the same bits in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from batchrun.config import EngineConfig
from batchrun.engine import (
    executor,
    feedback,
    host_pages,
    invariance,
    layers,
    likelihoods,
    loading,
    logprobs,
    precision,
    sampler,
)
from batchrun.engine import model as paged_model
from batchrun.engine.attention.cpu import CpuAttention
from batchrun.engine.attention.registry import invariant_backend, page_size
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.attention.triton import Fp8Attention, InvariantAttention, InvariantFp8Attention, TritonAttention
from batchrun.engine.experts_device import GroupedExperts
from batchrun.engine.invariance import Trial, check_setting
from batchrun.engine.invariance_device import FixedProducts, WatchedStep, fix_modules
from batchrun.engine.layers_device import DeviceLayer
from batchrun.engine.linear import PackedLinear
from batchrun.engine.llm import LLM
from batchrun.engine.params import SamplingParams
from batchrun.engine.recorder import EagerRecorder
from batchrun.errors import ConfigError
from batchrun_kernels import matmul as products
from batchrun_kernels.matmul import matmul
from tests.engine.families import build_model, engine_of, load, make_model, make_optimistic, random_prompt
from tests.engine.test_invariance import said

pytestmark = pytest.mark.usefixtures("sums_in_one_order")
SHARED = random_prompt(0, 20)
PROMPTS = [random_prompt(3, 9), SHARED + random_prompt(2, 3), SHARED + random_prompt(1, 46)]
PARAMS = [
    SamplingParams(temperature=(0.0, 0.9)[i % 2], top_p=0.95, seed=i, max_tokens=4, ignore_eos=True, logprobs=2)
    for i in range(len(PROMPTS))
]
TIGHT: dict[str, Any] = {"max_batched_tokens": 30, "block_size": 8, "num_blocks": 12}


@pytest.fixture
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes the CPU for a device that runs Triton, and does not pack weights for oneDNN. Loading is made
    short: no comparison with eager attention, and few rows that are tried."""
    for module in (executor, feedback, layers, likelihoods, logprobs, sampler):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    monkeypatch.setattr(loading, "check_model", lambda model, backend: None)
    monkeypatch.setattr(invariance, "ON_DEVICE", Trial((18, 17), (16,)))
    pack = PackedLinear.__init__

    def unpacked(self: PackedLinear, linears: Sequence[Any]) -> None:
        pack(self, linears)
        self.weight, self.own, self.packed, self.kernel = self.dense(), False, False, None

    monkeypatch.setattr(PackedLinear, "__init__", unpacked)


def invariant(folder: Path, **options: Any) -> LLM:
    return load(folder, **{"attention": "triton", "batch_invariant": True, "cuda_graphs": "off", **options})


@pytest.mark.usefixtures("_on_device")
@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", "bfloat16"), ("gemma2", "float32"), ("qwen3_moe", "float32"), ("gpt2", "float32")]
)
def test_a_row_is_the_same_in_any_batch(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, the longest first; together in pieces, with pages that are shared, preempted and computed again; and in
    recorded steps."""
    folder = make_model(family, tmp_path, num_hidden_layers=1)
    with invariant(folder, dtype=dtype, prefix_caching=False) as llm:
        alone = [said(llm.generate([PROMPTS[i]], PARAMS[i])[0]) for i in (2, 1, 0)][::-1]
        modules = list(engine_of(llm).model.module.modules())
    assert any(isinstance(m, DeviceLayer) for m in modules) == (family != "gpt2")
    assert any(isinstance(m, GroupedExperts) for m in modules) == (family == "qwen3_moe")
    monkeypatch.setattr(loading, "check_invariance", lambda *given: None)
    with invariant(folder, dtype=dtype, **TIGHT) as llm:
        scheduler = engine_of(make_optimistic(llm)).scheduler
        assert [said(completion) for completion in llm.generate(PROMPTS, PARAMS)] == alone
        assert scheduler.num_preemptions > 0 or family == "gemma2"
    if family != "qwen3":
        return
    with invariant(folder, dtype=dtype, max_num_seqs=4) as llm:
        engine = engine_of(llm)
        engine.executor.record(EagerRecorder(), engine.max_model_len, engine.scheduler.expected_steps, at_once=True)
        assert [said(completion) for completion in llm.generate(PROMPTS, PARAMS)] == alone


@pytest.mark.usefixtures("_on_device")
@pytest.mark.parametrize(("family", "kv", "swap"), [("llama", "fp8", 0.001), ("gemma2", "fp8", 0.0)])
def test_a_row_is_the_same_with_steps_ahead_and_kv_elsewhere(
    family: str, kv: str, swap: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted, and on from what was kept of it or computed again, with the next step launched before the last is
    read; KV in 8 bits; layers with windows, which give pages back."""
    monkeypatch.setattr(loading, "check_invariance", lambda *given: None)
    monkeypatch.setattr(host_pages, "swap_pays", lambda *given: True)
    folder = make_model(family, tmp_path, num_hidden_layers=2)
    options: dict[str, Any] = {"kv_cache_dtype": kv}
    params = [replace(each, max_tokens=7) for each in PARAMS]
    with invariant(folder, prefix_caching=False, overlap="off", **options) as llm:
        alone = [said(llm.generate([p], one)[0]) for p, one in zip(PROMPTS, params, strict=True)]
    with invariant(folder, swap_space=swap, overlap="on", **options, **TIGHT) as llm:
        engine = engine_of(make_optimistic(llm))
        assert isinstance(engine.model.backend, InvariantFp8Attention if kv == "fp8" else InvariantAttention)
        assert [said(completion) for completion in llm.generate(PROMPTS, params)] == alone
        assert engine.scheduler.num_preemptions > 0 or family == "gemma2"
        assert engine.scheduler.swap is None or engine.scheduler.swap.num_restored > 0
        assert (engine.scheduler.swap is not None) == (swap > 0)


@pytest.mark.usefixtures("_on_device")
def test_what_torch_sums_by_the_number_of_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not there for gpt_oss: it uses torch\.\w+, whose sums depend"):
        invariant(make_model("gpt_oss", tmp_path, num_hidden_layers=1))


def test_a_watched_step_lets_pass_what_is_computed_for_each_row() -> None:
    x, long = torch.randn(3, 8), torch.randn(3, 64)
    with WatchedStep("family"):
        assert x.softmax(-1).shape == F.layer_norm(x, (8,)).shape == x.shape
        assert x.sum(-1).shape == (3,)
        assert (x[:, :1] @ x[:1]).shape == (3, 8)
        assert torch.arange(64).sum() == torch.arange(64).cumsum(0)[-1] == 2016
    forbidden = {
        "mean": lambda: long.mean(-1),
        "cumsum": lambda: x.cumsum(-1),
        "linear": lambda: F.linear(x, torch.randn(2, 8)),
        "matmul|mm": lambda: x @ torch.randn(8, 2),
        "bmm|baddbmm": lambda: torch.bmm(x[None], torch.randn(1, 8, 2)),
        "index_add": lambda: torch.zeros(3, 8).index_add(0, torch.tensor([0, 0, 1]), x),
    }
    for name, compute in forbidden.items():
        with torch.inference_mode(), WatchedStep("family"), pytest.raises(ConfigError, match=rf"torch\.({name})"):
            compute()


def test_products_of_torch_go_through_the_kernel() -> None:
    x, weight, bias = torch.randn(2, 3, 16), torch.randn(5, 16), torch.randn(5)
    expected = matmul(x.flatten(0, 1), weight, bias)
    with FixedProducts():
        assert torch.equal(F.linear(x, weight, bias).flatten(0, 1), expected)
        assert torch.equal(torch.addmm(bias, x[0], weight.T), expected[:3])


@pytest.mark.usefixtures("_on_device")
def test_rows_are_tried_with_the_products_that_the_model_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_model, "check_tf32", lambda device: None)
    monkeypatch.setitem(precision.SETTINGS, "cpu", (torch.backends.cuda.matmul,))
    choose, check = products.product_precision, loading.check_invariance
    seen: list[str] = []

    def noted(dtype: torch.dtype) -> str:
        seen.append(choose(dtype))
        return seen[-1]

    def checked(*given: Any) -> None:
        seen.clear()
        check(*given)

    monkeypatch.setattr(products, "product_precision", noted)
    monkeypatch.setattr(loading, "check_invariance", checked)
    invariant(make_model("gemma2", tmp_path, num_hidden_layers=1), dtype="tf32").close()
    assert set(seen) == {"tf32"}


class OffsetNorm(torch.nn.Module):
    """Gemma's: times 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.randn(48)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


class SquareNorm(OffsetNorm):
    """Another formula."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square()


def test_norms_that_the_kernel_computes_are_replaced() -> None:
    class Model:
        module = torch.nn.ModuleList([OffsetNorm(), torch.nn.RMSNorm(48, eps=1e-6), torch.nn.LayerNorm(48)])

    x = torch.randn(2, 3, 48)
    expected = [norm(x) for norm in Model.module]
    fix_modules(Model)
    with torch.inference_mode(), WatchedStep("family"):
        for norm, before in zip(Model.module, expected, strict=True):
            torch.testing.assert_close(norm(x), before)
    Model.module = torch.nn.ModuleList([SquareNorm()])
    fix_modules(Model)
    with torch.inference_mode(), WatchedStep("family"), pytest.raises(ConfigError, match=r"torch\.mean"):
        Model.module[0](x)


@torch.inference_mode()
def test_experts_give_a_token_the_same_bits_beside_any_others() -> None:
    experts = GroupedExperts(build_model("qwen3_moe").model.layers[0].mlp.experts)
    experts.fix_tiles()
    x, index, weights = torch.randn(150, 32), torch.rand(150, 4).topk(2).indices, torch.rand(150, 2)
    whole = experts(x, index, weights)
    for start, stop in ((0, 1), (149, 150), (20, 100)):
        assert torch.equal(experts(x[start:stop], index[start:stop], weights[start:stop]), whole[start:stop])


def test_of_equal_logits_the_smaller_ids_come_first() -> None:
    logits = (2 * torch.randn(40, 300)).round()  # many are equal, and some -0
    logits[0, :] = float("-inf")
    expected = logits.sort(dim=-1, descending=True, stable=True)
    for dtype in (torch.float32, torch.bfloat16):
        values, ids = logprobs.likeliest(logits.to(dtype), 200, exact=True)
        assert torch.equal(values.float(), expected.values[:, :200])
        assert torch.equal(ids, expected.indices[:, :200])


def test_settings_that_it_is_there_for() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def check(device: torch.device, **options: Any) -> None:
        check_setting(EngineConfig(batch_invariant=True, **options), device, adapters=False, encodes=False)

    for attention in ("auto", "triton"):
        check(cuda, attention=attention, fused_layers=False)
    check(cpu)
    for attention in ("torch", "flash_attn", "flashinfer", "cpu"):
        with pytest.raises(ConfigError, match=rf"engine\.attention={attention}: use engine\.attention=triton"):
            check(cuda, attention=attention)
    with pytest.raises(ConfigError, match=r"model\.device=mps: use model\.device=cpu or cuda"):
        check(torch.device("mps"))


def test_backends_that_it_is_there_for() -> None:
    assert invariant_backend(TritonAttention) is InvariantAttention
    assert invariant_backend(Fp8Attention) is InvariantFp8Attention
    assert InvariantFp8Attention.fp8
    assert InvariantFp8Attention.invariant
    assert invariant_backend(CpuAttention) is CpuAttention
    with pytest.raises(ConfigError, match=r"not there for attention by torch: use engine\.attention=triton"):
        invariant_backend(TorchAttention)
    assert page_size(EngineConfig(batch_invariant=True), InvariantAttention) == 64
    assert page_size(EngineConfig(batch_invariant=True, block_size=16), InvariantAttention) == 16

"""`engine.kv_cache_dtype=fp8`: what rounding K and V costs, that nothing else changes, and where it is refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from batchrun.engine import layers
from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention import registry
from batchrun.engine.attention import triton as backend_module
from batchrun.engine.attention.base import LayerGeometry
from batchrun.engine.attention.cpu import CpuAttention
from batchrun.engine.attention.registry import cache_backend
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.attention.triton import Fp8Attention, TritonAttention
from batchrun.engine.hook import NAME
from batchrun.engine.kv_scales import read_scales
from batchrun.engine.memory import KvShape
from batchrun.engine.model import PagedModel
from batchrun.engine.params import SamplingParams
from batchrun.errors import ConfigError
from batchrun_kernels.paged import FP8
from tests.engine.families import engine_of, load, make_model, random_prompt

CPU = torch.device("cpu")
SHARED = random_prompt(0, 12)
PROMPTS = [random_prompt(1, 22), *(SHARED + random_prompt(i, 3) for i in (2, 3))]


class RoundedAttention(TorchAttention):
    """K and V as fp8 pages give them back."""

    scales: Sequence[tuple[float, float]] = ()

    def use_scales(self, scales: Sequence[tuple[float, float]]) -> None:
        self.scales = scales

    def attend(self, call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scales = self.scales[call.layer] if self.scales else (1.0, 1.0)
        pairs = zip((k, v), scales, strict=True)
        return super().attend(call, q, *((x / s).clamp(-448, 448).to(FP8).to(x.dtype) * s for x, s in pairs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Softcaps, and windows beside full attention."""
    return make_model("gemma2", tmp_path_factory.mktemp("gemma2"), num_hidden_layers=2)


def test_logits_are_near_those_of_full_pages(folder: Path) -> None:
    model = PagedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME))
    prompts = [np.array(prompt, dtype=np.int32) for prompt in PROMPTS]
    exact, rounded, found = (
        paged_logits(model, backend, prompts, 12) for backend in (TorchAttention, RoundedAttention, Fp8Attention)
    )
    assert (found - rounded).norm() < 1e-4 * exact.norm()
    assert 1e-3 * exact.norm() < (found - exact).norm() < 0.1 * exact.norm()


def test_generates_what_torch_does_with_rounded_keys_and_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces, cached prefixes and prefix groups, and layers that write their KV themselves."""
    monkeypatch.setattr(layers, "runs_triton", lambda device: True)
    monkeypatch.setattr(backend_module, "MIN_GROUP_ROWS", 2)
    monkeypatch.setattr(backend_module, "MIN_SAVED_BLOCKS", 1)
    options = {"block_size": 4, "max_batched_tokens": 16}
    ours = load(folder, attention="triton", kv_cache_dtype="fp8", **options)
    backend = engine_of(ours).model.backend
    assert isinstance(backend, Fp8Attention)
    assert {page.dtype for pages in backend.pages for page in pages[:2]} == {FP8}
    reference = load(folder, attention="torch", **options)
    engine = engine_of(reference)
    engine.model.backend = RoundedAttention(engine.model.layers, engine.pool.num_blocks, 4, torch.float32, CPU)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    found, expected = ([each.token_ids for each in llm.generate(PROMPTS, params)] for llm in (ours, reference))
    assert found == expected


def stored(folder: Path, tmp_path: Path, scales: dict[str, list[float]]) -> Path:
    """The model with tensors that are no weights."""
    copy = Path(shutil.copytree(folder, tmp_path / "scaled"))
    tensors = load_file(copy / "model.safetensors") | {name: torch.tensor(value) for name, value in scales.items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_scales_of_the_checkpoint_are_those_of_the_pages(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of pieces, with prefix groups, by layers that write their KV themselves and by those that do not."""
    scales = {f"model.layers.{i}.self_attn.{part}_scale": [0.003 * (1 + i)] for i in (0, 1) for part in "kv"}
    scales["model.layers.1.self_attn.v_scale"] = [0.002]
    scaled = stored(folder, tmp_path, scales)
    pairs = [(0.003, 0.003), (0.006, 0.002)]
    expected = [x.item() for x in torch.tensor([0.003, 0.003, 0.006, 0.002])]
    monkeypatch.setattr(backend_module, "MIN_GROUP_ROWS", 2)
    monkeypatch.setattr(backend_module, "MIN_SAVED_BLOCKS", 1)
    prompts = [np.array(prompt, dtype=np.int32) for prompt in PROMPTS]
    for fused in (False, True):
        monkeypatch.setattr(layers, "runs_triton", lambda device, fused=fused: fused)
        llm = load(scaled, attention="triton", kv_cache_dtype="fp8", fused_layers=fused)
        model = engine_of(llm).model
        assert isinstance(model.backend, Fp8Attention)
        assert [scale for pages in model.backend.pages for scale in pages[2:]] == expected
        backends = (scaled_backend(Fp8Attention, pairs), scaled_backend(RoundedAttention, pairs), RoundedAttention)
        found, rounded, plain = (paged_logits(model, backend, prompts, 12) for backend in backends)
        assert (found - rounded).norm() < 1e-4 * rounded.norm()
        assert (found - plain).norm() > 1e-3 * rounded.norm()


def scaled_backend(backend: Any, pairs: list[tuple[float, float]]) -> Any:
    """A backend whose pages have these scales from the first."""

    class Scaled(backend):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.use_scales(pairs)

    return Scaled


@pytest.mark.parametrize(
    "name", ["self_attn.k_proj.k_scale", "self_attn.k_proj.output_scale", "self_attn.attn.k_scale", "self_attn.k_scale"]
)
def test_scales_have_other_names_too(name: str, tmp_path: Path) -> None:
    tensors = {f"model.layers.1.{name}": torch.tensor(0.25), f"model.layers.1.{name}_inv": torch.tensor(3.0)}
    tensors["vision_tower.layers.0.self_attn.k_scale"] = torch.tensor(7.0)
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_scales(tmp_path, [LayerGeometry(1, 8, 8)] * 2, 2) == [(1.0, 1.0), (0.25, 1.0)]


def test_one_scale_for_both_and_layers_that_read_the_kv_of_others(tmp_path: Path) -> None:
    own, shared = LayerGeometry(1, 8, 8), LayerGeometry(1, 8, 8, 0)
    save_file({"model.layers.0.self_attn.kv_scale": torch.tensor([0.5])}, tmp_path / "model.safetensors")
    assert read_scales(tmp_path, [own, shared], 2) == [(0.5, 0.5), (0.5, 0.5)]


@pytest.mark.parametrize(
    ("layer", "value", "message"),
    [
        (0, [0.1, 0.2], r"one scale for the keys of a layer .*layers\.0\.self_attn\.k_scale in .* has 2: set"),
        (0, [0.0], r"is 0\.0, and a scale must be above 0"),
        (2, [0.1], r"are of 3 layers, and this model of 2 attends 2 times: set engine\.kv_cache_dtype=auto"),
    ],
)
def test_scales_that_cannot_be_used_are_refused(layer: int, value: list[float], message: str, tmp_path: Path) -> None:
    save_file({f"model.layers.{layer}.self_attn.k_scale": torch.tensor(value)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        read_scales(tmp_path, [LayerGeometry(1, 8, 8)] * 2, 2)


def test_the_same_memory_holds_twice_the_tokens() -> None:
    layer = LayerGeometry(8, 128, 64)
    assert layer.bytes_per_token(torch.bfloat16) == 2 * layer.bytes_per_token(FP8) == 8 * (128 + 64) * 2
    assert "x 1 byte" in KvShape((layer,), FP8).formula()


def test_is_refused_where_no_kernel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_backend(TritonAttention, "fp8", CPU) is Fp8Attention
    for backend in (TorchAttention, CpuAttention):
        with pytest.raises(ConfigError, match=r"engine\.attention=triton only, and attention is by (cpu|torch): set"):
            cache_backend(backend, "fp8", CPU)
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_dtype=int8 .*engine\.attention=cpu"):
        cache_backend(TritonAttention, "int8", CPU)
    monkeypatch.setattr(registry, "stores_fp8", lambda device: False)
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or later, which cuda is not"):
        cache_backend(TritonAttention, "fp8", torch.device("cuda"))

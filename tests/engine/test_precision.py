"""`model.dtype=tf32`: where it is refused, what products are made of, and that float32 is never less."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from batchrun.config import Config
from batchrun.config.model import ModelConfig
from batchrun.engine import model as model_module
from batchrun.engine import precision
from batchrun.engine.checkpoint import open_checkpoint
from batchrun.engine.loading import load_single
from batchrun.engine.model import choose_dtype, dtype_name
from batchrun.engine.precision import check_tf32, float32_products
from batchrun.errors import ConfigError
from batchrun_kernels.precision import product_precision
from tests.engine.families import engine_of, load

CUDA = torch.device("cuda")
MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """What a test has set of the process is undone."""
    before = MATMUL.fp32_precision
    yield
    MATMUL.fp32_precision = before


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a GPU whose products can be TF32's; its own are float32's whatever is set for a GPU."""
    monkeypatch.setattr(model_module, "check_tf32", lambda device: None)
    monkeypatch.setitem(precision.SETTINGS, "cpu", (MATMUL,))


def test_is_refused_before_the_model_loads(llama: Path) -> None:
    checkpoint = open_checkpoint(ModelConfig(str(llama), dtype="tf32", device="cpu"))
    with pytest.raises(ConfigError, match=r"model\.dtype=tf32 needs an NVIDIA GPU .* is cpu: set model\.dtype=float32"):
        load_single(checkpoint, None, Config().engine)


def test_is_refused_on_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=r"8\.0 or later, and cuda has 7\.5: set model\.dtype=float32 or float16"):
        check_tf32(CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_tf32(CUDA)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ConfigError, match="and cuda is a GPU of AMD: set"):
        check_tf32(CUDA)


def test_weights_are_float32_and_the_job_is_another(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    checkpoint = open_checkpoint(ModelConfig(str(llama)))
    dtype = choose_dtype("tf32", checkpoint, CUDA, Config().engine)
    assert dtype == torch.float32
    assert (dtype_name("tf32", dtype), dtype_name("auto", dtype)) == ("tf32", "float32")


def test_settings_hold_for_the_time_and_warn_of_nothing() -> None:
    before = [setting.fp32_precision for setting in precision.SETTINGS["cuda"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with float32_products("tf32", CUDA):
            assert [setting.fp32_precision for setting in precision.SETTINGS["cuda"]] == ["tf32", "tf32"]
            with float32_products("ieee", CUDA):
                assert [setting.fp32_precision for setting in precision.SETTINGS["cuda"]] == ["ieee", "ieee"]
            assert MATMUL.fp32_precision == "tf32"
    assert [setting.fp32_precision for setting in precision.SETTINGS["cuda"]] == before


def test_kernels_multiply_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with float32_products("tf32", CUDA):
        assert product_precision(torch.float32) == "tf32"
        assert product_precision(torch.bfloat16) == "ieee"
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert product_precision(torch.float32) == "ieee"
    with float32_products("ieee", CUDA):
        assert product_precision(torch.float32) == "ieee"


def note_products(module: Any) -> dict[str, set[str]]:
    """What products of float32 are in a forward of the rotary embedding and of the MLPs, as they are called."""
    seen: dict[str, set[str]] = {"rotary": set(), "mlp": set()}
    for name, part in module.named_modules():
        kind = "rotary" if name.endswith("rotary_emb") else "mlp" if name.endswith("mlp") else None
        if kind is not None:
            compute, kinds = part.forward, seen[kind]

            def forward(*args: Any, compute: Any = compute, kinds: set[str] = kinds, **kwargs: Any) -> Any:
                kinds.add(MATMUL.fp32_precision)
                return compute(*args, **kwargs)

            part.forward = forward
    return seen


@pytest.mark.usefixtures("anywhere")
def test_a_forward_is_in_tf32_but_for_its_angles(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[str] = []
    rotary: Any = None

    def keep(module: Any, device: torch.device) -> int:
        nonlocal rotary
        rotary = note_products(module)
        return precision.keep_angles_exact(module, device)

    monkeypatch.setattr(model_module, "keep_angles_exact", keep)
    with load(llama, dtype="tf32", fused_layers=False) as llm:
        layer = engine_of(llm).model.module.model.layers[0]
        layer.register_forward_pre_hook(lambda *_: inside.append(MATMUL.fp32_precision))
        assert llm.generate(["w5 w6"])[0].token_ids
    assert rotary == {"rotary": {"ieee"}, "mlp": {"tf32"}}
    assert set(inside) == {"tf32"}
    assert MATMUL.fp32_precision != "tf32"


@pytest.mark.usefixtures("anywhere")
def test_float32_is_float32_whatever_the_process_has_set(llama: Path) -> None:
    MATMUL.fp32_precision = "tf32"
    with load(llama, fused_layers=False) as llm:
        seen = note_products(engine_of(llm).model.module)
        llm.generate(["w5 w6"])
    assert seen == {"rotary": {"ieee"}, "mlp": {"ieee"}}
    assert MATMUL.fp32_precision == "tf32"


@pytest.mark.usefixtures("anywhere")
def test_what_is_compared_at_load_is_compared_in_full(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchrun.engine import loading

    seen = []
    for name in ("check_model", "fuse_model"):
        original = getattr(loading, name)

        def noted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            seen.append(MATMUL.fp32_precision)
            return original(*args, **kwargs)

        monkeypatch.setattr(loading, name, noted)
    load(llama, dtype="tf32").close()
    assert seen == ["ieee", "ieee"]


def test_other_devices_have_nothing_to_set() -> None:
    with float32_products("tf32", cast(torch.device, SimpleNamespace(type="mps"))):
        assert product_precision(torch.float32) == "ieee"

"""`engine.torch_compile=true`: the same tokens, a bounded number of graphs, and where it is refused."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from batchrun.engine import torch_compile
from batchrun.engine.llm import LLM
from batchrun.engine.params import SamplingParams
from batchrun.errors import ConfigError
from tests.engine.adapters import make_adapter
from tests.engine.families import engine_of, load, random_prompt

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
PROMPTS = [random_prompt(length, length) for length in (1, 3, 9, 17, 30, 41)]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(completion.token_ids) for completion in llm.generate(PROMPTS, GREEDY)]


@needs_compiler
@pytest.mark.parametrize(("family", "fused"), [("llama", False), ("olmo2", True)])
def test_says_the_same_with_few_graphs(family: str, fused: bool, family_folder: Callable[[str], Path]) -> None:
    """Steps of 1 to 16 tokens; norms after attention in a layer that no form of ours fits."""
    from torch._dynamo.utils import counters

    folder = family_folder(family)
    with load(folder, fused_layers=fused) as llm:
        expected = tokens(llm)
    counters.clear()
    with load(folder, fused_layers=fused, torch_compile=True, max_batched_tokens=16) as llm:
        layers = engine_of(llm).model.module.model.layers
        made = counters["stats"]["unique_graphs"]
        assert 0 < made <= 16, "layers that are alike share graphs; steps of one token have their own"
        assert tokens(llm) == expected
        assert counters["stats"]["unique_graphs"] == made, "none is made while rows wait"
    assert len(layers) > 1


@needs_compiler
def test_fused_layers_stay_as_they_are(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("a fused layer was compiled"))
    with load(llama, torch_compile=True) as llm:
        assert tokens(llm)


@needs_compiler
def test_a_layer_that_cannot_be_compiled_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> object:
        raise RuntimeError("no graph\nwith a long story")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fails)
    with pytest.raises(ConfigError, match=r"llama cannot be compiled \(no graph\): set engine\.torch_compile=false"):
        load(llama, fused_layers=False, torch_compile=True)


@needs_compiler
def test_a_layer_that_says_something_else_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: lambda *a, **k: 1.5 * function(*a, **k))
    with pytest.raises(ConfigError, match=r"changes the logits of llama by 0\.\d+: set"):
        load(llama, fused_layers=False, torch_compile=True)


def test_without_a_compiler_it_is_refused_before_the_model_loads(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    monkeypatch.setattr("batchrun.engine.loading.load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler on a CPU, and there is no g\+\+: install it"):
        load(llama, torch_compile=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_invariant": True, "block_size": 128}, r"not there for engine\.batch_invariant=true"),
        ({"quantization": "int8"}, r"not there for model\.quantization=int8"),
        ({"adapters": {"a": "ADAPTER"}}, r"not there for model\.adapters, .*: use model\.adapter; or set"),
    ],
)
def test_is_refused_beside_what_it_would_change(
    options: dict[str, object], message: str, llama: Path, tmp_path: Path
) -> None:
    if "adapters" in options:
        make_adapter(tmp_path / "adapter", llama, 1)
        options = {"adapters": {"a": str(tmp_path / "adapter")}}
    with pytest.raises(ConfigError, match=message):
        load(llama, torch_compile=True, **options)


def test_a_gpu_needs_triton(llama: Path) -> None:
    from batchrun.config import Config
    from batchrun.config.model import ModelConfig
    from batchrun.engine.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(ModelConfig(str(llama)))
    with pytest.raises(ConfigError, match=r"needs Triton on mps: pip install"):
        torch_compile.check_compile(Config().engine, checkpoint, torch.device("mps"), encodes=False)
    with pytest.raises(ConfigError, match="not there for a model that gives vectors"):
        torch_compile.check_compile(Config().engine, checkpoint, torch.device("cpu"), encodes=True)


@needs_compiler
def test_engines_that_are_gone_do_not_disturb_the_compiler(
    family_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in a cycle, whose end sets torch's threads, is left when compiling begins."""
    from torch._dynamo import convert_frame

    probe, compiler = torch_compile._probe, convert_frame.setup_compile_debug
    collected = Mock(wraps=gc.collect)

    def leaving(model: Any) -> list[torch.Tensor]:
        found = probe(model)
        if not collected.called:
            gone = Mock()
            gone.itself = gone
            weakref.finalize(gone, torch.set_num_threads, 2)
        return found

    def collecting() -> Any:  # while it traces
        collected()
        return compiler()

    monkeypatch.setattr(torch_compile, "_probe", leaving)
    monkeypatch.setattr(convert_frame, "setup_compile_debug", collecting)
    gc.disable()
    try:
        with load(family_folder("llama"), fused_layers=False, torch_compile=True, max_batched_tokens=16):
            assert collected.called
    finally:
        gc.enable()

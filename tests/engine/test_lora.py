"""Adapters: rows say what `generate` says with the adapter merged, token for token, in any mix of a batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchrun.config import ModelConfig
from batchrun.engine.adapted import AdaptedLinear
from batchrun.engine.checkpoint import open_checkpoint
from batchrun.engine.layers import FusedLayer
from batchrun.engine.params import Request, SamplingParams
from batchrun.errors import ConfigError
from tests.engine.adapters import make_adapter, merged
from tests.engine.families import assert_idle, engine_of, generate, load, make_model, make_optimistic, random_prompt
from tests.engine.test_quantized import needs_exact

MAX_TOKENS = 12
SHARED = random_prompt(0, 34)
# The last ones begin alike, and the long ones are more than the rows that a fused layer computes at once.
PROMPTS = [random_prompt(1, 3), random_prompt(2, 130), *(SHARED + random_prompt(10 + i, 5 + i) for i in range(2))]
NAMES = (None, "a", "b")

EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# By family: the products of two adapters.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama": (EVERYTHING, ("q_proj", "v_proj", "up_proj")),
    "gemma2": (EVERYTHING, ("k_proj", "gate_proj")),
    "phi3": (("qkv_proj", "down_proj"), ("gate_up_proj", "o_proj")),
    "mixtral": (("q_proj", "o_proj"), ("v_proj",)),
    "deepseek_v3": (("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), ("o_proj", "shared_experts.down_proj")),
    "gpt2": (("c_attn", "mlp.c_proj"), ("c_fc",)),
    "gpt_neox": (("query_key_value",), ("dense_4h_to_h", "embed_out")),
}


class Case:
    """A model, two adapters, and what `generate` says with each."""

    def __init__(self, base: Path, adapters: dict[str, Path]) -> None:
        self.base, self.adapters = base, adapters
        self.expected = {name: self.generate(adapters.get(name) if name else None) for name in NAMES}
        assert len({str(tokens) for tokens in self.expected.values()}) == 3

    def generate(self, adapter: Path | None) -> list[list[int]]:
        model = merged(self.base, adapter)
        return [generate(model, prompt, MAX_TOKENS) for prompt in PROMPTS]

    def load(self, **options: Any) -> Any:
        return load(self.base, adapters={name: str(path) for name, path in self.adapters.items()}, **options)

    def check(self, llm: Any) -> list[Any]:
        """All prompts with all adapters in one batch."""
        asked = [(i, name) for i in range(len(PROMPTS)) for name in NAMES]
        params = [SamplingParams(max_tokens=MAX_TOKENS, adapter=name) for _, name in asked]
        completions: list[Any] = llm.generate([PROMPTS[i] for i, _ in asked], params)
        assert [c.error for c in completions] == [None] * len(asked)
        for (i, name), completion in zip(asked, completions, strict=True):
            assert completion.token_ids == self.expected[name][i], (i, name)
        return completions


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, family_folder: Callable[[str], Path]) -> Callable[[str], Case]:
    known: dict[str, Case] = {}

    def of(family: str) -> Case:
        if family not in known:
            folder, base = tmp_path_factory.mktemp(family), family_folder(family)
            ends = KINDS[family]
            patterns: dict[str, Any] = {
                "rank_pattern": {ends[1][0]: 3},
                "alpha_pattern": {ends[1][-1].rpartition(".")[2]: 5},
            }
            adapters = {
                "a": make_adapter(folder / "a", base, 1, ends[0]),
                "b": make_adapter(folder / "b", base, 2, ends[1], rank=2, use_rslora=True, **patterns),
            }
            known[family] = Case(base, adapters)
        return known[family]

    return of


MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 7": {"max_batched_tokens": 7},
    "original layers": {"fused_layers": False, "attention": "torch"},
}


@pytest.mark.parametrize(
    ("family", "mode"), [*((family, "batched") for family in KINDS), *(("llama", mode) for mode in list(MODES)[1:])]
)
def test_rows_with_adapters_of_their_own(family: str, mode: str, case: Callable[[str], Case]) -> None:
    """Twice, the second time from cached prefixes: each row finds those of its own adapter."""
    this = case(family)
    llm = this.load(**MODES[mode])
    this.check(llm)
    again = this.check(llm)
    assert [c.cached_tokens for c in again] == [(len(p) - 1) // 16 * 16 for p in PROMPTS for _ in NAMES]
    assert_idle(engine_of(llm))


def test_prefixes_are_shared_within_an_adapter_only(case: Callable[[str], Case]) -> None:
    completions = case("llama").check(case("llama").load())
    assert [c.cached_tokens for c in completions[-6:]] == [0, 0, 0, 32, 32, 32]


def test_rows_are_preempted_and_go_on_with_their_adapters(case: Callable[[str], Case]) -> None:
    this = case("llama")
    llm = make_optimistic(this.load(block_size=4, num_blocks=44, max_batched_tokens=9))
    for _ in range(2):
        this.check(llm)
    assert engine_of(llm).scheduler.num_preemptions > 0
    assert_idle(engine_of(llm))


def test_layers_are_fused_beside_adapters(case: Callable[[str], Case]) -> None:
    module = engine_of(case("llama").load()).model.module
    assert all(isinstance(layer, FusedLayer) for layer in module.model.layers)
    assert all(isinstance(layer.qkv, AdaptedLinear) for layer in module.model.layers)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_one_adapter_for_all_rows_is_merged(family: str, name: str, case: Callable[[str], Case]) -> None:
    this = case(family)
    llm = load(this.base, adapter=str(this.adapters[name]))
    completions = llm.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    assert [c.token_ids for c in completions] == this.expected[name]
    assert not any(isinstance(m, AdaptedLinear) for m in engine_of(llm).model.module.modules())


def test_an_adapted_head_leaves_the_embedding_it_is_tied_to(tmp_path: Path) -> None:
    base = make_model("llama", tmp_path / "base", tie_word_embeddings=True)
    ends = {"a": ("lm_head", "q_proj"), "b": ("v_proj",)}
    this = Case(base, {name: make_adapter(tmp_path / name, base, 3, ends[name]) for name in ends})
    this.check(this.load())
    merged_llm = load(base, adapter=str(this.adapters["a"]))
    completions = merged_llm.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    assert [c.token_ids for c in completions] == this.expected["a"]


def test_continuations_are_scored_with_the_adapter(case: Callable[[str], Case]) -> None:
    this = case("llama")
    llm = this.load()
    following = tuple(random_prompt(9, 6))
    requests = [Request(i, SHARED, SamplingParams(adapter=n), continuations=(following,)) for i, n in enumerate(NAMES)]
    completions = llm.generate(requests)
    for name, completion in zip(NAMES, completions, strict=True):
        model = merged(this.base, this.adapters.get(name) if name else None)
        with torch.inference_mode():
            logprobs = model(torch.tensor([[*SHARED, *following]])).logits[0].log_softmax(-1)
        at = torch.arange(len(SHARED) - 1, len(SHARED) + len(following) - 1)
        assert completion.likelihoods is not None
        found = torch.from_numpy(completion.likelihoods[0].logprobs)
        assert torch.allclose(found, logprobs[at, torch.tensor(following)].double(), atol=1e-4)


@needs_exact
def test_adapters_beside_int8_weights(case: Callable[[str], Case]) -> None:
    """The adapter itself is not rounded: the logits move as far from the base model's as they should."""
    this = case("llama")
    llm = this.load(quantization="int8")
    params = [SamplingParams(max_tokens=1, adapter=name, logprobs=200) for name in NAMES]
    found = []
    for completion in llm.generate([PROMPTS[1]] * 3, params):
        assert completion.logprobs is not None
        values = torch.empty(256).fill_(float("nan"))
        values[completion.logprobs.token_ids[0, 1:]] = torch.from_numpy(completion.logprobs.logprobs[0, 1:])
        found.append(values)
    for name, values in zip(NAMES, found, strict=True):
        model = merged(this.base, this.adapters.get(name) if name else None)
        with torch.inference_mode():
            expected = model(torch.tensor([PROMPTS[1]])).logits[0, -1].log_softmax(-1)
        known = ~values.isnan()
        assert (values - expected)[known].norm() < 0.1 * expected[known].norm(), name


def test_an_unknown_adapter_is_an_error_of_the_row(case: Callable[[str], Case]) -> None:
    llm = case("llama").load()
    good, bad = llm.generate([[5, 6]] * 2, [SamplingParams(adapter=name) for name in ("a", "c")])
    assert good.error is None
    assert bad.error_type == "invalid_row"
    assert bad.error == "adapter='c' is not one of model.adapters=['a', 'b']"


def changed(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path)


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gone": (shutil.rmtree, "is not a folder"),
    "no settings": (lambda f: (f / "adapter_config.json").unlink(), r"has no adapter_config\.json"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "cannot be read"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "safe_serialization=True"),
    "cut off": (cut, "is damaged or cut off"),
    "DoRA": (lambda f: changed(f, use_dora=True), "use_dora=True makes it more than plain LoRA: merge"),
    "whole modules": (lambda f: changed(f, modules_to_save=["lm_head"]), r"modules_to_save=\['lm_head'\] makes it"),
    "biases": (lambda f: changed(f, bias="all"), "bias='all' must be none"),
    "another method": (lambda f: changed(f, peft_type="IA3"), "peft_type='IA3' is not LORA"),
    "PiSSA": (lambda f: changed(f, init_lora_weights="pissa"), "init_lora_weights='pissa' trains against"),
    "what is to come": (lambda f: changed(f, use_novelty=True), "use_novelty=True makes it more than plain LoRA"),
    "no rank": (lambda f: changed(f, r=0), "r=0 must be a number above 0"),
    "another rank": (lambda f: changed(f, r=2), r"factors are \[32, 4\] and \[4, 32\] at rank 2"),
    "another tensor": (
        lambda f: renamed(f, lambda name: name.replace("lora_A.weight", "lora_magnitude_vector")),
        "lora_magnitude_vector is no factor of a linear product",
    ),
    "another model": (
        lambda f: renamed(f, lambda name: name.replace("q_proj", "wq")),
        r"changes model\.layers\.0\.self_attn\.wq, and this model has no linear product of that name",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_before_the_weights_load(kind: str, tmp_path: Path, llama: Path) -> None:
    spoil, message = REFUSED[kind]
    spoil(make_adapter(tmp_path / "adapter", llama, 1))
    for settings in ({"adapter": str(tmp_path / "adapter")}, {"adapters": {"x": str(tmp_path / "adapter")}}):
        with pytest.raises(ConfigError, match=message) as caught:
            open_checkpoint(ModelConfig(path=str(llama), **settings), weights=False)
        assert str(caught.value).startswith(("model.adapter", str(tmp_path)))


def test_an_adapter_of_a_model_of_another_size_is_refused(tmp_path: Path, llama: Path) -> None:
    other = make_model("llama", tmp_path / "other", hidden_size=64)
    adapter = make_adapter(tmp_path / "adapter", other, 1, base_model_name_or_path="org/other")
    with pytest.raises(ConfigError, match=r"is \[32, 32\], .* use the model that it was made for, org/other"):
        load(llama, adapter=str(adapter))


def test_one_for_all_rows_and_several_for_single_ones_exclude_each_other(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter=x is for all rows .* set one of them"):
        load(llama, adapter="x", adapters={"a": "x"})

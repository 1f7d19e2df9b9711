"""The engine says what transformers' own generate says, token for token, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.engine.executor import Executor
from batchrun.engine.kv_cache import BlockPool
from batchrun.engine.llm import LLM
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.engine.scheduler import Scheduler
from batchrun.engine.stops import Stops
from batchrun.errors import ConfigError
from tests.engine.families import (
    FAMILIES,
    HARD_FAMILIES,
    assert_idle,
    engine_of,
    generate,
    load,
    make_model,
    make_optimistic,
    random_prompt,
)

MAX_TOKENS = 20
SHARED = random_prompt(0, 50)
# Lengths on both sides of the windows (8) and of the blocks (4, 16, 64), then four rows that begin alike.
PROMPTS = [random_prompt(length, length) for length in (1, 7, 16, 33, 65, 90)]
PROMPTS += [SHARED + random_prompt(100 + i, length) for i, length in enumerate((1, 6, 14, 30))]
LONGEST = max(map(len, PROMPTS)) + MAX_TOKENS

MODES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "batched": {},
    "chunks of 7": {"max_batched_tokens": 7},
    "no prefix caching": {"prefix_caching": False},
    "blocks of 4": {"block_size": 4},
    "blocks of 16": {"block_size": 16},
    "blocks of 64": {"block_size": 64},
    "blocks of 128": {"block_size": 128},
    "three threads": {"num_threads": 3},
    "torch attention, original layers": {"attention": "torch", "fused_layers": False},
    "torch attention, fused layers": {"attention": "torch"},
}

Reference = Callable[[str], list[list[int]]]


@pytest.fixture(scope="session")
def reference(family_folder: Callable[[str], Path]) -> Reference:
    """family -> completion token ids of PROMPTS by `generate`, each prompt alone, eager attention."""
    known: dict[str, list[list[int]]] = {}

    def tokens(family: str) -> list[list[int]]:
        if family not in known:
            model = AutoModelForCausalLM.from_pretrained(
                family_folder(family), dtype=torch.float32, attn_implementation="eager"
            )
            known[family] = [generate(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
        return known[family]

    return tokens


def load_tight(folder: Path, max_batched_tokens: int, longest: int, **options: Any) -> LLM:
    """Pages for little more than one row of `longest` tokens, which where layers have windows are few."""
    llm = load(folder, **{"block_size": 4, "max_batched_tokens": max_batched_tokens, **options})
    engine = engine_of(llm)
    blocks = engine.pool.blocks_for(longest, max_batched_tokens)
    engine.pool = BlockPool(int(1.07 * blocks) + 1, engine.pool.block_size, groups=engine.pool.groups)
    engine.scheduler = Scheduler(engine.pool, engine.scheduler.slots.capacity, max_batched_tokens)
    engine.executor = Executor(engine.model, engine.scheduler.slots, feeds=engine.overlap)
    engine._stops = Stops(engine.scheduler.slots, engine.tokenizer)
    return llm


def token_ids(completions: list[Completion]) -> list[list[int]]:
    assert all(c.error is None for c in completions)
    return [c.token_ids for c in completions]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_generate(family: str, mode: str, family_folder: Callable[[str], Path], reference: Reference) -> None:
    llm = load(family_folder(family), **MODES[mode])
    assert token_ids(llm.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))) == reference(family)
    assert_idle(engine_of(llm))


@pytest.mark.parametrize("family", HARD_FAMILIES)
def test_equals_generate_in_chunks_from_cached_prefixes_and_when_preempted(
    family: str, family_folder: Callable[[str], Path], reference: Reference
) -> None:
    """Everything at once: chunks of 7, shared prefixes, and pages for little more than the longest row."""
    llm = make_optimistic(load_tight(family_folder(family), 7, LONGEST))
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for _ in range(2):
        completions = llm.generate(PROMPTS, params)
        assert token_ids(completions) == reference(family)
    assert sum(c.cached_tokens for c in completions) > 0
    assert engine_of(llm).scheduler.num_preemptions > 0
    assert_idle(engine_of(llm))


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_generate_when_preempted(
    family: str, family_folder: Callable[[str], Path], reference: Reference
) -> None:
    llm = make_optimistic(load_tight(family_folder(family), 16, LONGEST))
    assert token_ids(llm.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))) == reference(family)
    assert engine_of(llm).scheduler.num_preemptions > 0
    assert_idle(engine_of(llm))


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_generate_from_cached_prefixes(
    family: str, family_folder: Callable[[str], Path], reference: Reference
) -> None:
    llm = load(family_folder(family))
    params = SamplingParams(max_tokens=MAX_TOKENS)
    first = llm.generate(PROMPTS, params)
    assert token_ids(first) == reference(family)
    # In one call: the first row that has the prefix computes it, the other three wait a step and share it.
    assert [c.cached_tokens for c in first[-4:]] == [0, 48, 48, 48]
    again = llm.generate(PROMPTS, params)
    assert token_ids(again) == reference(family)
    assert [c.cached_tokens for c in again] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
    assert_idle(engine_of(llm))


@pytest.mark.parametrize(("attention", "block_size"), [("cpu", 4), ("cpu", 16), ("torch", 4)])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mistral"])
def test_a_row_of_thirty_windows_holds_what_its_layers_see(
    family: str, attention: str, block_size: int, family_folder: Callable[[str], Path]
) -> None:
    prompt, window, budget = random_prompt(5, 240), 8, 24
    model = AutoModelForCausalLM.from_pretrained(
        family_folder(family), dtype=torch.float32, attn_implementation="eager"
    )
    expected = generate(model, prompt, MAX_TOKENS)
    llm = load_tight(
        family_folder(family), budget, len(prompt) + MAX_TOKENS, attention=attention, block_size=block_size
    )
    engine = engine_of(llm)
    pool, slots = engine.pool, engine.scheduler.slots
    engine.add(Request(0, prompt, SamplingParams(max_tokens=MAX_TOKENS)))
    for _ in range(-(-len(prompt) // budget) + len(expected) - 2):
        computed = int(slots.num_computed[0])
        assert engine.step() == []
        now = int(slots.num_computed[0])
        assert pool.num_blocks - pool.num_free <= pool.blocks_for(now, query_len=now - computed)
        assert slots.num_given_back[-1, 0] == max(0, computed - window + 1) // block_size
        engine.check_integrity()
    assert token_ids(engine.step()) == [expected]
    assert_idle(engine)


FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 4.0, 8.0]}
SCALED: dict[str, tuple[str, dict[str, Any], int]] = {
    "yarn": ("llama", {"factor": 4.0}, 512),
    "dynamic": ("llama", {"factor": 4.0}, 64),
    "longrope": ("phi3", {"factor": 4.0, **FACTORS}, 64),
}


@pytest.mark.parametrize("scaling", SCALED)
def test_equals_generate_with_scaled_rotary_embeddings(scaling: str, tmp_path: Path) -> None:
    """Within the length up to which the scaling does not depend on the longest row of the batch."""
    family, settings, limit = SCALED[scaling]
    original = {"original_max_position_embeddings": 64}
    rope = {"rope_type": scaling, "rope_theta": 10000.0, **original, **settings}
    make_model(family, tmp_path, rope_parameters=rope, **original)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    llm = load(tmp_path, max_batched_tokens=32)
    assert llm.checkpoint.max_model_len == limit
    prompts = [prompt for prompt in PROMPTS if len(prompt) + MAX_TOKENS <= limit]
    *completions, refused = llm.generate([*prompts, random_prompt(0, limit + 1)], SamplingParams(max_tokens=MAX_TOKENS))
    assert token_ids(completions) == [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    assert refused.finish_reason == "error"


def test_refuses_pickled_weights_unless_allowed(tmp_path: Path, reference: Reference) -> None:
    make_model("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors weights.*model\.allow_pickle=true"):
        load(tmp_path)
    llm = load(tmp_path, allow_pickle=True)
    assert token_ids(llm.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))) == reference("llama")

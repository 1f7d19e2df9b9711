"""KV of preempted rows in host memory: the same tokens, and nothing lost or left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchrun.engine import host_pages
from batchrun.engine.host_pages import GIB, HostPages, active_parameters, make_swap
from batchrun.engine.llm import LLM
from batchrun.engine.params import Request, SamplingParams
from batchrun.engine.swap import SwapSpace, swap_pays
from batchrun.errors import ConfigError
from tests.engine.families import assert_idle, build_model, engine_of, load, make_optimistic
from tests.engine.test_oracle import LONGEST, MAX_TOKENS, PROMPTS, Reference, load_tight, reference, token_ids

__all__ = ["reference"]


@pytest.fixture
def tight(family_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LLM]:
    """An engine that must preempt and finds that moving KV pays."""
    monkeypatch.setattr(host_pages, "swap_pays", lambda *given: True)

    def build(family: str) -> LLM:
        llm = make_optimistic(load_tight(family_folder(family), 12, LONGEST, attention="torch"))
        engine = engine_of(llm)
        engine.scheduler.swap = make_swap(0.01, engine.model, engine.pool)
        return llm

    return build


def swap_of(llm: LLM) -> SwapSpace:
    swap = engine_of(llm).scheduler.swap
    assert swap is not None
    return swap


# Pages of two shapes; Dk apart from Dv.
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_equals_generate(family: str, tight: Callable[[str], LLM], reference: Reference) -> None:
    llm = tight(family)
    engine, params = engine_of(llm), SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    for key, prompt in enumerate(PROMPTS):
        engine.add(Request(key, prompt, params))
    done = []
    while engine.has_work():
        done += engine.step()
        engine.check_integrity()
    assert token_ids(sorted(done, key=lambda completion: int(str(completion.key)))) == reference(family)
    assert swap_of(llm).num_restored > 0
    assert_idle(engine)


def test_aborted_rows_leave_nothing(tight: Callable[[str], LLM]) -> None:
    llm = tight("llama")
    engine, swap = engine_of(llm), swap_of(llm)
    for key, prompt in enumerate(PROMPTS):
        engine.add(Request(key, prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)))
    while not swap._kept:
        engine.step()
    for key in range(len(PROMPTS)):
        engine.abort(key)
    engine.check_integrity()
    assert len(swap._free) == swap.capacity
    assert_idle(engine)


def test_pages_come_back_as_they_were() -> None:
    pages = [torch.randn(30, 4, 2, 3), torch.randn(30, 4, 2, 5).bfloat16()]
    before = [page.clone() for page in pages]
    host, blocks, places = HostPages(pages, 40), list(range(3, 24)), list(range(30, 9, -1))
    host.move_out(blocks, places)
    for page in pages:
        page[3:24] = torch.nan
    host.move_in(places, blocks)
    assert all(torch.equal(page, old) for page, old in zip(pages, before, strict=True))


def test_moving_pays_for_large_models_only() -> None:
    per_token = 2 * 32 * 8 * 128 * 2
    assert swap_pays(1000, 1000 * per_token, 8_000_000_000)
    assert not swap_pays(1000, 1000 * per_token, 600_000_000)


def test_counts_the_experts_that_a_token_uses() -> None:
    few, many = (
        active_parameters(build_model("qwen3_moe", num_experts=count, num_local_experts=count)) for count in (4, 8)
    )
    assert many - few == 3 * 4 * 32  # the routers of three layers


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"attention": "cpu"}, "is for attention on a GPU: set engine.swap_space=0"),
        ("mistral", {"attention": "torch"}, "layers with a sliding window"),
        ("llama", {"attention": "torch", "swap_space": 1e6}, "is more than the .* GiB of memory that are free"),
    ],
)
def test_refuses_what_it_cannot_move(
    family: str, options: dict[str, Any], message: str, family_folder: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(family_folder(family), **{"swap_space": 100 / GIB, **options})

"""A real chat model on real reviews: greedy completions equal those of transformers, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.engine.llm import LLM
from batchrun.engine.params import Completion, SamplingParams
from tests.engine.families import assert_idle, engine_of

ROWS = 64
MAX_TOKENS = 12
NEAR_TIE = 1e-4  # logits: float32 rounding may choose either of two tokens that are closer
INSTRUCTION = (
    "You label product reviews. Answer with the label and one short reason.\n"
    "Review: The battery lasts two days and it charges fast.\nLabel: positive, because the battery is praised.\n"
    "Review: It broke after a week and nobody answered my letters.\nLabel: negative, because it broke.\n"
    "Review: It is a cable. It is black.\nLabel: neutral, because nothing is judged."
)


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    return LLM(str(smollm2), dtype="float32", device="cpu", offline=True, kv_cache_gib=0.75)


@pytest.fixture(scope="module")
def prompts(llm: LLM, reviews: Path) -> list[list[int]]:
    """Chat prompts of 64 reviews; the first half begins with one instruction and its examples."""
    texts = pq.read_table(reviews, columns=["text"])["text"].to_pylist()[:: 3708 // ROWS][:ROWS]
    chats = [[{"role": "user", "content": f"Does this customer like the product? {text[:200]}"}] for text in texts]
    for chat in chats[: ROWS // 2]:
        chat.insert(0, {"role": "system", "content": INSTRUCTION})
    return [llm.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


@pytest.fixture(scope="module")
def completions(llm: LLM, prompts: list[list[int]]) -> list[Completion]:
    done = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    assert_idle(engine_of(llm))
    return done


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.slow
@torch.inference_mode()
def test_every_token_is_the_choice_of_the_reference(
    prompts: list[list[int]], completions: list[Completion], reference: Any
) -> None:
    """One pass over prompt and completion gives the choice after each token. If the completion follows them
    all, then greedy decoding, which feeds the same tokens back, cannot have said anything else."""
    near_ties = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        said = torch.tensor(completion.token_ids)
        logits = reference(torch.tensor([prompt + completion.token_ids[:-1]]), logits_to_keep=len(said)).logits[0]
        for step in (logits.argmax(dim=-1) != said).nonzero().flatten().tolist()[:1]:
            gap = float(logits[step].max() - logits[step, said[step]])
            assert gap < NEAR_TIE, f"row {completion.key} leaves the reference at token {step} by {gap}"
            near_ties += 1
    assert near_ties <= 1


@pytest.mark.slow
@torch.inference_mode()
def test_equals_generate(prompts: list[list[int]], completions: list[Completion], reference: Any) -> None:
    for row in (0, 31, 32, 63):
        out = reference.generate(torch.tensor([prompts[row]]), max_new_tokens=MAX_TOKENS, do_sample=False)
        assert completions[row].token_ids == out[0, len(prompts[row]) :].tolist()


@pytest.mark.slow
def test_the_instruction_is_computed_once(completions: list[Completion]) -> None:
    shared = [completion.cached_tokens for completion in completions[: ROWS // 2]]
    assert shared[0] == 0
    assert min(shared[1:]) >= 96


@pytest.mark.slow
def test_completions_are_whole(completions: list[Completion], llm: LLM) -> None:
    (end,) = (token for token in engine_of(llm).eos_ids if llm.tokenizer.decode([token]) == "<|im_end|>")
    for completion in completions:
        ended = completion.token_ids[-1] == end
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids) == MAX_TOKENS
        assert "<|" not in completion.text
    assert len({completion.text for completion in completions}) > ROWS // 2

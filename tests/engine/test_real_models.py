"""Two real models on real texts, against transformers in float32: what they say, and how likely they find a text.

SmolLM2 is all full attention; Gemma 3 has a window of 512 tokens on most layers and 262,144 words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from batchrun.engine.attention.cpu import CpuAttention
from batchrun.engine.batch import Batch, make_batch
from batchrun.engine.llm import LLM
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.engine.sequence import Sequence
from batchrun.engine.slots import Slots
from batchrun.engine.structure import StructuredOutputs
from tests.engine.families import assert_idle, engine_of

NEAR_TIE = 1e-4  # logits: float32 rounding may choose either of two tokens that are closer
ROWS = 64
EXAMPLES = (
    "Review: The battery lasts two days and it charges fast. Label: positive\n"
    "Review: It broke after a week and nobody answered my letters. Label: negative\n"
    "Review: It is a cable. It is black. Label: neutral\n"
)
TEXT_TOKENS = 640  # more than Gemma's window
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def texts(reviews: Path) -> list[str]:
    return [str(text) for text in pq.read_table(reviews, columns=["text"])["text"].to_pylist()]


@pytest.fixture(scope="module")
def gemma_llm(gemma: Path) -> LLM:
    return LLM(str(gemma), dtype="float32", device="cpu", offline=True, kv_cache_gib=0.75)


@pytest.fixture(scope="module")
def gemma_reference(gemma: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def prompts(gemma_llm: LLM, texts: list[str]) -> list[list[int]]:
    """64 reviews to label, two of them after more text than the window holds."""
    rows = [f"{EXAMPLES}Review: {text[:80]} Label:" for text in texts[:: len(texts) // ROWS][:ROWS]]
    rows[-2:] = [" ".join(texts[start : start + 40]) + rows[start] for start in (0, 40)]
    prompts = [gemma_llm.tokenizer(row)["input_ids"] for row in rows]
    assert max(map(len, prompts)) > 512
    return prompts


@pytest.fixture(scope="module")
def completions(gemma_llm: LLM, prompts: list[list[int]]) -> list[Completion]:
    done = gemma_llm.generate(prompts, SamplingParams(max_tokens=8))
    assert_idle(engine_of(gemma_llm))
    return done


@pytest.mark.slow
@torch.inference_mode()
def test_every_token_of_gemma_is_the_choice_of_the_reference(
    prompts: list[list[int]], completions: list[Completion], gemma_reference: Any
) -> None:
    """One pass over prompt and completion gives the choice after each token: see test_smollm2.py."""
    near_ties = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        said = torch.tensor(completion.token_ids)
        logits = gemma_reference(torch.tensor([prompt + completion.token_ids[:-1]]), logits_to_keep=len(said)).logits[0]
        for step in (logits.argmax(dim=-1) != said).nonzero().flatten().tolist()[:1]:
            gap = float(logits[step].max() - logits[step, said[step]])
            assert gap < NEAR_TIE, f"row {completion.key} leaves the reference at token {step} by {gap}"
            near_ties += 1
    assert near_ties <= 1
    assert len({completion.text for completion in completions}) > 1


@pytest.mark.slow
@torch.inference_mode()
def test_gemma_equals_generate(prompts: list[list[int]], completions: list[Completion], gemma_reference: Any) -> None:
    for row in (0, 31, 63):
        out = gemma_reference.generate(torch.tensor([prompts[row]]), max_new_tokens=8, do_sample=False)
        assert completions[row].token_ids == out[0, len(prompts[row]) :].tolist()


@dataclass(slots=True)
class EveryToken(Batch):
    """A batch that asks for logits at each of its tokens."""

    @property
    def logits_index(self) -> np.ndarray:
        return np.arange(self.num_tokens)


@torch.inference_mode()
def paged_losses(llm: LLM, documents: list[list[int]], chunk: int) -> list[float]:
    """Mean loss of each document, its logits computed through pages in chunks of `chunk` tokens."""
    model = engine_of(llm).model
    own, per_row = model.backend, -(-TEXT_TOKENS // BLOCK_SIZE)
    groups, tables = model.kv_layout.groups, model.kv_layout.num_tables
    blocks = np.arange(per_row * len(documents) * tables).reshape(len(documents), tables, per_row)
    model.backend = CpuAttention(model.layers, blocks.size, BLOCK_SIZE, model.dtype, model.device)
    slots = Slots(len(documents), BLOCK_SIZE, groups)
    rows = np.array([
        slots.put(
            Sequence(Request(i, ids), 0, np.array(ids, dtype=np.int32), len(ids), len(ids) + 1, [], 0.0),
            blocks[i].tolist(),
            0,
        )
        for i, ids in enumerate(documents)
    ])  # fmt: skip
    losses: list[list[float]] = [[] for _ in documents]
    for start in range(0, TEXT_TOKENS, chunk):
        batch = make_batch(slots, rows, np.full(len(rows), min(chunk, TEXT_TOKENS - start)))
        logits = model.forward(EveryToken(**{f.name: getattr(batch, f.name) for f in fields(batch)})).float()
        for i, part in enumerate(logits.chunk(len(rows))):
            following = torch.tensor(documents[i][start + 1 : start + len(part) + 1])
            losses[i] += F.cross_entropy(part[: len(following)], following, reduction="none").tolist()
        slots.num_computed[batch.slots] = batch.seq_lens
    model.backend = own
    return [float(np.mean(row)) for row in losses]


@torch.inference_mode()
def eager_losses(reference: Any, documents: list[list[int]]) -> Iterator[float]:
    for ids in map(torch.tensor, documents):
        yield float(F.cross_entropy(reference(ids[None], use_cache=False).logits[0, :-1], ids[1:]))


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> tuple[LLM, Any]:
    """A model here and in transformers."""
    if request.param == "gemma":
        return request.getfixturevalue("gemma_llm"), request.getfixturevalue("gemma_reference")
    folder = request.getfixturevalue(request.param)
    llm = LLM(str(folder), dtype="float32", device="cpu", offline=True, kv_cache_gib=0.25)
    return llm, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["smollm2", "gemma"], indirect=True)
def test_perplexities_equal(pair: tuple[LLM, Any], texts: list[str]) -> None:
    llm, reference = pair
    tokens = llm.tokenizer(" ".join(texts[:80]))["input_ids"]
    documents = [tokens[start : start + TEXT_TOKENS] for start in (0, TEXT_TOKENS)]
    ours, theirs = (np.exp(list(x)) for x in (paged_losses(llm, documents, 96), eager_losses(reference, documents)))
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert 5 < theirs.max() < 200  # a model that reads English


FORM = StructuredOutputs(
    json={
        "type": "object",
        "properties": {
            "product": {"type": ["string", "null"], "maxLength": 12},
            "mood": {"enum": ["très bon", "日本語", "schlecht 🐈"]},
            "scores": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 5}, "maxItems": 3},
        },
        "required": ["product", "mood", "scores"],
        "additionalProperties": False,
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_completions_have_their_form(model: str, texts: list[str], request: pytest.FixtureRequest) -> None:
    """Tokens of bytes and tokens of SentencePiece, whose tokenizer has a word more than the model has logits."""
    if model == "gemma":
        llm = request.getfixturevalue("gemma_llm")
    else:
        folder = request.getfixturevalue(model)
        llm = LLM(str(folder), dtype="float32", device="cpu", offline=True, kv_cache_gib=0.25)
    prompts = [f"As JSON with product, mood and scores: {text[:60]}\n" for text in texts[:4]]
    params = [SamplingParams(max_tokens=90, temperature=heat, seed=7, structured_outputs=FORM) for heat in (0.0, 1.0)]
    completions = [done for asked in params for done in llm.generate(prompts, asked)]
    assert_idle(engine_of(llm))
    for done in completions:
        assert (done.finish_reason, done.error) == ("stop", None)
        jsonschema.validate(json.loads(done.text), json.loads(str(FORM.json)))
    steps = engine_of(llm).take_steps()
    assert len(steps) < max(len(done.token_ids) for done in completions) * 2

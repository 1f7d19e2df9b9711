"""Penalties, biases and masks: against transformers' processors, and in the engine against `generate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from batchrun.engine.logits import edit_logits, mark_without_choice
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.engine.sequence import Sequence
from batchrun.engine.slots import Slots
from batchrun.engine.structure import StructuredOutputs
from batchrun.engine.token_rules import RuleBook
from tests.engine.families import VOCABULARY, assert_idle, engine_of, load, make_optimistic, random_prompt
from tests.engine.speller import make_speller

EOS = 1
PROMPT = [5, 9, 9, 30]


class Words:
    """A tokenizer that knows `w7` as token 7, `W7` as 100 + 7 at the start of a text, and nothing else."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        ids = [100 * (word[0] == "W") + int(word[1:]) for word in text.split()]
        return {"input_ids": [token + 50 * text.startswith(" ") for token in ids]}


def slots_with(rows: list[tuple[list[int], SamplingParams]]) -> Slots:
    """Slots 0 … n - 1, each with PROMPT and what it has generated since."""
    book = RuleBook(Words(), VOCABULARY, np.array([EOS]))
    slots = Slots(len(rows), 16)
    for generated, params in rows:
        ids = np.array(PROMPT + generated, dtype=np.int32)
        sequence = Sequence(Request(0, PROMPT, params), 0, ids, len(PROMPT), 100, [], time.perf_counter())
        sequence.rules = book.of(params)
        slots.put(sequence, [[]], 0)
    return slots


def edited(rows: list[tuple[list[int], SamplingParams]], logits: torch.Tensor) -> torch.Tensor:
    """The logits after the edits, with the rows in the order of their slots."""
    changed = logits.clone()
    slots = slots_with(rows)
    order = [slots.order[i] for i in range(len(rows))]
    edit_logits(changed, slots, np.array(order))
    return changed


def random_logits(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))


def each_alone_and_together(
    rows: list[tuple[list[int], SamplingParams]], expected: list[torch.Tensor], logits: torch.Tensor
) -> None:
    together = edited(rows, logits)
    for i, row in enumerate(rows):
        torch.testing.assert_close(together[i], expected[i], rtol=0, atol=0)
        torch.testing.assert_close(edited([row], logits[i : i + 1])[0], expected[i], rtol=0, atol=0)


def test_repetition_penalty() -> None:
    rows = [([7, 9, 7], 1.3), ([], 0.8), ([50] * 20, 2.0), ([1, 2], 1.0)]
    logits = random_logits(len(rows))
    expected = [
        RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + generated]), logits[i : i + 1])[0]
        for i, (generated, penalty) in enumerate(rows)
    ]
    each_alone_and_together(
        [(generated, SamplingParams(repetition_penalty=penalty)) for generated, penalty in rows], expected, logits
    )


def test_presence_and_frequency_penalty() -> None:
    rows = [([7, 9, 7], 0.5, 0.0), ([], 1.0, 1.0), ([50] * 20 + [7], 0.0, 0.25), ([3, 3, 4], -0.5, 1.5)]
    logits = random_logits(len(rows))
    expected = logits.clone()
    for i, (generated, presence, frequency) in enumerate(rows):
        for token in set(generated):
            expected[i, token] -= torch.tensor(presence + frequency * generated.count(token))
    params = [SamplingParams(presence_penalty=p, frequency_penalty=f) for _, p, f in rows]
    each_alone_and_together([(row[0], own) for row, own in zip(rows, params, strict=True)], list(expected), logits)


def test_logit_bias() -> None:
    logits = random_logits(2)
    bias: Any = {12: 4.0, "w7": -3.5, "200": 100}
    processor = SequenceBiasLogitsProcessor({(12,): 4.0, (7,): -3.5, (200,): 100.0})
    expected = [processor(torch.tensor([PROMPT]), logits[:1])[0], logits[1]]
    params = SamplingParams(logit_bias=bias)
    each_alone_and_together([([], params), ([], SamplingParams())], expected, logits)


def test_allowed_token_ids() -> None:
    logits = random_logits(3)
    expected = logits.clone()
    for row, allowed in ((0, [4, 9, 4]), (2, [0])):
        outside = [token for token in range(VOCABULARY) if token not in allowed]
        expected[row, outside] = -torch.inf
    rows = [SamplingParams(allowed_token_ids=(4, 9, 4)), SamplingParams(), SamplingParams(allowed_token_ids=(0,))]
    each_alone_and_together([([], params) for params in rows], list(expected), logits)


def test_bad_words() -> None:
    words = ("w7", "w3 w4 w5", "W3 W4")
    ids = [[7], [57], [3, 4, 5], [53, 54, 55], [103, 104], [153, 154]]  # as they are, and after a space
    rows = [[], [3], [3, 4], [9, 3, 4], [53, 54], [103], [153], [3, 54]]
    logits = random_logits(len(rows))
    processor = NoBadWordsLogitsProcessor(ids, eos_token_id=[EOS])
    before = [9] * 3  # some releases see no word in a text that is shorter than the word
    expected = [
        processor(torch.tensor([before + generated], dtype=torch.int64), logits[i : i + 1].clone())[0]
        for i, generated in enumerate(rows)
    ]
    assert [int(row.isinf().sum()) for row in expected] == [2, 2, 3, 3, 3, 3, 3, 2]
    each_alone_and_together([(row, SamplingParams(bad_words=words)) for row in rows], expected, logits)


def test_rows_of_a_few_sets_of_rules() -> None:
    """In turns, with rows without any among them: what each gets alone."""
    bias: Any = {12: 4.0, 30: -1.0}
    sets = (
        SamplingParams(bad_words=("w3 w4 w5", "w4 w9", "w7"), min_tokens=3),
        SamplingParams(),
        SamplingParams(bad_words=("w5 w4 w9 w3 w8",), logit_bias=bias),
        SamplingParams(allowed_token_ids=tuple(range(60)), min_tokens=2, logit_bias=bias),
    )
    tails: tuple[list[int], ...] = ([3, 4], [4], [5, 4, 9, 3], [], [9, 4], [3])
    rows = [(tails[i // len(sets)], sets[i % len(sets)]) for i in range(len(tails) * len(sets))]
    logits = random_logits(len(rows))
    each_alone_and_together(rows, [edited([row], logits[i : i + 1])[0] for i, row in enumerate(rows)], logits)
    assert len({str(row.isinf().nonzero().tolist()) for row in edited(rows, logits)}) >= 8


def test_words_of_the_prompt_do_not_begin_a_bad_word() -> None:
    logits = random_logits(1)
    changed = edited([([], SamplingParams(bad_words=("w30 w7",)))], logits)
    assert torch.equal(changed, logits)


def test_min_tokens() -> None:
    rows = [([], 1), ([4], 1), ([4, 4], 3), ([4] * 3, 3)]
    logits = random_logits(len(rows))
    expected = [
        MinNewTokensLengthLogitsProcessor(len(PROMPT), least, [EOS, 40])(
            torch.tensor([PROMPT + generated]), logits[i : i + 1].clone()
        )[0]
        for i, (generated, least) in enumerate(rows)
    ]
    assert [int(row.isinf().sum()) for row in expected] == [2, 0, 2, 0]
    params = [SamplingParams(min_tokens=least, stop_token_ids=(40,)) for _, least in rows]
    each_alone_and_together([(row[0], own) for row, own in zip(rows, params, strict=True)], expected, logits)
    [free] = edited([([], SamplingParams(min_tokens=1, ignore_eos=True))], logits[:1])
    assert torch.equal(free, logits[0]), "with ignore_eos it ends no row"


def test_all_at_once_are_in_the_order_that_is_documented() -> None:
    """The bias comes after the penalty that divides, and an allowed token stays out if it is bad."""
    logits = random_logits(1).abs()
    bias: Any = {9: 5, 8: 1}
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5,
        logit_bias=bias, allowed_token_ids=(EOS, 7, 8, 9), bad_words=("w7",), min_tokens=9,
    )  # fmt: skip
    [changed] = edited([([9, 9], params)], logits)
    assert changed.isfinite().nonzero()[:, 0].tolist() == [8, 9]
    assert changed[9] == logits[0, 9] / 2 - 2.5 + 5
    assert changed[8] == logits[0, 8] + 1


def test_rows_that_ask_for_nothing_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_with([([4], SamplingParams()), ([4], SamplingParams(temperature=1.0, top_k=3, min_p=0.1))])
    monkeypatch.setattr(torch, "from_numpy", None)
    assert len(edit_logits(random_logits(2), slots, np.array([0, 1]))) == 0


def test_a_row_without_a_possible_token_is_named() -> None:
    params = [SamplingParams(allowed_token_ids=(7, EOS), bad_words=("w7",), min_tokens=n) for n in (0, 2)]
    slots = slots_with([([], SamplingParams()), ([], params[0]), ([], params[1]), ([4, 4], params[1])])
    logits = random_logits(4)
    edited = edit_logits(logits, slots, np.arange(4))
    assert edited.tolist() == [1, 2, 3]
    tokens = logits.argmax(dim=-1)
    mark_without_choice(logits, edited, tokens)
    assert np.flatnonzero(tokens < 0).tolist() == [2]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {VOCABULARY: 1}}, "logit_bias: token 256 .* 0 to 255"),
        ({"logit_bias": {"w1 w2": 1}}, r"'w1 w2' is 2 tokens, \[1, 2\]"),
        ({"logit_bias": {"w7": 1, 7: 2}}, "names token 7 twice"),
        ({"allowed_token_ids": (3, VOCABULARY)}, "allowed_token_ids: token 256"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids: token -1"),
        ({"stop_token_ids": (5, VOCABULARY)}, "stop_token_ids: token 256"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids: token -1"),
        ({"bad_words": ("w300",)}, "bad_words: token 3"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RuleBook(Words(), VOCABULARY, np.array([EOS])).of(SamplingParams(**params))


def test_equal_rules_are_read_once() -> None:
    book = RuleBook(Words(), VOCABULARY, np.array([EOS]))
    first = book.of(SamplingParams(bad_words=("w1",), temperature=1.0, seed=1))
    assert first is not None
    assert first is book.of(SamplingParams(bad_words=("w1",), stop_token_ids=(4,)))
    assert book.of(SamplingParams(repetition_penalty=2.0)) is None


# In the engine.

MAX_TOKENS = 16
COMPANY: list[dict[str, Any]] = [{}, {"max_num_seqs": 3, "max_batched_tokens": 9}, {"block_size": 4, "num_blocks": 20}]


PROMPTS = [random_prompt(70 + i, 5 + 4 * i) for i in range(3)]

# prompt, parameters, what `generate` answers
Answer = tuple[list[int], SamplingParams, list[int]]


@pytest.fixture(scope="module")
def reference(llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def answers(llama: Path, reference: Any) -> list[Answer]:
    tokenizer = load(llama).tokenizer
    found = []
    for prompt in PROMPTS:
        free = generate(reference, prompt, eos_token_id=[])
        words, ends = [[free[2]], free[5:8], free[9:11]], [EOS, free[3]]
        texts = tuple(tokenizer.decode(ids) for ids in words)
        several = {"repetition_penalty": 1.2, "bad_words_ids": words, "min_new_tokens": 12}
        kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({}, {}),
            ({"repetition_penalty": 0.9}, {"repetition_penalty": 0.9}),
            ({"bad_words": texts}, {"bad_words_ids": words}),
            ({"min_tokens": 8, "stop_token_ids": tuple(ends)}, {"min_new_tokens": 8, "eos_token_id": ends}),
            ({"repetition_penalty": 1.2, "bad_words": texts, "min_tokens": 12}, several),
        ]
        for params, options in kinds:
            answer = generate(reference, prompt, **options)
            found.append((prompt, SamplingParams(max_tokens=MAX_TOKENS, **params), answer))
    assert len({tuple(answer) for _, _, answer in found}) > len(found) * 2 / 3, "the parameters change something"
    return found


@torch.inference_mode()
def generate(reference: Any, prompt: list[int], **options: Any) -> list[int]:
    out = reference.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("company", COMPANY, ids=str)
def test_greedy_rows_equal_generate(company: dict[str, Any], llama: Path, answers: list[Answer]) -> None:
    """Rows of each kind in one batch, in chunks, and preempted."""
    llm = load(llama, **company)
    if "num_blocks" in company:
        make_optimistic(llm)
    done = llm.generate([prompt for prompt, _, _ in answers], [params for _, params, _ in answers])
    assert [c.token_ids for c in done] == [answer for _, _, answer in answers]
    assert (engine_of(llm).scheduler.num_preemptions > 0) == ("num_blocks" in company)
    assert_idle(engine_of(llm))


MIX: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20, "presence_penalty": 1.0},
    {"temperature": 0.9, "top_p": 0.8, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    {"temperature": 1.5, "min_p": 0.05, "logit_bias": {40: 5.0}, "min_tokens": 10},
    {"temperature": 1.0, "bad_words": ("w20 w21", "w22"), "logprobs": 2},
    {"temperature": 2.0, "allowed_token_ids": tuple(range(60, 90))},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "stop": ("w33",), "min_tokens": 3},
]


def say(llm: Any, requests: list[Request]) -> dict[Any, Completion]:
    done = {c.key: c for c in llm.stream(requests)}
    assert_idle(engine_of(llm))
    return done


def test_a_row_says_the_same_alone_in_any_batch_in_any_order_and_after_preemption(llama: Path) -> None:
    requests = [
        Request(i, random_prompt(i // 4, 8 + i // 4), SamplingParams(max_tokens=12, seed=i, **MIX[i % len(MIX)]))
        for i in range(16)
    ]
    expected = say(load(llama), requests)
    assert len({completion.text for completion in expected.values()}) == 16
    alone = load(llama, prefix_caching=False)
    companies: list[Any] = [say(alone, [request]) for request in requests]
    tight = make_optimistic(load(llama, block_size=4, num_blocks=16))
    shuffled = [requests[i] for i in np.random.default_rng(2).permutation(16)]
    companies += [say(tight, shuffled), say(load(llama, max_num_seqs=3, max_batched_tokens=9), shuffled)]
    assert engine_of(tight).scheduler.num_preemptions > 0
    for company in companies:
        for key, completion in company.items():
            assert (completion.text, completion.token_ids) == (expected[key].text, expected[key].token_ids)


def test_a_row_without_a_possible_token_is_an_error_row(llama: Path) -> None:
    llm = load(llama)
    free = SamplingParams(max_tokens=6, ignore_eos=True)
    rules: dict[str, Any] = {"allowed_token_ids": (20, 21), "bad_words": ("w20 w21", "w20 w20", "w21")}
    impossible = [SamplingParams(max_tokens=6, **rules), SamplingParams(max_tokens=6, temperature=1.0, **rules)]
    before, *refused, after = llm.generate([[5, 6]] * 4, [free, *impossible, free])
    for stuck in refused:
        assert (stuck.finish_reason, stuck.error_type, stuck.token_ids) == ("error", "constraint_error", [])
        assert stuck.error is not None
        assert "no token is possible after 1:" in stuck.error
    assert before.token_ids == after.token_ids
    assert len(after.token_ids) == 6
    assert_idle(engine_of(llm))


def test_a_request_with_tokens_of_another_model_is_an_error_row(llama: Path) -> None:
    llm = load(llama)
    other = SamplingParams(max_tokens=6, allowed_token_ids=(VOCABULARY,))
    refused, fine = llm.generate([[5, 6]] * 2, [other, SamplingParams(max_tokens=6, ignore_eos=True)])
    assert (refused.finish_reason, refused.error_type) == ("error", "invalid_row")
    assert refused.error is not None
    assert "allowed_token_ids: token 256" in refused.error
    assert len(fine.token_ids) == 6


def test_stop_strings_do_not_count_before_min_tokens(llama: Path) -> None:
    llm = load(llama)
    prompt = random_prompt(5, 9)
    varied: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 3.0, "seed": 1}
    free = llm.generate([prompt], SamplingParams(**varied))[0]
    words = free.text.split()
    assert len(set(words)) == len(words) == 20
    stop = tuple(word for word in words if word != words[8])
    early, late = llm.generate([prompt] * 2, [SamplingParams(**varied, stop=stop, min_tokens=n) for n in (0, 8)])
    assert (early.text, len(early.token_ids)) == ("", 1)
    assert late.token_ids == free.token_ids[: len(late.token_ids)]
    assert late.stop_reason == words[9]
    assert late.text == " ".join(words[:9]) + " "


def test_what_ended_a_row_can_be_left_in_its_text(llama: Path) -> None:
    llm = load(llama)
    prompt = random_prompt(5, 9)
    varied: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 3.0, "seed": 1}
    free = llm.generate([prompt], SamplingParams(**varied))[0]
    words = free.text.split()
    common = {**varied, "include_stop_str_in_output": True}
    by_text, by_token = llm.generate(
        [prompt] * 2,
        [
            SamplingParams(**common, stop=(f"{words[4]} {words[5][:2]}",)),
            SamplingParams(**common, stop_token_ids=(free.token_ids[5],)),
        ],
    )
    assert by_text.text == " ".join(words[:5]) + " " + words[5][:2]
    assert by_token.text == " ".join(words[:6])


# Log-probabilities.


def test_logprobs_are_those_of_the_models_own_logits(llama: Path, reference: Any) -> None:
    """With preemption, beside rows that ask for others or none, and not touched by penalties or temperature."""
    params = [
        SamplingParams(max_tokens=15, ignore_eos=True, logprobs=3),
        SamplingParams(max_tokens=15, ignore_eos=True, logprobs=0, temperature=1.5, seed=3, repetition_penalty=1.5),
        SamplingParams(max_tokens=15, ignore_eos=True),
        SamplingParams(max_tokens=15, ignore_eos=True, logprobs=1000, temperature=0.7, top_k=5, seed=4),
    ] * 2
    prompts = [random_prompt(i, 7 + i) for i in range(8)]
    llm = make_optimistic(load(llama, block_size=4, num_blocks=16))
    done = llm.generate(prompts, params)
    assert engine_of(llm).scheduler.num_preemptions > 0
    for prompt, own, completion in zip(prompts, params, done, strict=True):
        if own.logprobs is None:
            assert completion.logprobs is None
            continue
        assert completion.logprobs is not None
        ids, values = completion.logprobs
        width = min(own.logprobs, VOCABULARY)
        assert ids.shape == values.shape == (15, width + 1)
        assert (ids.dtype, values.dtype) == (np.dtype(np.int32), np.dtype(np.float32))
        assert ids[:, 0].tolist() == completion.token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + completion.token_ids])).logits[0]
        expected = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
        torch.testing.assert_close(torch.from_numpy(values), expected.gather(1, torch.from_numpy(ids).long()))
        torch.testing.assert_close(torch.from_numpy(values[:, 1:]), expected.topk(width).values)
    assert_idle(engine_of(llm))


def test_tokens_that_a_form_forces_have_logprobs_and_obey_the_rules(tmp_path: Path) -> None:
    llm = load(make_speller(tmp_path / "speller"))
    form = StructuredOutputs(choice=("a cat", "a dog"))
    forbidden = SamplingParams(max_tokens=20, structured_outputs=form, bad_words=("a",))
    free, told, refused = llm.generate(
        ["x"] * 3,
        [
            SamplingParams(max_tokens=20, structured_outputs=form),
            SamplingParams(max_tokens=20, structured_outputs=form, logprobs=1),
            forbidden,
        ],
    )
    assert (told.text, told.token_ids) == (free.text, free.token_ids)
    assert told.logprobs is not None
    assert told.logprobs.token_ids[:, 0].tolist() == told.token_ids
    assert (told.logprobs.logprobs <= 0).all()
    assert refused.error_type == "constraint_error"

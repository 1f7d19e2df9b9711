"""Thinking is told from the answer for every kind of marker, bounded, and never mixed with it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from batchrun.engine.executor import Drawn
from batchrun.engine.llm import LLM
from batchrun.engine.params import Completion, SamplingParams
from batchrun.engine.reasoning import KNOWN, Reasoning, known_markers
from batchrun.engine.structure import StructuredOutputs
from tests.engine.families import assert_idle, engine_of, load, make_model
from tests.engine.test_detokenizer import byte_level

THINK = Reasoning("<think>", "</think>")
MAGISTRAL = Reasoning("[THINK]", "[/THINK]")
HARMONY = Reasoning("<|channel|>analysis<|message|>", KNOWN["<|channel|>analysis<|message|>"])
UNKNOWN = Reasoning("<reason>", "</reason>")  # of no token of its own


def thinking_tokenizer() -> PreTrainedTokenizerFast:
    """Markers as models have them: plain added tokens, special ones, and those that are spelt out."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["<think>", "</think>"])
    specials = ["[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|start|>", "<|return|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    return tokenizer


TOKENIZER = thinking_tokenizer()
EOS: Any = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model("llama", tmp_path_factory.mktemp("thinks"), vocab_size=len(TOKENIZER), eos_token_id=EOS)
    (folder / "generation_config.json").unlink()
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with load(folder, max_num_seqs=8) as llm:
        yield llm


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


class Says:
    """A model that samples given texts, one for each prompt, and end-of-sequence after them."""

    def __init__(self, llm: LLM, texts: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine_of(llm)
        self._texts = [ids_of(text) for text in texts]
        self._said = [0] * len(texts)
        monkeypatch.setattr(self._engine.executor, "draw", self._draw)

    def _draw(self, batch: Any, *_: Any) -> Drawn:
        tokens = [self._next(int(slot)) for slot in batch.slots[batch.sampled]]
        return Drawn(torch.tensor(tokens, dtype=torch.int64))

    def _next(self, slot: int) -> int:
        sequence = self._engine.scheduler.slots.sequence(slot)
        number: Any = sequence.request.prompt_ids[0] - ids_of("0")[0]
        said, self._said[number] = self._said[number], self._said[number] + 1
        return (self._texts[number] + [EOS])[said]


def complete(llm: LLM, text: str, monkeypatch: pytest.MonkeyPatch, prompt: str = "0", **params: Any) -> Completion:
    """What becomes of one row whose model says `text`, the same as completion and as deltas."""
    chosen = SamplingParams(**{"max_tokens": 200, **params})
    Says(llm, [text], monkeypatch)
    (completion,) = llm.generate(prompt, chosen)
    Says(llm, [text], monkeypatch)
    deltas = list(llm.stream([prompt], chosen, deltas=True))
    assert "".join(delta.text for delta in deltas) == completion.text
    assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
    assert deltas[-1].completion is not None
    assert deltas[-1].completion.reasoning == completion.reasoning
    assert_idle(engine_of(llm))
    return completion


SAID = {
    "plain tokens": (THINK, "<think>\nhm, 4?\n</think>\n\nIt is 4."),
    "special tokens": (MAGISTRAL, "[THINK]hm, 4?[/THINK]It is 4."),
    "channels": (
        HARMONY,
        "<|channel|>analysis<|message|>hm, 4?<|end|><|start|>assistant<|channel|>final<|message|>It is 4.",
    ),
    "spelt out": (UNKNOWN, "\n<reason>hm, 4?</reason>\nIt is 4."),
    "spelt out, in one token with the answer": (UNKNOWN, "<reason> hm, 4? </reason>It is 4."),
}


@pytest.mark.parametrize("kind", SAID)
def test_thinking_and_answer_are_told_apart(kind: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    markers, text = SAID[kind]
    if markers is HARMONY:
        monkeypatch.setattr(engine_of(llm), "eos_ids", np.array([ids_of("<|return|>")[0]]))
        text += "<|return|>"
    done = complete(llm, text, monkeypatch, reasoning=markers)
    assert (done.reasoning, done.text, done.finish_reason) == ("hm, 4?", "It is 4.", "stop")
    answer = TOKENIZER.decode(done.token_ids[done.reasoning_tokens :], skip_special_tokens=True)
    assert answer.strip() in ("It is 4.", "t is 4.")


def test_the_prompt_may_have_opened_or_closed_the_thinking(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = complete(llm, "so\n</think>\n\nyes", monkeypatch, "0 why?<think>\n", reasoning=THINK)
    assert (opened.reasoning, opened.text) == ("so", "yes")
    closed = complete(llm, "yes <think>", monkeypatch, "0 why?<think>\n\n</think>\n\n", reasoning=THINK)
    assert (closed.reasoning, closed.text, closed.reasoning_tokens) == (None, "yes <think>", 0)
    spoken_of = complete(llm, "yes", monkeypatch, "0 what does <think> mean?", reasoning=THINK)
    assert (spoken_of.reasoning, spoken_of.text) == (None, "yes")


@pytest.mark.parametrize("text", ["It is 4.", "\n4", "<thin ice", "<think", "<"])
def test_an_answer_without_thinking_is_whole(text: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    done = complete(llm, text, monkeypatch, reasoning=Reasoning("<thinking>", "</thinking>"))
    assert (done.reasoning, done.text, done.reasoning_tokens) == (None, text, 0)
    final = complete(llm, "<|channel|>final<|message|>" + text, monkeypatch, reasoning=HARMONY)
    assert (final.reasoning, final.text) == (None, text.lstrip("\n"))


@pytest.mark.parametrize("markers", [THINK, UNKNOWN])
def test_a_row_cut_in_its_thinking_has_no_answer(markers: Reasoning, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{markers.start}one two three{markers.end}four"
    length = len(ids_of(f"{markers.start}one two"))
    done = complete(llm, text, monkeypatch, reasoning=markers, max_tokens=length)
    assert (done.reasoning, done.text, done.finish_reason) == ("one two", "", "length")
    assert done.reasoning_tokens == length
    ended = complete(llm, f"{markers.start}one two", monkeypatch, reasoning=markers)
    assert (ended.reasoning, ended.text, ended.finish_reason) == ("one two", "", "stop")


def test_stops_are_of_the_answer_unless_thinking_is_meant_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<think>a; b</think>c; d"
    done = complete(llm, text, monkeypatch, reasoning=THINK, stop=(";",))
    assert (done.reasoning, done.text, done.stop_reason) == ("a; b", "c", ";")
    semicolon = ids_of(";")[0]
    done = complete(llm, text, monkeypatch, reasoning=THINK, stop_token_ids=(semicolon,))
    assert (done.reasoning, done.text, done.stop_reason) == ("a; b", "c", semicolon)
    both = Reasoning("<think>", "</think>", stop_in_thinking=True)
    done = complete(llm, text, monkeypatch, reasoning=both, stop=(";",))
    assert (done.text, done.stop_reason, done.finish_reason) == ("", ";", "stop")
    assert (done.reasoning or "").startswith("a")
    done = complete(llm, "<think>a, b</think>c; d", monkeypatch, reasoning=both, stop=(";",))
    assert (done.reasoning, done.text, done.stop_reason) == ("a, b", "c", ";")


@pytest.mark.parametrize("markers", [THINK, UNKNOWN])
def test_a_budget_ends_the_thinking(markers: Reasoning, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = Reasoning(markers.start, markers.end, max_tokens=len(ids_of(f"{markers.start}one two")))
    Says(llm, [f"{markers.start}one two and four"], monkeypatch)
    done = complete(llm, f"{markers.start}one two and four", monkeypatch, reasoning=bounded)
    assert (done.reasoning, done.text, done.finish_reason) == ("one two", " and four", "stop")
    assert done.token_ids == [*ids_of(f"{markers.start}one two{markers.end} and four"), EOS]
    inside = complete(llm, f"{markers.start}one{markers.end}two", monkeypatch, reasoning=bounded)
    assert (inside.reasoning, inside.text) == ("one", "two")
    cut = complete(llm, f"{markers.start}one two and", monkeypatch, reasoning=bounded, max_tokens=bounded.max_tokens)
    assert (cut.reasoning, cut.text, cut.finish_reason) == ("one two", "", "length")


def test_after_the_budget_the_model_goes_on_from_its_end_marker(llm: LLM) -> None:
    """Nothing scripted: the tokens after the end marker are those of a prompt that has all before them."""
    prompt = ids_of("why?<think>\n")
    bounded = Reasoning("<think>", "</think>", max_tokens=5)
    (done,) = llm.generate([prompt], SamplingParams(max_tokens=30, reasoning=bounded, ignore_eos=True))
    before = done.token_ids[: done.reasoning_tokens]
    assert (len(before), before[-1]) == (6, ids_of("</think>")[0])
    (rest,) = llm.generate([[*prompt, *before]], SamplingParams(max_tokens=24, ignore_eos=True))
    assert done.token_ids == before + rest.token_ids


def test_log_probabilities_have_a_place_for_each_token(llm: LLM) -> None:
    bounded = Reasoning("<think>", "</think>", max_tokens=5)
    params = SamplingParams(max_tokens=9, reasoning=bounded, ignore_eos=True, logprobs=1)
    form = StructuredOutputs(regex="[ab]{3}")
    (done,) = llm.generate([ids_of("why?<think>\n")], params)
    assert done.logprobs is not None
    assert done.logprobs.token_ids[:, 0].tolist() == done.token_ids
    assert np.flatnonzero(np.isnan(done.logprobs.logprobs[:, 0])).tolist() == [5]
    (formed,) = llm.generate([ids_of("why?")], dataclasses.replace(params, structured_outputs=form, ignore_eos=False))
    assert formed.logprobs is not None
    assert formed.logprobs.token_ids[:, 0].tolist() == formed.token_ids


def test_a_predicate_is_asked_about_the_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    Says(llm, ["<think>a b c</think>a b c d"], monkeypatch)
    params = SamplingParams(max_tokens=50, reasoning=THINK)
    (done,) = llm.generate("0", params, stop_when=lambda text: "b" in text)
    assert (done.reasoning, done.text, done.stop_reason) == ("a b c", "a b", "stop_when")


def test_chats_split_by_what_their_template_speaks_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ messages[0].content }}<think>\n{# until </think> #}")
    monkeypatch.setattr(llm, "reasoning", THINK)
    Says(llm, ["so</think>yes", "so</think>yes"], monkeypatch)
    (done,) = llm.chat([{"role": "user", "content": "0?"}])
    assert (done.reasoning, done.text) == ("so", "yes")
    (whole,) = llm.generate("1?<think>")
    assert (whole.reasoning, whole.text) == (None, "so</think>yes")


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        ("{{ messages }}<think>\n", ("<think>", "</think>")),
        ("{% if '</think>' in m.content %}", ("<think>", "</think>")),
        ("<|start|>assistant<|channel|>analysis<|message|>", (HARMONY.start, HARMONY.end)),
        ("[SYSTEM_PROMPT]... [THINK]...[/THINK]", ("[THINK]", "[/THINK]")),
        ("<seed:think>", ("<seed:think>", "</seed:think>")),
        ("{{ messages }}", None),
        (None, None),
        ({"default": "<think>"}, None),
    ],
)
def test_known_markers(template: Any, markers: tuple[str, str] | None) -> None:
    assert known_markers(template) == markers


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="reasoning max_tokens=0 must be at least 1"):
        Reasoning("<a>", "</a>", max_tokens=0)
    with pytest.raises(ValueError, match="reasoning end=' ' must be the text of a marker"):
        Reasoning("<a>", " ")


@pytest.mark.parametrize("opened", [True, False])
def test_the_form_of_a_structured_output_is_the_answers(llm: LLM, opened: bool) -> None:
    """Nothing scripted: a budget ends the thinking, and what follows has the form."""
    form = StructuredOutputs(regex="(yes|no), [0-9]{3}")
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=5, structured_outputs=form)
    bounded = dataclasses.replace(params, reasoning=Reasoning("<think>", "</think>", max_tokens=5))
    prompt = ids_of("why?<think>\n" if opened else "why?")
    prompts = [[*ids_of("z" * length), *prompt] for length in range(32)]  # a token may be taken back where a block ends
    for done in llm.generate(prompts, bounded):
        assert re.fullmatch(form.regex or "", done.text)
        assert (done.reasoning_tokens, done.finish_reason) == (6 if opened else 0, "stop")
    (plain,) = llm.generate([prompt], params)
    if not opened:
        (same,) = llm.generate([prompt], bounded)
        assert same.token_ids == plain.token_ids
    assert_idle(engine_of(llm))

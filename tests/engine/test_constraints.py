"""Structured outputs on a tiny model that speaks bytes, against one token after the other under llguidance's masks."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchrun.engine.llm import LLM
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.engine.stats import StepStats
from batchrun.engine.structure import StructuredOutputs
from tests.engine.families import assert_idle, engine_of, load, make_optimistic, random_prompt
from tests.engine.speller import ENDS, SCHEMA, VOCABULARY, make_speller

MAX_TOKENS = 72
JSON = StructuredOutputs(json=SCHEMA)
FORMS = {
    "json": JSON,
    "regex": StructuredOutputs(regex="[a-f]{3}-[0-9]{2,4} (cats|catalogues)"),
    "choice": StructuredOutputs(choice=["a cat", "a cat and a dog", "🐈 ou 日本"]),
    "lark": StructuredOutputs(grammar='start: "sum " NUMBER (" + " NUMBER)*\nNUMBER: /[0-9]{1,2}/'),
    "gbnf": StructuredOutputs(grammar='root ::= "yes " ("always" | "never")'),
}
SHARED = random_prompt(0, 40)
PROMPTS = [random_prompt(length, length) for length in (1, 33)] + [[*SHARED, 7], [*SHARED, 8, 9]]

MODES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "batched": {},
    "chunks of 7": {"max_batched_tokens": 7},
    "blocks of 4": {"block_size": 4},
    "no prefix caching": {"prefix_caching": False},
}


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speller(tmp_path_factory.mktemp("speller"))


@pytest.fixture(scope="module")
def llm(speller: Path) -> LLM:
    return load(speller)


class Oracle:
    """The whole sequence anew for each token, its mask from a matcher of its own."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
        self.words = LLTokenizer(backend.to_str(), n_vocab=VOCABULARY, eos_token=ENDS)
        self._known: dict[Any, list[int]] = {}

    def tokens(self, prompt: list[int], form: StructuredOutputs) -> list[int]:
        key = (tuple(prompt), form)
        if key not in self._known:
            self._known[key] = self._tokens(prompt, form)
        return self._known[key]

    @torch.inference_mode()
    def _tokens(self, prompt: list[int], form: StructuredOutputs) -> list[int]:
        matcher, said = LLMatcher(self.words, form.compiled()), list[int]()
        while len(said) < MAX_TOKENS and not matcher.is_stopped():
            forced = matcher.compute_ff_tokens() if form.fast_forward else []
            if not forced:
                mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
                logits = self.model(torch.tensor([prompt + said])).logits[0, -1].numpy()
                forced = [int(np.where(mask[:VOCABULARY], logits, -np.inf).argmax())]
            assert matcher.consume_tokens(forced)
            said += forced
        return said[:MAX_TOKENS]


@pytest.fixture(scope="module")
def oracle(speller: Path) -> Oracle:
    return Oracle(speller)


def asked(form: StructuredOutputs, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MAX_TOKENS, **more}, structured_outputs=form)


def slow(form: StructuredOutputs) -> StructuredOutputs:
    """The same form, each token by a step of its own."""
    fields = {name: getattr(form, name) for name in ("json", "regex", "choice", "grammar", "json_object")}
    return StructuredOutputs(**fields, fast_forward=False)


def check(form: StructuredOutputs, completion: Completion) -> None:
    """Raise unless the completion has the form or was cut."""
    assert completion.error is None
    if completion.finish_reason == "length":
        assert len(completion.token_ids) == completion.max_tokens
        return
    assert completion.finish_reason == "stop"
    if form.json is not None:
        jsonschema.validate(json.loads(completion.text), json.loads(str(form.json)))
    elif form.choice is not None:
        assert completion.text in form.choice


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("mode", MODES)
def test_equals_one_token_after_the_other(mode: str, fast: bool, speller: Path, oracle: Oracle) -> None:
    """All forms in one batch, beside rows that have none."""
    llm = load(speller, **MODES[mode])
    forms = [form if fast else slow(form) for form in FORMS.values()]
    requests = [(prompt, form) for form in forms for prompt in PROMPTS]
    free = SamplingParams(max_tokens=20)
    params = [asked(form) for _, form in requests] + [free] * len(PROMPTS)
    done = llm.generate([prompt for prompt, _ in requests] + PROMPTS, params)
    for (prompt, form), completion in zip(requests, done, strict=False):
        check(form, completion)
        assert completion.token_ids == oracle.tokens(prompt, form)
        assert completion.cached_tokens <= completion.prompt_tokens == len(prompt)
    assert [c.token_ids for c in done[len(requests) :]] == [c.token_ids for c in load(speller).generate(PROMPTS, free)]
    assert_idle(engine_of(llm))


def test_equals_when_preempted_and_from_cached_prefixes(speller: Path, oracle: Oracle) -> None:
    """Chunks of 7 and pages for a part of what runs: state outlives the slots, forced tokens cross block borders."""
    llm = make_optimistic(load(speller, block_size=4, num_blocks=40, max_batched_tokens=7))
    for _ in range(2):
        done = llm.generate(PROMPTS, asked(JSON))
        assert [c.token_ids for c in done] == [oracle.tokens(prompt, JSON) for prompt in PROMPTS]
    assert engine_of(llm).scheduler.num_preemptions > 0
    assert sum(c.cached_tokens for c in done) > 0
    assert_idle(engine_of(llm))


def steps_of(llm: LLM, requests: list[Request]) -> tuple[list[Completion], list[StepStats]]:
    engine, done = engine_of(llm), list[Completion]()
    for request in requests:
        engine.add(request)
    while engine.has_work():
        done += engine.step()
    assert_idle(engine)
    return done, engine.take_steps()


def test_forced_tokens_take_no_step(llm: LLM) -> None:
    engine_of(llm).take_steps()
    (fast,), quick = steps_of(llm, [Request(0, PROMPTS[1], asked(JSON))])
    (one_by_one,), slow_steps = steps_of(llm, [Request(0, PROMPTS[1], asked(slow(JSON)))])
    forced = sum(step.forced for step in quick)
    assert forced > 10
    assert len(quick) == len(fast.token_ids) - forced
    assert len(slow_steps) == len(one_by_one.token_ids)
    assert sum(step.forced for step in slow_steps) == 0
    assert fast.first_token_s > 0


def test_a_form_without_a_choice_takes_one_step(llm: LLM) -> None:
    form = StructuredOutputs(choice=["nothing but this, 日本"])
    (only,), steps = steps_of(llm, [Request(0, PROMPTS[0], asked(form))])
    assert (only.text, only.finish_reason, len(steps)) == ("nothing but this, 日本", "stop", 1)


@pytest.mark.parametrize("limit", [1, 2, 7, 13, 20])
def test_max_tokens_counts_forced_tokens(limit: int, llm: LLM, oracle: Oracle) -> None:
    (cut,) = llm.generate([PROMPTS[1]], asked(JSON, max_tokens=limit))
    assert cut.token_ids == oracle.tokens(PROMPTS[1], JSON)[:limit]
    assert cut.finish_reason == "length"
    assert cut.text == llm.tokenizer.decode(cut.token_ids)


def test_ends_where_the_form_and_max_tokens_do(llm: LLM, oracle: Oracle) -> None:
    form = FORMS["gbnf"]
    length = len(oracle.tokens(PROMPTS[0], form))
    (whole,) = llm.generate([PROMPTS[0]], asked(form, max_tokens=length))
    assert whole.finish_reason == "stop"


def test_either_end_is_allowed_where_the_form_may_end(speller: Path) -> None:
    """Whichever the model prefers, and not before."""
    for end in ENDS:
        llm = load(speller)
        engine = engine_of(llm)
        model_logits = engine.model.logits

        def prefers(hidden: Any, index: Any, model_logits: Any = model_logits, end: int = end) -> Any:
            logits = model_logits(hidden, index).clone()
            logits[:, end] = 1e4
            return logits

        engine.model.logits = prefers  # type: ignore[method-assign]
        (done,) = llm.generate([PROMPTS[0]], asked(StructuredOutputs(regex="[ab]{2}[a-z]*")))
        assert done.token_ids[-1] == end
        assert (done.finish_reason, done.stop_reason) == ("stop", end)
        assert 2 <= len(done.text) <= 3


def test_stops_of_a_row_also_end_it(llm: LLM) -> None:
    """Stop strings among sampled and forced tokens alike, and stop tokens: what comes after them is not kept."""
    (whole,) = llm.generate([PROMPTS[1]], asked(JSON))
    for stop in ('"mood', "parts", '": "'):
        (done,) = llm.generate([PROMPTS[1]], asked(JSON, stop=(stop,)))
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
        assert done.text == whole.text[: whole.text.index(stop)]
        assert whole.text.startswith(llm.tokenizer.decode(done.token_ids)[: len(done.text)])
    token = next(t for t in whole.token_ids if "mood" in llm.tokenizer.decode([t]))
    (done,) = llm.generate([PROMPTS[1]], asked(JSON, stop_token_ids=(token,)))
    assert done.stop_reason == token
    assert done.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


def test_sampled_rows_have_the_form_and_do_not_depend_on_neighbours(llm: LLM) -> None:
    params = [asked(JSON, temperature=1.5, seed=seed) for seed in range(12)]
    together = llm.generate([PROMPTS[1]] * 12, params)
    for completion in together:
        check(JSON, completion)
    assert len({c.text for c in together}) > 6
    assert llm.generate([PROMPTS[1]], params[5])[0].token_ids == together[5].token_ids


def test_repetition_is_seen_across_forced_tokens(llm: LLM) -> None:
    form = StructuredOutputs(regex="((a|b)bcabcabc){40}")
    (done,) = llm.generate([PROMPTS[0]], asked(form, repetition_max_pattern=16, repetition_min_count=4, max_tokens=300))
    assert done.finish_reason == "repetition"


def test_an_aborted_row_leaves_nothing(llm: LLM) -> None:
    engine = engine_of(llm)
    for key in range(6):
        engine.add(Request(key, PROMPTS[key % 4], asked(JSON)))
    done = {c.key: c for _ in range(3) for c in engine.step()}
    for key in (0, 3):
        engine.abort(key)
    while engine.has_work():
        done |= {c.key: c for c in engine.step()}
    assert set(done) == {1, 2, 4, 5}
    assert_idle(engine)


def test_a_row_is_not_used_before_its_mask_is_there(speller: Path) -> None:
    """Whatever a step does after it has asked for masks, and in which order, the mask is that of the tokens before."""
    constraints = engine_of(load(speller)).constraints
    form = StructuredOutputs(regex="(ab|cd){40}")
    begin, release = constraints.open(form), threading.Event()
    expected = constraints.begin(np.arange(1), [constraints.open(form)]).wait()
    assert constraints._thread is not None
    constraints._thread.submit(release.wait)
    masks = constraints.begin(np.arange(1), [begin])
    later = threading.Timer(0.05, release.set)
    later.start()
    (first,) = np.flatnonzero(~np.unpackbits(expected[0], bitorder="little")[:VOCABULARY].astype(bool))[:1].tolist()
    begin.take(first)
    assert release.is_set()
    assert not begin.error
    assert np.array_equal(masks.wait(), expected)
    later.join()


def test_a_step_that_fails_leaves_its_rows_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(llm)
    engine.add(Request(0, PROMPTS[0], asked(slow(FORMS["gbnf"]))))
    with monkeypatch.context() as patched:
        patched.setattr(engine.model, "hidden", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    sequence = engine._sequences[0]
    assert sequence.constraint is not None
    assert not sequence.constraint.error
    engine.abort(0)
    assert_idle(engine)


def test_a_form_that_cannot_be_used_is_the_rows_own_error(llm: LLM) -> None:
    bad = StructuredOutputs(json={"type": "array", "uniqueItems": True})
    refused, fine = llm.generate(PROMPTS[:2], [asked(bad), asked(FORMS["gbnf"])])
    assert (refused.finish_reason, refused.error_type) == ("error", "constraint_error")
    assert "uniqueItems" in str(refused.error)
    check(FORMS["gbnf"], fine)


def test_a_row_whose_form_leaves_no_token_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else took away all that the form allows: the row says so, and ends."""
    engine = engine_of(llm)
    logits = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda *asked: torch.full_like(logits(*asked), float("-inf")))
    (done,) = llm.generate([PROMPTS[0]], asked(FORMS["regex"]))
    assert (done.finish_reason, done.error_type) == ("error", "constraint_error")
    assert done.error


def test_rows_without_a_form_need_no_grammar(speller: Path) -> None:
    llm = load(speller)
    llm.generate(PROMPTS, SamplingParams(max_tokens=4))
    constraints = engine_of(llm).constraints
    assert constraints._words is None
    assert constraints._thread is None


def test_forms_are_compiled_once(llm: LLM) -> None:
    constraints = engine_of(llm).constraints
    llm.generate(PROMPTS, asked(StructuredOutputs(regex="x{5}y?")))
    known = len(constraints._matchers)
    llm.generate(PROMPTS, asked(StructuredOutputs(regex="x{5}y?")))
    assert len(constraints._matchers) == known


SCALARS = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"},
        {"type": ["string", "null"], "maxLength": 3},
        {"enum": ["é", "日本", "🐈", "", 'q"q', "a\\b"]},
        {"enum": [1, "one", None, True]},
        {"const": "ünï"},
    ]
)


def objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text('abé日" ', min_size=1, max_size=4)
    return st.dictionaries(keys, parts, min_size=1, max_size=3).map(
        lambda named: {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}
    )


def arrays(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return parts.map(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 2})


SCHEMAS = st.recursive(SCALARS, lambda parts: objects(parts) | arrays(parts), max_leaves=5)


@settings(max_examples=40)
@given(SCHEMAS, st.booleans(), st.integers(0, 1000))
def test_any_schema(llm: LLM, schema: Any, fast: bool, seed: int) -> None:
    """Completions of random schemas follow them, greedy and sampled."""
    form = StructuredOutputs(json=schema, fast_forward=fast)
    params = [asked(form, max_tokens=150), asked(form, max_tokens=150, temperature=1.0, seed=seed)]
    for completion in llm.generate([PROMPTS[0]] * 2, params):
        check(form, completion)
        assert "\ufffd" not in completion.text or completion.finish_reason == "length"


def test_free_json_objects(llm: LLM) -> None:
    form = StructuredOutputs(json_object=True)
    for completion in llm.generate(PROMPTS, [asked(form, temperature=1.0, seed=seed) for seed in range(len(PROMPTS))]):
        assert completion.text.startswith("{")
        if completion.finish_reason == "stop":
            assert isinstance(json.loads(completion.text), dict)


def test_whitespace_only_where_asked(llm: LLM) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    (fixed,) = llm.generate([PROMPTS[0]], asked(StructuredOutputs(json=schema)))
    assert fixed.text == "[1, 1]"
    words = engine_of(llm).constraints._prepared_tokenizer()
    for any_whitespace, allowed in ((False, False), (True, True)):
        matcher = LLMatcher(words, StructuredOutputs(json=schema, any_whitespace=any_whitespace).compiled())
        assert matcher.consume_tokens(words.tokenize_str("[\n  1")) is allowed


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of json, regex"),
    ({"regex": "a", "choice": ["b"]}, "exactly one of .*: regex, choice"),
    ({"choice": []}, "choice"),
    ({"choice": "ab"}, "choice='ab' must be a list"),
    ({"json": "{"}, "not JSON"),
    ({"json": "[1]"}, "not a JSON Schema"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_forms_that_are_none(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(**fields)


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a(b"}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"grammar": "start: foo"}, "unknown name"),
    ({"json": {"type": "objec"}}, r"Invalid type: objec \(at \$\)"),
    ({"json": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}, r"uniqueItems.*at \$\.properties\.a\)"),
    ({"json": {"anyOf": [{"type": "null"}, {"type": "string", "format": "soup"}]}}, r"soup \(at \$\.anyOf\[1\]\)"),
    ({"json": {"items": {"$ref": "#/$defs/x"}}}, r"at \$\.items\)"),
    ({"json": {"properties": {"a": {"pattern": "(?=x)"}}}}, r"look-around.*\(at \$\.properties\.a\)"),
    ({"json": {"$ref": "#"}}, r"there is no text of this form$"),
    ({"grammar": "start: start"}, r"there is no text of this form$"),
    ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, r"'a' is unsatisfiable$"),
]


@pytest.mark.parametrize(("fields", "message"), UNUSABLE)
def test_forms_that_llguidance_cannot_use(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)cannot be used: .*{message}"):
        StructuredOutputs(**fields).compiled()


def test_a_form_is_a_small_value() -> None:
    assert StructuredOutputs(json=json.dumps(SCHEMA, indent=4)) == JSON
    assert hash(StructuredOutputs(choice=["a", "b", "a"])) == hash(StructuredOutputs(choice=("a", "b")))
    again = pickle.loads(pickle.dumps(JSON))
    assert again == JSON
    assert len(pickle.dumps(JSON)) < 1000
    assert list(json.loads(str(JSON.json))["properties"]) == list(SCHEMA["properties"])


def test_ignore_eos_has_no_say_where_there_is_a_form(llm: LLM) -> None:
    both = llm.generate([PROMPTS[0]] * 2, [asked(FORMS["choice"]), asked(FORMS["choice"], ignore_eos=True)])
    assert both[0].token_ids == both[1].token_ids
    assert both[1].finish_reason == "stop"

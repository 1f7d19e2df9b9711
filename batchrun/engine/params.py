"""What goes into the engine and what comes out: sampling parameters, a request, a completion. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from batchrun.config.sampling import BIAS, RANGES, SamplingConfig
from batchrun.engine.reasoning import Reasoning
from batchrun.engine.structure import StructuredOutputs
from batchrun.errors import ErrorType


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names and meanings follow vLLM and OpenAI; docs/sampling.md has them
    in one table.

    Hashable: lists are kept as tuples, and `logit_bias` as pairs in order of their tokens.
    Raises ValueError naming the value and its limit.
    """

    max_tokens: int = 128  # 0 with prompt_logprobs: the prompt is scored and nothing generated
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is all
    seed: int | None = None  # None: the engine derives one from the request's number
    stop: tuple[str, ...] = ()  # strings that end the text; cut from it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None  # the form of the text, which decides alone when it may end
    reasoning: Reasoning | None = None  # tells thinking from the answer; None: the text is whole
    # Ends a row whose last tokens are one pattern of so many tokens, so many times in a row; 0: never.
    repetition_max_pattern: int = 0
    repetition_min_pattern: int = 1
    repetition_min_count: int = 8
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int | str, float], ...] = ()  # given as {token id or text: bias}
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # None: none; 0: of the generated tokens alone
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    adapter: str | None = None  # one of model.adapters; None: the base model
    n: int = 1  # samples of a prompt: `LLM` makes a request of each, and a request asks for one

    def __post_init__(self) -> None:
        for name, (kind, optional) in _KINDS.items():
            value = getattr(self, name)
            if not (_is_a(value, kind) or (optional and value is None)):
                raise ValueError(f"{name}={value!r} is not {_SAID[kind]}{' or None' if optional else ''}")
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            texts = (texts,) if isinstance(texts, str) else _all(name, () if texts is None else texts, str)
            if any(not text for text in texts):
                raise ValueError(f"{name}={texts!r} holds an empty string")
            object.__setattr__(self, name, texts)
        object.__setattr__(
            self,
            "stop_token_ids",
            _all("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids, Integral),
        )
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _all("allowed_token_ids", self.allowed_token_ids, Integral)
            object.__setattr__(self, "allowed_token_ids", allowed)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids=() allows no token: None allows all")
        for name, limits in RANGES.items():
            value = getattr(self, name, None)
            if name == "max_tokens" and value == 0 and self.prompt_logprobs is not None:
                continue
            if value is not None and (problem := limits.problem(value)):
                raise ValueError(f"{name}={value} {problem}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n={self.n} samples of a greedy prompt are all the same: set temperature above 0, or n=1")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must fit into 64 bits with a sign")


def sampling_params(
    config: SamplingConfig, seed: int, form: StructuredOutputs | None = None, reasoning: Reasoning | None = None
) -> SamplingParams:
    """The settings of a job as parameters of one request. Raises ValueError for settings that do not go together."""
    settings = {name: getattr(config, name) for name in _SETTINGS}
    return SamplingParams(**settings, seed=seed, structured_outputs=form, reasoning=reasoning)


_SETTINGS = ({f.name for f in fields(SamplingParams)} & {f.name for f in fields(SamplingConfig)}) - {"seed", "n"}


# What a value of each kind must be: numpy's numbers count too, and truth values are no numbers.
_SAID: dict[type, str] = {
    Integral: "a whole number",
    Real: "a number",
    bool: "True or False",
    str: "text",
    Reasoning: "Reasoning",
    StructuredOutputs: "StructuredOutputs",
}
_NAMED = {"int": Integral, "float": Real, **{kind.__name__: kind for kind in _SAID}}
_KINDS: dict[str, tuple[type, bool]] = {
    f.name: (_NAMED[kind], bool(rest))
    for f in fields(SamplingParams)
    for kind, _, rest in [str(f.type).partition(" | ")]
    if kind in _NAMED
}


def _is_a(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _all(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    """The values as a tuple. Raises ValueError if one of them is of another kind."""
    values = tuple(values) if isinstance(values, Iterable) else values
    if not isinstance(values, tuple) or not all(_is_a(value, kind) for value in values):
        raise ValueError(f"{name}={values!r} is not a list, each {_SAID[kind]}")
    return values


def _pairs(bias: Any) -> tuple[tuple[int | str, float], ...]:
    """Pairs of {token: bias}, by token; text of digits is a token id."""
    if not bias:
        return ()
    try:
        pairs = dict(bias)
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias={bias!r} is not a dict of numbers by token") from None
    for token, value in pairs.items():
        if not (_is_a(token, Integral) or isinstance(token, str)) or not _is_a(value, Real):
            raise ValueError(f"logit_bias: {token!r}={value!r} is not a number by token id or text")
        if problem := BIAS.problem(value):
            raise ValueError(f"logit_bias: {token}={value} {problem}")
    named = {int(token) if str(token).isdecimal() else token: float(value) for token, value in pairs.items()}
    return tuple(sorted(named.items(), key=lambda pair: (isinstance(pair[0], str), pair[0])))


@dataclass(slots=True)
class Request:
    """One prompt to complete; or, with `continuations`, to score: then nothing is generated, and of `params` only
    the adapter counts."""

    key: Hashable  # the caller's own name for it, handed back with the completion
    prompt_ids: Sequence[int] | np.ndarray
    params: SamplingParams = field(default_factory=SamplingParams)
    deltas: bool = False  # whether its text is wanted piece by piece
    continuations: tuple[tuple[int, ...], ...] = ()  # token ids whose likelihood right after the prompt is asked for
    type_ids: Sequence[int] | None = None  # of a pair of texts: which of the two each token is of, 0 or 1


class Likelihood(NamedTuple):
    """What a model says of n given tokens, each after all those before it."""

    logprobs: np.ndarray  # float64 [n]: natural logarithms of the probability
    greedy: np.ndarray  # bool [n]: whether no token is likelier at its place


class TokenLogprobs(NamedTuple):
    """Log-probabilities of T tokens, generated ones or those of a prompt but its first: a row for each, its first
    column for the token itself, the other k for the likeliest ones there, best first. They are NaN for tokens that no
    step samples: those that end a thinking which had all it may have.

    They are the log-softmax of the model's own logits, before penalties, biases, masks, temperature and filters.
    """

    token_ids: np.ndarray  # int32 [T, k + 1]
    logprobs: np.ndarray  # float32 [T, k + 1], natural logarithms


@dataclass(slots=True)
class Completion:
    """What became of a request. Times are seconds since the request entered the engine."""

    key: Hashable
    text: str  # without the thinking, if that is told from it
    token_ids: list[int]
    finish_reason: str  # stop | length | repetition | error | abort
    stop_reason: str | int | None = None  # the stop string or token id that ended it, or "stop_when"
    error_type: ErrorType | None = None
    error: str | None = None
    max_tokens: int | None = None  # that there could have been, in what the prompt leaves of the window
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was found in the cache
    reasoning: str | None = None  # the thinking before the answer
    reasoning_tokens: int = 0  # of token_ids, markers among them
    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    logprobs: TokenLogprobs | None = None  # of all token_ids, if params.logprobs asks for them
    prompt_logprobs: TokenLogprobs | None = None  # if params.prompt_logprobs asks for them
    likelihoods: list[Likelihood] | None = None  # of the request's continuations, in their order
    values: np.ndarray | None = None  # float32 [size]: an embedding or scores, from an Encoder

    def cut(self, text: str, num_tokens: int, stop_reason: str) -> Completion:
        """The same, had it been stopped after so many tokens."""
        return replace(
            self,
            text=text,
            token_ids=self.token_ids[:num_tokens],
            finish_reason="stop",
            stop_reason=stop_reason,
            logprobs=self.logprobs and TokenLogprobs(*(values[:num_tokens] for values in self.logprobs)),
        )


@dataclass(slots=True)
class Delta:
    """What a streamed request has come to since its last delta. The texts of its deltas add up to the completion's."""

    key: Hashable
    text: str
    token_ids: list[int]
    completion: Completion | None = None  # with the last one

    @property
    def finish_reason(self) -> str | None:
        """The completion's, on the last delta."""
        return self.completion.finish_reason if self.completion else None


def refusal(request: Request, kind: ErrorType, why: str) -> Completion:
    """What comes of a request that can never run."""
    return Completion(request.key, "", [], "error", error_type=kind, error=why, prompt_tokens=len(request.prompt_ids))


def foreign_token(ids: np.ndarray, vocab_size: int) -> str | None:
    """What is wrong with ids (int64 [n]) that hold one the model does not have; None if they do not."""
    outside = (ids < 0) | (ids >= vocab_size)
    if not outside.any():
        return None
    return f"token {ids[outside][0]} is not one of the model's: its ids go from 0 to {vocab_size - 1}"

"""How the next token is chosen, and when a row ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from batchrun.config.base import in_range, one_of, setting, strings
from batchrun.errors import ConfigError

SEED_BY = ("row", "content")
MAX_SAMPLES = 10_000
MAX_PATTERN = 1024  # tokens that are looked back for repetition
MAX_LOGPROBS = 1000
MOST = 2**31 - 1  # beyond any window or vocabulary, and products of two still fit the engine's 64 bits
FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # null: as the model's own files say


class Range(NamedTuple):
    """The numbers that a parameter may have: those from `low` to `high`, without `low` itself if `above`."""

    low: float
    high: float = MOST
    above: bool = False

    @property
    def text(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.low:g}"
        if self.high == MOST:
            return low
        return f"{low} and at most {self.high:g}" if self.above else f"between {self.low:g} and {self.high:g}"

    def problem(self, value: float) -> str | None:
        """What is wrong with the value, or None."""
        beyond = value > self.low if self.above else value >= self.low
        if beyond and value <= self.high:
            return None
        finite = "" if -math.inf < value < math.inf else " and finite"
        most = f" and at most {MOST}" if self.high == MOST < value < math.inf else ""
        return f"is out of range: it must be {self.text}{finite}{most}"


# Limits of a job's setting, of a row's own value, and of the same field of SamplingParams.
RANGES = {
    "n": Range(1, MAX_SAMPLES),
    "max_tokens": Range(1),
    "min_tokens": Range(0),
    "temperature": Range(0),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(0),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, above=True),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
    "repetition_max_pattern": Range(0, MAX_PATTERN),
    "repetition_min_pattern": Range(1, MAX_PATTERN),
    "repetition_min_count": Range(2),
}
BIAS = Range(-100, 100)


@dataclass
class SamplingConfig:
    """How the next token is chosen and when a row ends. Names follow vLLM and OpenAI; docs/sampling.md says more."""

    n: int = setting(1, "samples of each row, an output row each, told apart by the column sample", identity=True)
    max_tokens: int = setting(128, "most tokens generated for a row", identity=True)
    min_tokens: int = setting(0, "tokens before which no end of sequence and no stop ends a row", identity=True)
    temperature: float | None = setting(
        0.0, "0 is greedy; higher is more random; null: as the model's generation_config says", identity=True
    )
    top_p: float | None = setting(
        1.0, "sample from the smallest set with this much probability; null: as the model says", identity=True
    )
    top_k: int | None = setting(
        0, "sample from the k most likely tokens; 0 is all; null: as the model says", identity=True
    )
    min_p: float | None = setting(
        0.0, "leave out tokens less likely than this share of the likeliest; null: as the model says", identity=True
    )
    presence_penalty: float = setting(0.0, "taken from the logits of tokens that were generated", identity=True)
    frequency_penalty: float = setting(0.0, "taken from them once for each time", identity=True)
    repetition_penalty: float | None = setting(
        1.0, "above 1 makes tokens of prompt and completion less likely; null: as the model says", identity=True
    )
    logit_bias: dict[Any, float] = setting(
        {}, "added to logits, by token id or by text that is one token: from -100 to 100", identity=True
    )
    allowed_token_ids: list[int] | None = setting(None, "the only token ids that may come; null: all", identity=True)
    bad_words: Any = setting(None, "a string or list of strings that must not come", identity=True)
    seed: int = setting(0, "seed of the job; each row's own seed follows from it", identity=True)
    seed_by: str = setting(
        "row",
        "what else a row's seed follows from: row (its place) or content: equal prompts, equal samples",
        identity=True,
    )
    stop: Any = setting(None, "a string or list of strings that end a completion; cut from the text", identity=True)
    stop_token_ids: list[int] = setting([], "token ids that end a completion", identity=True)
    include_stop_str_in_output: bool = setting(False, "leave what ended the completion in its text", identity=True)
    ignore_eos: bool = setting(False, "go on after an end-of-sequence token", identity=True)
    skip_special_tokens: bool = setting(True, "leave special tokens out of the text", identity=True)
    logprobs: int | None = setting(
        None, "log-probabilities of each generated token and of so many of the likeliest; null: none", identity=True
    )
    prompt_logprobs: int | None = setting(
        None, "the same of each token of the prompt but the first; null: none", identity=True
    )
    adapter: str | None = setting(
        None,
        "name in model.adapters of the LoRA adapter of rows that name none; null: the model as it is",
        identity=True,
    )
    repetition_max_pattern: int = setting(
        0, "end a completion whose last tokens are one pattern of up to so many tokens, repeated; 0: off", identity=True
    )
    repetition_min_pattern: int = setting(1, "tokens that such a pattern has at least", identity=True)
    repetition_min_count: int = setting(8, "times that the pattern must stand there in a row", identity=True)

    def __post_init__(self) -> None:
        one_of("sampling.seed_by", self.seed_by, SEED_BY)
        in_range("sampling.seed", self.seed, 0, 2**63 - 1)
        for name, limits in RANGES.items():
            value = getattr(self, name)
            if value is not None and (problem := limits.problem(value)):
                raise ConfigError(f"sampling.{name}={value} {problem}")
        self.stop = strings("sampling.stop", self.stop)
        self.bad_words = strings("sampling.bad_words", self.bad_words)
        # Keys as text, as JSON has them too: the fingerprint is one for a YAML file and a row's JSON.
        self.logit_bias = {str(token): bias for token, bias in self.logit_bias.items()}
        for token, bias in self.logit_bias.items():
            if problem := BIAS.problem(bias):
                raise ConfigError(f"sampling.logit_bias: {token}={bias} {problem}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ConfigError("sampling.allowed_token_ids=[] allows no token: null allows all")


def resolve(config: SamplingConfig, defaults: Mapping[str, Any]) -> SamplingConfig:
    """The settings with `defaults`, which has all of FROM_MODEL, in place of those that are null.

    Raises ConfigError for a default out of its range.
    """
    open_ones = {name: defaults[name] for name in FROM_MODEL if getattr(config, name) is None}
    return replace(config, **open_ones) if open_ones else config

"""How the next token is chosen, and when a row ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from batchrun.config.base import in_range, one_of, setting, strings
from batchrun.errors import ConfigError

SEED_BY = ("row", "content")
MAX_SAMPLES = 10_000
MAX_PATTERN = 1024  # tokens that are looked back for repetition


@dataclass
class SamplingConfig:
    """How the next token is chosen and when a row ends. Names follow vLLM and OpenAI."""

    n: int = setting(1, "samples of each row, an output row each, told apart by the column sample", identity=True)
    max_tokens: int = setting(128, "most tokens generated for a row", identity=True)
    temperature: float = setting(0.0, "0 is greedy; higher is more random", identity=True)
    top_p: float = setting(1.0, "sample from the smallest set with this much probability", identity=True)
    top_k: int = setting(0, "sample from the k most likely tokens; 0 is all", identity=True)
    seed: int = setting(0, "seed of the job; each row's own seed follows from it", identity=True)
    seed_by: str = setting(
        "row",
        "what else a row's seed follows from: row (its place) or content: equal prompts, equal samples",
        identity=True,
    )
    stop: Any = setting(None, "a string or list of strings that end a completion; cut from the text", identity=True)
    stop_token_ids: list[int] = setting([], "token ids that end a completion", identity=True)
    ignore_eos: bool = setting(False, "go on after an end-of-sequence token", identity=True)
    skip_special_tokens: bool = setting(True, "leave special tokens out of the text", identity=True)
    repetition_max_pattern: int = setting(
        0, "end a completion whose last tokens are one pattern of up to so many tokens, repeated; 0: off", identity=True
    )
    repetition_min_pattern: int = setting(1, "tokens that such a pattern has at least", identity=True)
    repetition_min_count: int = setting(8, "times that the pattern must stand there in a row", identity=True)

    def __post_init__(self) -> None:
        one_of("sampling.seed_by", self.seed_by, SEED_BY)
        in_range("sampling.n", self.n, 1, MAX_SAMPLES)
        in_range("sampling.max_tokens", self.max_tokens, 1)
        in_range("sampling.temperature", self.temperature, 0)
        in_range("sampling.top_k", self.top_k, 0)
        in_range("sampling.seed", self.seed, 0, 2**63 - 1)
        in_range("sampling.repetition_max_pattern", self.repetition_max_pattern, 0, MAX_PATTERN)
        in_range("sampling.repetition_min_pattern", self.repetition_min_pattern, 1, MAX_PATTERN)
        in_range("sampling.repetition_min_count", self.repetition_min_count, 2)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling.top_p={self.top_p} is out of range: it must be above 0 and at most 1")
        if math.isnan(self.temperature) or math.isinf(self.temperature):
            raise ConfigError(f"sampling.temperature={self.temperature} must be a finite number")
        self.stop = strings("sampling.stop", self.stop)

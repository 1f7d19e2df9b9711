"""One request on its way through the engine, apart from what the running slots hold for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batchrun.engine.constraints import Constraint
from batchrun.engine.continuations import Scoring
from batchrun.engine.detokenizer import StopMatcher
from batchrun.engine.logprobs import LogprobRecord
from batchrun.engine.params import Request, TokenLogprobs
from batchrun.engine.thinking import Thinking
from batchrun.engine.token_rules import TokenRules


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids are kept here while the sequence waits, in its slot while it runs."""

    request: Request
    seed: int  # of the sampling noise
    token_ids: np.ndarray  # int32 [n]: the prompt, then what was there before a preemption
    num_prompt: int
    max_total: int  # prompt + completion tokens at most
    digests: list[bytes]  # of the full blocks of token_ids known so far
    arrived_at: float  # seconds, time.perf_counter
    stops: StopMatcher | None = None  # what the text so far holds of the request's stop strings
    constraint: Constraint | None = None  # the form of its text, and how far it has come
    rules: TokenRules | None = None
    logprobs: LogprobRecord | None = None  # None: not asked for
    scoring: Scoring | None = None  # while tokens of its prompt, or what may follow it, are still to be scored
    prompt_logprobs: TokenLogprobs | None = None
    thinking: Thinking | None = None  # of a row whose thinking is told from its answer
    adapter: int = 0  # number of its adapter; 0: none
    slot: int = -1  # -1: waiting
    cached_tokens: int = -1  # prompt tokens found in the cache when first admitted; -1: not yet admitted
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    pending: list[bytes] = field(default_factory=list)  # digests this sequence is about to compute

    @property
    def lasting(self) -> int:
        """Tokens whose KV is never written over."""
        return self.num_prompt if self.request.continuations else self.max_total

    @property
    def settled(self) -> int:
        """Tokens that, once computed, the row never goes back to."""
        return self.num_prompt if self.scoring is not None and self.scoring.rewinds else self.max_total

    @property
    def reusable(self) -> int:
        """Tokens whose KV may come from the cache: not where logits are needed, which only a computed token has."""
        return (len(self.token_ids) if self.scoring is None else self.scoring.start) - 1

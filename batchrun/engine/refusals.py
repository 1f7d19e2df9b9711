"""Requests that can never run, and why."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from batchrun.engine.kv_cache import BlockPool
from batchrun.engine.params import Completion, Request, foreign_token, refusal
from batchrun.engine.token_rules import RuleBook


class Refusals:
    """What an engine can run: rows of `max_model_len` tokens at most, of a vocabulary, with adapters of these names."""

    def __init__(self, max_model_len: int, rules: RuleBook, adapters: Collection[str]) -> None:
        self.max_model_len = max_model_len
        self._rules = rules
        self._adapters = adapters

    def look(self, request: Request, ids: np.ndarray, pool: BlockPool, budget: int) -> Completion | None:
        """The completion of a request that is refused; `ids` int64 [n] are its prompt, steps have `budget` tokens."""
        follow = max(map(len, request.continuations), default=min(1, request.params.max_tokens))
        limit = self.max_model_len
        if len(request.continuations) > 1:  # until the last is tried, no window leaves the end of the prompt behind
            limit = pool.longest_row(limit, max(budget, follow))
        if len(ids) == 0:
            return refusal(request, "empty_prompt", "the prompt has no tokens")
        if not all(request.continuations):
            return refusal(request, "invalid_row", "a continuation has no tokens")
        if len(ids) + follow > limit:
            what = f"{follow} to score" if request.continuations else "one generated token"
            why = f"the prompt has {len(ids)} tokens; with {what} at most {limit} fit"
            return refusal(request, "prompt_too_long", why)
        wrong = self._wrong(request, ids)
        return None if wrong is None else refusal(request, "invalid_row", wrong)

    def _wrong(self, request: Request, ids: np.ndarray) -> str | None:
        given = np.concatenate([ids, *request.continuations]).astype(np.int64)
        if (wrong := foreign_token(given, self._rules.vocab_size)) is not None:
            return wrong
        if request.params.adapter not in (None, *self._adapters):
            return f"adapter={request.params.adapter!r} is not one of model.adapters={list(self._adapters)}"
        try:
            self._rules.of(request.params)
        except ValueError as error:
            return str(error)
        return None

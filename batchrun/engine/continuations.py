"""The likelihood of given tokens: which of them a row computes when, and what was found.

A row's continuations are tried in place, one after the other: the prompt's KV stays, and what follows it is written
over. They form a trie, which is walked depth first, so each of its inner nodes is computed once: the logits after a
node tell the likelihood of all its children, and a last token need not be computed at all. Single tokens are scored
by the prompt alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Self

import numpy as np

from batchrun.engine.params import Likelihood, Request, TokenLogprobs

Tokens = tuple[int, ...]
REMEMBERED = 64  # sets of continuations whose walk is kept: most jobs have one


@dataclass(frozen=True, slots=True)
class Pass:
    """Tokens that stand after the prompt at once, and M tokens whose likelihood they tell."""

    path: np.ndarray  # int32 [n]
    keep: int  # of these, the first so many have been computed by the pass before
    depths: np.ndarray  # int64 [M], ascending: how many tokens of the path stand before the scored token
    tokens: np.ndarray  # int64 [M]: the scored tokens
    places: np.ndarray  # int64 [M]: their places among the tokens of all continuations, laid end to end


@lru_cache(maxsize=REMEMBERED)
def walk(continuations: tuple[Tokens, ...]) -> list[Pass]:
    """The passes that score all continuations, none of which is empty."""
    first = np.cumsum([0, *map(len, continuations)]).tolist()
    done = [0] * len(continuations)
    passes: list[Pass] = []
    before: Tokens = ()
    for path in _leaves({tokens[:-1] for tokens in continuations}):
        found = []
        for i, tokens in enumerate(continuations):
            stop = max(done[i], min(_common(tokens, path) + 1, len(tokens)))
            found += [(depth, tokens[depth], first[i] + depth) for depth in range(done[i], stop)]
            done[i] = stop
        depths, scored, places = np.array(sorted(found), dtype=np.int64).T
        passes.append(Pass(np.array(path, dtype=np.int32), _common(path, before), depths, scored, places))
        before = path
    return passes


def _leaves(paths: set[Tokens]) -> Iterator[Tokens]:
    """Those that no other begins with, in the order of the trie."""
    ordered = sorted(paths)
    for path, after in zip_longest(ordered, ordered[1:]):
        if after is None or after[: len(path)] != path:
            yield path


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


class Scoring:
    """What one row scores, how far it is, and what it found so far.

    The row is its first `start` tokens and the path of the pass under way. A pass may be computed again from the
    beginning, as after a preemption: it finds the same. With `top`, also the so many likeliest tokens are noted.
    """

    def __init__(self, start: int, passes: list[Pass], lengths: list[int], top: int = 0) -> None:
        self.start = start
        self.top = top
        self._passes = passes
        self._lengths = lengths
        self._number = 0
        self.logprobs = np.full(sum(lengths), np.nan)
        self.greedy = np.zeros(sum(lengths), dtype=bool)
        self.top_ids = np.zeros((sum(lengths), top), dtype=np.int32)
        self.top_logprobs = np.full((sum(lengths), top), np.nan, dtype=np.float32)

    @classmethod
    def after(cls, prompt: np.ndarray, continuations: tuple[Tokens, ...]) -> Self:
        """Of what may follow a prompt."""
        return cls(len(prompt), walk(continuations), [len(tokens) for tokens in continuations])

    @classmethod
    def within(cls, prompt: np.ndarray, top: int) -> Self:
        """Of a prompt's own tokens, all but the first."""
        tokens, depths = prompt[1:].astype(np.int64), np.arange(len(prompt) - 1)
        return cls(1, [Pass(prompt[1:].astype(np.int32), 0, depths, tokens, depths)], [len(tokens)], top)

    @property
    def current(self) -> Pass:
        return self._passes[self._number]

    @property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return max(self._lengths) - 1

    @property
    def rewinds(self) -> bool:
        """Whether the row goes back to the end of the prompt after a pass, for another one."""
        return len(self._passes) > 1

    def wanted(self, first: int, stop: int) -> slice:
        """The scored tokens of the pass that the logits at positions [first, stop) of the row tell."""
        low, high = np.searchsorted(self.current.depths, (first - self.start + 1, stop - self.start + 1))
        return slice(int(low), int(high))

    def note(self, wanted: slice, logprobs: np.ndarray, greedy: np.ndarray) -> None:
        """What the model says of those tokens: float32 and bool [M]."""
        places = self.current.places[wanted]
        self.logprobs[places], self.greedy[places] = logprobs, greedy

    def note_top(self, wanted: slice, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """The likeliest tokens in their place: int and float32 [M, `top` or more]."""
        places = self.current.places[wanted]
        self.top_ids[places], self.top_logprobs[places] = ids[:, : self.top], logprobs[:, : self.top]

    def advance(self) -> bool:
        """The pass is computed: go on to the next. False if there is none."""
        if self._number + 1 == len(self._passes):
            return False
        self._number += 1
        return True

    def likelihoods(self) -> list[Likelihood]:
        """What was found for each continuation."""
        stops = np.cumsum(self._lengths)[:-1]
        return list(map(Likelihood, np.split(self.logprobs, stops), np.split(self.greedy, stops)))

    def token_logprobs(self) -> TokenLogprobs:
        """The same of tokens scored by `within`, with the likeliest beside them."""
        ids = np.concatenate([self.current.tokens[:, None], self.top_ids], axis=1)
        logprobs = np.concatenate([self.logprobs[:, None], self.top_logprobs], axis=1)
        return TokenLogprobs(ids.astype(np.int32), logprobs.astype(np.float32))


def open_scoring(request: Request, prompt: np.ndarray, vocab_size: int) -> Scoring | None:
    """What a request asks to be scored; None if it does not."""
    if request.continuations:
        return Scoring.after(prompt, request.continuations)
    top = request.params.prompt_logprobs
    return None if top is None else Scoring.within(prompt, min(top, vocab_size))

"""Rows whose text must have a form: which tokens may come next, and which must.

Grammars, their state in each row and the masks are llguidance's. A mask follows from the tokens that a row has, so
those of a step are computed in a thread while the model runs, and are there when its logits are.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from batchrun.engine.staging import upload
from batchrun.engine.structure import StructuredOutputs, plain_error

REMEMBERED_GRAMMARS = 1024


class Constraint:
    """What one row has said of its form, and what it may still say.

    A matcher belongs to whoever has borrowed it: while its mask is computed, without the GIL, every other call raises
    RuntimeError. So each use of it here waits for the mask that has been asked for, which then is that of the tokens
    before.
    """

    def __init__(self, matcher: LLMatcher, fast_forward: bool) -> None:
        self._matcher = matcher
        self._fast_forward = fast_forward
        self._mask: Future[np.ndarray] | None = None

    @property
    def matcher(self) -> LLMatcher:
        """The row's own, for the thread of the engine alone, which has it back from that of the masks."""
        if self._mask is not None:
            self._mask.exception()
            self._mask = None
        return self._matcher

    def lend(self, mask: Future[np.ndarray]) -> None:
        """The matcher is in use until the mask is there."""
        self._mask = mask

    @property
    def complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return self.matcher.is_stopped() and not self.error

    @property
    def error(self) -> str:
        """Why the row cannot go on; empty if it can."""
        return plain_error(self.matcher.get_error())

    def take(self, token: int) -> None:
        """The row has this token next. One that the form does not allow is an `error`."""
        self.matcher.consume_token(token)

    def forced(self, limit: int) -> list[int]:
        """Up to `limit` tokens that must come now; the row has them next."""
        if not self._fast_forward or limit <= 0:
            return []
        tokens = self.matcher.compute_ff_tokens()[:limit]
        if tokens:
            self.matcher.consume_tokens(tokens)
        return tokens

    def opening(self, limit: int) -> list[int]:
        """The tokens that must come first, but the last of all: every row ends in a step, which samples a token."""
        tokens = self.forced(limit)
        if tokens and self.matcher.is_stopped():
            self.matcher.rollback(1)
            tokens.pop()
        return tokens


class Masks:
    """Which tokens K rows of a step must not have, on their way."""

    def __init__(self, rows: np.ndarray, forbidden: Future[np.ndarray]) -> None:
        self._rows = rows
        self._forbidden = forbidden

    def wait(self) -> np.ndarray:
        """The masks, uint8 [K, ceil(V / 8)] with the lowest bit first: 1 for a token that is not allowed."""
        return self._forbidden.result()

    @torch.inference_mode()
    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits of forbidden tokens to -inf in place, in the constrained ones of the rows (float [K, V])."""
        bits, rows = upload(logits.device, self.wait(), self._rows)
        limits = _limits(logits.dtype, logits.device)[bits.int()].flatten(1)[:, : logits.shape[1]]
        if len(self._rows) == len(logits):
            torch.minimum(logits, limits, out=logits)
        else:
            logits[rows] = torch.minimum(logits[rows], limits)


class Constraints:
    """The grammars of all rows, each compiled once. The tokenizer is prepared when the first row asks."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._words: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._matchers: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()

    def open(self, form: StructuredOutputs, fast_forward: bool = True) -> Constraint:
        """The constraint of a new row. Raises ValueError for a form that cannot be used, or a tokenizer."""
        matcher = self._matchers.get(form)
        if matcher is None:
            matcher = LLMatcher(self._prepared_tokenizer(), form.compiled(), log_level=0)
            if matcher.is_error():
                raise ValueError(f"{form.kind} cannot be used: {plain_error(matcher.get_error())}")
            self._matchers[form] = matcher
            if len(self._matchers) > REMEMBERED_GRAMMARS:
                self._matchers.popitem(last=False)
        else:
            self._matchers.move_to_end(form)
        return Constraint(matcher.deep_copy(), form.fast_forward and fast_forward)

    def begin(self, rows: np.ndarray, constraints: Sequence[Constraint]) -> Masks:
        """Start to compute the masks of the rows `rows` (int64 [n]) among those that a step samples."""
        if self._thread is None or self._executor is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._executor = LLExecutor()
        forbidden = self._thread.submit(self._fill, [constraint.matcher for constraint in constraints])
        for constraint in constraints:
            constraint.lend(forbidden)
        return Masks(rows, forbidden)

    def _fill(self, matchers: Sequence[LLMatcher]) -> np.ndarray:
        assert self._words is not None
        assert self._executor is not None
        allowed = np.zeros((len(matchers), -(-self._words.vocab_size // 32)), dtype=np.int32)
        places = [(matcher, i) for i, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(places, allowed.ctypes.data, allowed.shape[1] * 4, len(matchers))
        return np.invert(allowed, out=allowed).view(np.uint8)

    def _prepared_tokenizer(self) -> LLTokenizer:
        if self._words is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise ValueError("structured outputs need a tokenizer of the kind that transformers calls fast")
            text = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
            # A tokenizer may have words beyond the model's last one, and a model rows of its head beyond all words.
            size = max(self._vocab_size, len(self._tokenizer))
            try:
                self._words = LLTokenizer(json.dumps(text), n_vocab=size, eos_token=self._eos_ids or None)
            except ValueError as error:
                raise ValueError(f"structured outputs cannot work with this model's tokenizer: {error}") from error
        return self._words


@cache
def _limits(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, 8]: for a byte of a mask, the most that the logits of its eight tokens may be, so that a mask is applied
    without a branch for each token."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, -np.inf, np.inf)).to(device, dtype)

"""The engine for embeddings and scores: texts in, one vector each out, a batch of about equal lengths a step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchrun.engine.deltas import Piece
from batchrun.engine.encoder_model import EncoderModel
from batchrun.engine.length_window import LengthWindow
from batchrun.engine.params import Completion, Request, foreign_token, refusal
from batchrun.engine.stats import StepStats
from batchrun.errors import ErrorType

WINDOW = 8  # texts that wait for each that a step may take: the more, the more of them have one length


@dataclass(slots=True)
class _Text:
    request: Request
    ids: np.ndarray  # int64 [n]
    arrived_at: float  # seconds, time.perf_counter


class Encoder:
    """Batches over a model that gives a vector for a text. The same door as Engine; not thread-safe.

    A completion's `values` is the vector. Sampling parameters of requests mean nothing here.
    """

    def __init__(self, model: EncoderModel, max_length: int, max_num_seqs: int, max_batched_tokens: int) -> None:
        self.model = model
        self.max_length = max_length
        self.window = LengthWindow(max_num_seqs, max_batched_tokens)
        self._capacity = WINDOW * max_num_seqs
        self._texts: dict[Any, _Text] = {}
        self._refused: list[Completion] = []
        self._steps: list[StepStats] = []

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run comes back from the next step with finish_reason "error"."""
        ids = np.asarray(request.prompt_ids, dtype=np.int64)
        if refused := self._refuse(request, ids):
            self._refused.append(refused)
            return
        self._texts[request.key] = _Text(request, ids, time.perf_counter())
        self.window.add(request.key, len(ids))

    def abort(self, key: Any) -> None:
        """Forget a request; an unknown or finished key is ignored."""
        self._texts.pop(key, None)
        self.window.remove(key)

    def drop_waiting(self) -> list[Any]:
        """Forget every request, as none is under way between two steps; returns their keys."""
        self._texts.clear()
        return self.window.clear()

    @property
    def room(self) -> int:
        """Requests worth adding."""
        return max(0, self._capacity - len(self.window))

    def has_work(self) -> bool:
        return bool(self._refused or self._texts)

    def step(self) -> list[Completion]:
        """Compute one batch: its completions, and those of the requests that were refused since."""
        finished, self._refused = self._refused, []
        if not self._texts:
            return finished
        started = time.perf_counter()
        texts = [self._texts.pop(key) for key in self.window.take()]
        lengths = np.array([len(text.ids) for text in texts])
        vectors = self.model.forward([text.ids for text in texts], _type_ids(texts))
        now = time.perf_counter()
        self._note_step(lengths, now - started)
        return finished + [
            Completion(
                text.request.key, "", [], "stop", values=vector, prompt_tokens=len(text.ids),
                queue_s=started - text.arrived_at, total_s=now - text.arrived_at,
            )
            for text, vector in zip(texts, vectors, strict=True)
        ]  # fmt: skip

    def stop(self, key: Any) -> None:
        """Nothing: a text has its whole vector or none."""

    def take_pieces(self) -> list[Piece]:
        """None: vectors do not grow."""
        return []

    def wake(self) -> None:
        """Nothing waits here."""

    def take_steps(self) -> list[StepStats]:
        """Statistics of the steps since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def check_integrity(self) -> None:
        """Raise AssertionError unless every text that is held waits for a step."""
        assert len(self._texts) == len(self.window), "texts that no step will take"
        assert all(key in self.window for key in self._texts), "a text that no step will take"

    def close(self) -> None:
        """Nothing to end: the engine lives in this process."""

    def _refuse(self, request: Request, ids: np.ndarray) -> Completion | None:
        kind: ErrorType
        if len(ids) == 0:
            kind, why = "empty_prompt", "the text has no tokens"
        elif len(ids) > self.max_length:
            kind, why = "prompt_too_long", f"the text has {len(ids)} tokens; at most {self.max_length} fit"
        elif (wrong := foreign_token(ids, self.model.vocab_size)) is not None:
            kind, why = "invalid_row", wrong
        elif request.key in self._texts:
            raise ValueError(f"request key {request.key!r} is already in the engine")
        else:
            return None
        return refusal(request, kind, why)

    def _note_step(self, lengths: np.ndarray, seconds: float) -> None:
        tokens = int(lengths.sum())
        self._steps.append(
            StepStats(
                seconds=seconds,
                tokens=tokens,
                sampled=len(lengths),
                running=len(lengths),
                waiting=len(self.window),
                kv_used=0.0,
                hit_rate=0.0,
                ideal_hit_rate=0.0,
                preemptions=0,
                forced=0,
                padding=len(lengths) * int(lengths.max()) - tokens,
            )
        )


def _type_ids(texts: list[_Text]) -> list[np.ndarray] | None:
    """Which part of its pair each token is of, where any text is a pair."""
    given = [text.request.type_ids for text in texts]
    if all(types is None for types in given):
        return None
    return [
        np.zeros(len(text.ids), dtype=np.int64) if types is None else np.asarray(types)
        for text, types in zip(texts, given, strict=True)
    ]

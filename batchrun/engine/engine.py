"""The engine: requests in, completions out, one step at a time."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from batchrun.engine.batch import Batch
from batchrun.engine.constraints import Constraints, Masks
from batchrun.engine.continuations import open_scoring
from batchrun.engine.deltas import Piece, PieceWriter
from batchrun.engine.detokenizer import StopMatcher, whole_characters
from batchrun.engine.forms import End, Forms
from batchrun.engine.kv_cache import BlockPool, block_hashes, root
from batchrun.engine.likelihoods import score_step
from batchrun.engine.logits import edit_logits, without_choice
from batchrun.engine.logprobs import LogprobRecord, StepLogprobs
from batchrun.engine.model import PagedModel
from batchrun.engine.params import Completion, Request, SamplingParams, foreign_token, refusal
from batchrun.engine.sampler import sample
from batchrun.engine.scheduler import Scheduler
from batchrun.engine.sequence import Sequence
from batchrun.engine.thinking import Thinkers, Thinking
from batchrun.engine.token_rules import RuleBook
from batchrun.errors import ErrorType


@dataclass(slots=True)
class StepStats:
    """One step, for metrics."""

    seconds: float
    tokens: int  # query tokens computed
    sampled: int  # rows that got a token
    forced: int  # tokens that rows got without it, as the form of their text left no choice
    running: int
    waiting: int
    kv_used: float  # share of the KV blocks that are held
    hit_rate: float  # share of all prompt tokens so far that were found in the cache
    ideal_hit_rate: float  # what it would be with a cache that forgets nothing
    preemptions: int  # so far
    padding: int = 0  # places of padding that were computed beside the tokens


class Engine:
    """Continuously refilled batches over one model. Not thread-safe."""

    def __init__(
        self,
        model: PagedModel,
        tokenizer: Any,
        pool: BlockPool,
        eos_ids: set[int],
        max_model_len: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.pool = pool
        self.eos_ids = np.array(sorted(eos_ids), dtype=np.int64)
        self.adapters = {name: number for number, name in enumerate(adapters, 1)}
        self.max_model_len = pool.longest_row(max_model_len, max_batched_tokens)
        # A step must have room for one token of every running row, or prompts could starve.
        self.scheduler = Scheduler(pool, min(max_num_seqs, max_batched_tokens), max_batched_tokens)
        self.rules = RuleBook(tokenizer, model.vocab_size, self.eos_ids)
        self.last_step: StepStats | None = None
        self._steps: list[StepStats] = []
        self._sequences: dict[Any, Sequence] = {}
        self._pieces = PieceWriter(tokenizer)
        self._thinkers = Thinkers(tokenizer)
        self._refused: list[Completion] = []
        self._num_added = 0
        self.constraints = Constraints(tokenizer, model.vocab_size, eos_ids)
        self._forms = Forms(self.constraints, self.rules, self.scheduler.slots)

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run comes back from the next step with finish_reason "error".

        Raises ValueError for a request of several samples, and for a key that is in the engine.
        """
        if request.params.n != 1:
            raise ValueError(f"n={request.params.n}: a request asks for one sample; make one of each, or ask LLM")
        self._num_added += 1
        given = np.asarray(request.prompt_ids, dtype=np.int64)
        if refused := self._refuse(request, given):
            self._refused.append(refused)
            return
        params, caching = request.params, self.pool.prefix_caching
        scoring = open_scoring(request, given, self.model.vocab_size)
        follow = params.max_tokens if scoring is None or not request.continuations else scoring.longest
        max_total = min(len(given) + follow, self.max_model_len)
        thinking = None
        if params.reasoning is not None:
            constrained = params.structured_outputs is not None
            thinking = self._thinkers.open(params.reasoning, given, decide_at_once=constrained)
        try:
            # The form is that of the answer: it says nothing of what comes before.
            constraint, opening = self._forms.open(params, max_total - len(given) if thinking is None else 0)
        except ValueError as error:
            self._refused.append(refusal(request, "constraint_error", str(error)))
            return
        adapter = 0 if params.adapter is None else self.adapters[params.adapter]
        path = scoring.current.path if scoring is not None and request.continuations else ()
        ids = np.concatenate([given, path, opening]).astype(np.int32)
        lasting = len(given) if request.continuations else len(ids)
        sequence = Sequence(
            request=request,
            seed=self._num_added if params.seed is None else params.seed,
            token_ids=ids,
            num_prompt=len(given),
            max_total=max_total,
            constraint=constraint,
            scoring=scoring,
            digests=block_hashes(ids[:lasting], self.pool.block_size, root(adapter)) if caching else [],
            arrived_at=time.perf_counter(),
            stops=self._stops(params),
            rules=self.rules.of(params),
            thinking=thinking,
            adapter=adapter,
        )
        if params.logprobs is not None:
            sequence.logprobs = LogprobRecord(min(params.logprobs, self.model.vocab_size))
        self._sequences[request.key] = sequence
        if request.deltas:
            self._pieces.open(sequence)
        self.scheduler.add(sequence)

    def abort(self, key: Any) -> None:
        """Forget a request and free its blocks; an unknown or finished key is ignored."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._pieces.close(key)
            self.scheduler.abort(sequence)

    def stop(self, key: Any) -> Completion | None:
        """End a request with the tokens it has; None for an unknown or finished key."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return None
        self.scheduler.abort(sequence)
        self._pieces.close(key)
        return self._complete(sequence, None, None, "stop")

    def drop_waiting(self) -> list[Any]:
        """Forget every request that is not running, and return their keys."""
        keys = [sequence.request.key for sequence in self.scheduler.waiting]
        for key in keys:
            self.abort(key)
        return keys

    @property
    def room(self) -> int:
        """Requests worth adding: enough wait so that no step runs short, and no more are held."""
        # Preempted rows wait too, beyond what was let in.
        return max(0, self.scheduler.slots.capacity - len(self.scheduler.waiting))

    def has_work(self) -> bool:
        return bool(self._refused) or self.scheduler.has_work()

    def step(self) -> list[Completion]:
        """Schedule, compute, sample, collect: the requests that this step finished."""
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        refused, self._refused = self._refused, []
        if batch is None:
            return refused
        masks = self._forms.begin_masks(batch)
        try:
            hidden = self.model.hidden(batch)
            logits = self.model.logits(hidden, batch.logits_index)
        except torch.OutOfMemoryError:
            if batch.num_tokens == 1:
                raise
            self.scheduler.lower_budget(batch.num_tokens // 2)
            return refused
        next_tokens = self._sample(batch, logits, masks)
        self.scheduler.advance(batch, next_tokens)
        finished = self._score(batch, hidden) + self._collect(batch.slots[batch.sampled], next_tokens)
        self._pieces.write(self.scheduler.slots, finished)
        self._note_step(batch, time.perf_counter() - started)
        return refused + finished

    def take_steps(self) -> list[StepStats]:
        """Statistics of the steps since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def take_pieces(self) -> list[Piece]:
        """What the requests with `deltas` have come to since the last call, in order."""
        return self._pieces.take()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the KV cache is consistent."""
        self.pool.check_integrity()
        if self.scheduler.swap is not None:
            self.scheduler.swap.check_integrity(self.scheduler.waiting)

    def wake(self) -> None:
        """Nothing to wake: a step waits for nothing."""

    def close(self) -> None:
        """Nothing to end: the engine lives in this process."""

    @torch.inference_mode()
    def _sample(self, batch: Batch, logits: Any, masks: Masks | None) -> np.ndarray:
        """The next token of each row that samples (int64 [K]); -1 for a row that no token is left for."""
        slots, rows = self.scheduler.slots, batch.slots[batch.sampled]
        if not len(rows):
            return np.empty(0, dtype=np.int64)
        asking = np.flatnonzero(slots.num_logprobs[rows] >= 0)
        if len(asking) or (slots.edited[rows] | (slots.min_tokens[rows] > 0)).any():
            logits = logits.float()
        logprobs = StepLogprobs(logits, asking, int(slots.num_logprobs[rows].max())) if len(asking) else None
        edited = edit_logits(logits, slots, rows)
        if masks is not None:
            masks.apply(logits)
        tokens = sample(
            logits,
            slots.temperature[rows],
            slots.top_k[rows],
            slots.top_p[rows],
            slots.min_p[rows],
            slots.seed[rows],
            slots.num_tokens[rows],
        )
        tokens[without_choice(logits, edited, tokens)] = -1
        if logprobs is not None:
            self._note_logprobs(rows[asking], *logprobs.with_chosen(tokens))
        return tokens

    def _note_logprobs(self, rows: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
        for slot, row_ids, row_values in zip(rows, ids, values, strict=True):
            record = self._sequence(slot).logprobs
            assert record is not None
            record.add(row_ids[: record.count + 1], row_values[: record.count + 1])

    def _collect(self, rows: np.ndarray, next_tokens: np.ndarray) -> list[Completion]:
        """Look for ends: vector operations for all rows, Python only for those that end or watch for stops."""
        slots, now = self.scheduler.slots, time.perf_counter()
        for slot in rows[slots.untouched[rows]]:
            self._sequence(slot).first_token_at = now
        slots.untouched[rows] = False
        at_eos = np.isin(next_tokens, self.eos_ids) & ~slots.ignore_eos[rows]
        at_length = slots.num_tokens[rows] >= slots.max_total[rows]
        repeats = slots.repetition.look(rows, slots.token_ids, slots.num_tokens, slots.num_prompt)
        stuck = next_tokens < 0
        finished = []
        ending = at_eos | at_length | repeats | stuck
        for i in np.flatnonzero(ending | slots.watched[rows] | slots.constrained[rows]):
            slot, token = int(rows[i]), int(next_tokens[i])
            if stuck[i]:
                finished.append(self._fail(slot))
                continue
            follows = slots.constrained[slot]  # which the end of its thinking changes
            ended: End | None = (None, token, "stop") if at_eos[i] else self._find_stop(slot, token)
            if follows:
                ended = self._forms.follow(slot, token, ended, self._find_stop)
            if ended is None and (repeats[i] or slots.num_tokens[slot] >= slots.max_total[slot]):
                ended = (None, None, "repetition" if repeats[i] else "length")
            if ended is not None:
                finished.append(self._finish(slot, *ended))
        return finished

    def _score(self, batch: Batch, hidden: Any) -> list[Completion]:
        """Note what the step tells of given tokens; rows end that have all they asked for and generate nothing."""
        return [self._finish_scored(slot) for slot in score_step(self.model, self.scheduler.slots, batch, hidden)]

    def _find_stop(self, slot: int, token: int) -> End | None:
        """Whether the row's own stops end it with this token."""
        sequence = self._sequence(slot)
        if sequence.thinking is not None and not sequence.thinking.over:
            return self._think(slot, sequence, sequence.thinking, token)
        return self._match_stop(sequence, token)

    def _think(self, slot: int, sequence: Sequence, thinking: Thinking, token: int) -> End | None:
        """Take a token before the answer, and end the thinking if it has had its tokens."""
        slots, params = self.scheduler.slots, sequence.request.params
        answer = thinking.add(token)
        if thinking.reasoning.stop_in_thinking and (ended := self._match_stop(sequence, token)) is not None:
            return ended
        if thinking.spent:
            closing = thinking.close(int(slots.max_total[slot] - slots.num_tokens[slot]))
            slots.append(slot, closing)
            if sequence.logprobs is not None:
                for each in closing:
                    sequence.logprobs.add_unsampled(each)
        if not thinking.over:
            return None
        slots.watched[slot] = bool(params.stop or params.stop_token_ids)
        sequence.stops = self._stops(params)
        if sequence.constraint is not None:
            slots.constrained[slot] = True
            if answer:  # sampled before it was known to be of the answer, whose form may forbid it
                slots.drop_last(slot)
                if sequence.logprobs is not None:
                    sequence.logprobs.drop_last()
                return None
        return next((end for each in answer if (end := self._match_stop(sequence, each)) is not None), None)

    def _match_stop(self, sequence: Sequence, token: int) -> End | None:
        if token in sequence.request.params.stop_token_ids:
            return None, token, "stop"
        match = None if sequence.stops is None else sequence.stops.add(token)
        return None if match is None else (*match, "stop")

    def _finish(self, slot: int, text: str | None, stop_reason: str | int | None, finish_reason: str) -> Completion:
        return self._complete(self.scheduler.finish(slot), text, stop_reason, finish_reason)

    def _complete(
        self, sequence: Sequence, text: str | None, stop_reason: str | int | None, finish_reason: str
    ) -> Completion:
        """What became of a sequence that has been taken out."""
        request, now = sequence.request, time.perf_counter()
        del self._sequences[request.key]
        token_ids = [int(token) for token in sequence.token_ids[sequence.num_prompt :]]
        hidden = isinstance(stop_reason, int) and not request.params.include_stop_str_in_output
        shown = token_ids[:-1] if hidden else token_ids
        thinking = sequence.thinking
        if text is None:
            answer = shown if thinking is None else shown[thinking.answer_at :]
            text = self.tokenizer.decode(answer, skip_special_tokens=request.params.skip_special_tokens)
            text = whole_characters(text) if finish_reason == "length" else text
        return Completion(
            key=request.key,
            text=text if thinking is None else thinking.answer(text),
            token_ids=token_ids,
            reasoning=None if thinking is None else thinking.thought(shown),
            reasoning_tokens=0 if thinking is None else thinking.count(token_ids),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error_type="constraint_error" if finish_reason == "error" else None,
            error=sequence.constraint.error if finish_reason == "error" and sequence.constraint else None,
            max_tokens=sequence.max_total - sequence.num_prompt,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.cached_tokens,
            queue_s=sequence.admitted_at - sequence.arrived_at,
            first_token_s=sequence.first_token_at - sequence.arrived_at,
            total_s=now - sequence.arrived_at,
            logprobs=None if sequence.logprobs is None else sequence.logprobs.take(),
            prompt_logprobs=sequence.prompt_logprobs,
        )

    def _fail(self, slot: int) -> Completion:
        """End a row that no token is left for."""
        sequence = self.scheduler.finish(slot)
        del self._sequences[sequence.request.key]
        done = len(sequence.token_ids) - sequence.num_prompt - 1
        why = (
            f"no token is possible after {done}: what its allowed_token_ids, bad_words, min_tokens and other "
            "constraints leave has nothing in common"
        )
        return refusal(sequence.request, "constraint_error", why)

    def _finish_scored(self, slot: int) -> Completion:
        sequence, now = self.scheduler.finish(slot), time.perf_counter()
        del self._sequences[sequence.request.key]
        asked, scoring = sequence.request.continuations, sequence.scoring
        return Completion(
            key=sequence.request.key,
            text="",
            token_ids=[],
            finish_reason="stop" if asked else "length",
            max_tokens=0,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.cached_tokens,
            queue_s=sequence.admitted_at - sequence.arrived_at,
            first_token_s=now - sequence.arrived_at,
            total_s=now - sequence.arrived_at,
            prompt_logprobs=sequence.prompt_logprobs,
            likelihoods=scoring.likelihoods() if scoring is not None and asked else None,
        )

    def _stops(self, params: SamplingParams) -> StopMatcher | None:
        return StopMatcher(self.tokenizer, params) if params.stop else None

    def _refuse(self, request: Request, ids: np.ndarray) -> Completion | None:
        kind: ErrorType
        follow = max(map(len, request.continuations), default=min(1, request.params.max_tokens))
        given = np.concatenate([ids, *request.continuations]).astype(np.int64)
        limit = self.max_model_len
        if len(request.continuations) > 1:  # until the last is tried, no window leaves the end of the prompt behind
            limit = self.pool.longest_row(limit, max(self.scheduler.max_batched_tokens, follow))
        if len(ids) == 0:
            kind, why = "empty_prompt", "the prompt has no tokens"
        elif not all(request.continuations):
            kind, why = "invalid_row", "a continuation has no tokens"
        elif len(ids) + follow > limit:
            what = f"{follow} to score" if request.continuations else "one generated token"
            kind = "prompt_too_long"
            why = f"the prompt has {len(ids)} tokens; with {what} at most {limit} fit"
        elif (wrong := foreign_token(given, self.model.vocab_size)) is not None:
            kind, why = "invalid_row", wrong
        elif request.key in self._sequences:
            raise ValueError(f"request key {request.key!r} is already in the engine")
        elif request.params.adapter not in (None, *self.adapters):
            kind = "invalid_row"
            why = f"adapter={request.params.adapter!r} is not one of model.adapters={list(self.adapters)}"
        elif (wrong := self._wrong_rules(request)) is not None:
            kind, why = "invalid_row", wrong
        else:
            return None
        return refusal(request, kind, why)

    def _wrong_rules(self, request: Request) -> str | None:
        try:
            self.rules.of(request.params)
        except ValueError as error:
            return str(error)
        return None

    def _note_step(self, batch: Batch, seconds: float) -> None:
        scheduler = self.scheduler
        self._steps.append(
            StepStats(
                seconds=seconds,
                tokens=batch.num_tokens,
                sampled=len(batch.sampled),
                forced=self._forms.take_forced(),
                running=len(batch.slots),
                waiting=len(scheduler.waiting),
                kv_used=1 - self.pool.num_free / self.pool.num_blocks,
                hit_rate=scheduler.cached_tokens / max(scheduler.prompt_tokens, 1),
                ideal_hit_rate=scheduler.cachable_tokens / max(scheduler.prompt_tokens, 1),
                preemptions=scheduler.num_preemptions,
            )
        )
        self.last_step = self._steps[-1]

    def _sequence(self, slot: int) -> Sequence:
        sequence = self.scheduler.slots.sequences[slot]
        assert sequence is not None
        return sequence


def row_seed(seed: int, *identity: object) -> int:
    """A row's own 63-bit seed from the job's seed and what identifies the row."""
    text = "\x1f".join(map(str, (seed, *identity)))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little") >> 1


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one of a row's samples: the first one's is the row's."""
    return row_seed(seed, sample) if sample else seed

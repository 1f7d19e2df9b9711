"""The engine: requests in, completions out, one step at a time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from batchrun.engine import completions
from batchrun.engine.batch import Batch
from batchrun.engine.constraints import Constraints
from batchrun.engine.continuations import open_scoring
from batchrun.engine.deltas import Piece, PieceWriter
from batchrun.engine.device import current
from batchrun.engine.executor import Executor, Launched
from batchrun.engine.forms import End, Forms
from batchrun.engine.kv_cache import BlockPool, block_hashes, root
from batchrun.engine.likelihoods import score_step
from batchrun.engine.logprobs import LogprobRecord
from batchrun.engine.model import PagedModel
from batchrun.engine.params import Completion, Request, refusal
from batchrun.engine.refusals import Refusals
from batchrun.engine.scheduler import Scheduler
from batchrun.engine.sequence import Sequence
from batchrun.engine.stats import StepStats
from batchrun.engine.step_errors import naming_step
from batchrun.engine.stops import Stops
from batchrun.engine.thinking import Thinkers
from batchrun.engine.token_rules import RuleBook


class Engine:
    """Continuously refilled batches over one model. Not thread-safe.

    With `overlap`, a step is launched before the tokens of the one before are read: the host reads them, looks for
    ends and plans on while the device computes. A row that has ended is computed once more for nothing.
    """

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
        overlap: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.pool = pool
        self.eos_ids = np.array(sorted(eos_ids), dtype=np.int64)
        self.adapters = {name: number for number, name in enumerate(adapters, 1)}
        self.max_model_len = pool.longest_row(max_model_len, max_batched_tokens)
        self.overlap = overlap
        # A step must have room for one token of every running row, or prompts could starve.
        self.scheduler = Scheduler(pool, min(max_num_seqs, max_batched_tokens), max_batched_tokens)
        self.executor = Executor(model, self.scheduler.slots, feeds=overlap)
        self.rules = RuleBook(tokenizer, model.vocab_size, self.eos_ids)
        self.last_step: StepStats | None = None
        self._steps: list[StepStats] = []
        self._sequences: dict[Any, Sequence] = {}
        self._pieces = PieceWriter(tokenizer)
        self._thinkers = Thinkers(tokenizer)
        self._refusals = Refusals(self.max_model_len, self.rules, self.adapters)
        self._refused: list[Completion] = []
        self._flying: Launched | None = None  # the step whose tokens are not read yet
        self._read_at = 0.0  # when those of the one before were
        self._num_launched = 0
        self._num_added = 0
        self.constraints = Constraints(tokenizer, model.vocab_size, eos_ids)
        self._forms = Forms(self.constraints, self.rules, self.scheduler.slots)
        self._stops = Stops(self.scheduler.slots, tokenizer)

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run comes back from the next step with finish_reason "error".

        Raises ValueError for a request of several samples, and for a key that is in the engine.
        """
        if request.params.n != 1:
            raise ValueError(f"n={request.params.n}: a request asks for one sample; make one of each, or ask LLM")
        self._num_added += 1
        given = np.asarray(request.prompt_ids, dtype=np.int64)
        if refused := self._refusals.look(request, given, self.pool, self.scheduler.max_batched_tokens):
            self._refused.append(refused)
            return
        if request.key in self._sequences:
            raise ValueError(f"request key {request.key!r} is already in the engine")
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
            stops=self._stops.of(params),
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
        del self._sequences[key]
        return completions.generated(sequence, self.tokenizer, (None, None, "stop"))

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
        """Schedule and launch a step, then collect the one before it, or where that must be, the step itself."""
        with current(self.model.device):
            return self._step()

    def _step(self) -> list[Completion]:
        started = time.perf_counter()
        finished, self._refused = self._refused, []
        before, self._flying = self._flying, None
        batch = self.scheduler.schedule()
        launched = None if batch is None else self._launch(batch, started)
        if before is not None:
            finished += self._collect(before)
        if launched is not None and self._may_wait(launched.batch):
            self._flying = launched
        elif launched is not None:
            finished += self._collect(launched)
        return finished

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

    def _launch(self, batch: Batch, started: float) -> Launched | None:
        """None if the step finds no memory: the next ones are smaller."""
        masks, number = self._forms.begin_masks(batch), self._num_launched + 1
        try:
            with naming_step(number, batch, self.scheduler.slots):
                launched = self.executor.launch(batch, masks, started, number)
        except torch.OutOfMemoryError:
            if batch.num_tokens == 1:
                raise
            self.scheduler.lower_budget(batch.num_tokens // 2)
            return None
        self._num_launched = number
        self.scheduler.advance(batch)
        return launched

    def _may_wait(self, batch: Batch) -> bool:
        return self.overlap and not self.scheduler.slots.need_host(batch.slots)

    def _collect(self, launched: Launched) -> list[Completion]:
        """Read what a step has computed: the requests that it finished."""
        batch = launched.batch
        with naming_step(launched.number, batch, self.scheduler.slots):
            tokens = launched.tokens.read()
        here = self.scheduler.receive(batch, tokens)
        rows, tokens = batch.slots[batch.sampled][here], tokens[here]
        if launched.asking is not None and launched.ids is not None and launched.logprobs is not None:
            kept = here[launched.asking]
            asking = batch.slots[batch.sampled][launched.asking][kept]
            self._note_logprobs(asking, launched.ids.read()[kept], launched.logprobs.read()[kept])
        finished = [] if launched.hidden is None else self._score(batch, launched.hidden)
        finished += self._find_ends(rows, tokens)
        self._pieces.write(self.scheduler.slots, finished)
        self._note_step(launched, len(rows))
        return finished

    def _note_logprobs(self, rows: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
        for slot, row_ids, row_values in zip(rows, ids, values, strict=True):
            record = self.scheduler.slots.sequence(slot).logprobs
            assert record is not None
            record.add(row_ids[: record.count + 1], row_values[: record.count + 1])

    def _find_ends(self, rows: np.ndarray, next_tokens: np.ndarray) -> list[Completion]:
        """Look for ends: vector operations for all rows, Python only for those that end or watch for stops."""
        slots, now = self.scheduler.slots, time.perf_counter()
        for slot in rows[slots.untouched[rows]]:
            slots.sequence(slot).first_token_at = now
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
                finished.append(completions.without_choice(self._take_out(slot)))
                continue
            follows = slots.constrained[slot]  # which the end of its thinking changes
            ended: End | None = (None, token, "stop") if at_eos[i] else self._stops.find(slot, token)
            if follows:
                ended = self._forms.follow(slot, token, ended, self._stops.find)
            if ended is None and (repeats[i] or slots.num_tokens[slot] >= slots.max_total[slot]):
                ended = (None, None, "repetition" if repeats[i] else "length")
            if ended is not None:
                finished.append(completions.generated(self._take_out(slot), self.tokenizer, ended))
        return finished

    def _score(self, batch: Batch, hidden: Any) -> list[Completion]:
        """Note what the step tells of given tokens; rows end that have all they asked for and generate nothing."""
        through = score_step(self.model, self.scheduler.slots, batch, hidden)
        return [completions.scored(self._take_out(slot)) for slot in through]

    def _take_out(self, slot: int) -> Sequence:
        sequence = self.scheduler.finish(slot)
        del self._sequences[sequence.request.key]
        return sequence

    def _note_step(self, launched: Launched, sampled: int) -> None:
        scheduler, batch, now = self.scheduler, launched.batch, time.perf_counter()
        seconds, self._read_at = now - max(launched.started, self._read_at), now
        self._steps.append(
            StepStats(
                seconds=seconds,
                tokens=batch.num_tokens,
                sampled=sampled,
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

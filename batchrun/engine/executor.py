"""A step on the device: the model, what rows want of their logits, the tokens. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from batchrun.engine.batch import Batch
from batchrun.engine.constraints import Masks
from batchrun.engine.device import runs_triton
from batchrun.engine.feedback import Feedback
from batchrun.engine.host_copy import HostCopy
from batchrun.engine.logits import edit_logits, mark_without_choice
from batchrun.engine.logprobs import StepLogprobs
from batchrun.engine.model import PagedModel
from batchrun.engine.sampler import sample
from batchrun.engine.slots import Slots
from batchrun.engine.staging import upload


@dataclass(slots=True)
class Drawn:
    """What a step has sampled, on the device. `asking` int64 [A]: places of rows that want log-probabilities."""

    tokens: torch.Tensor  # int64 [K]; -1 for a row that no token is left for
    asking: np.ndarray | None = None
    ids: torch.Tensor | None = None  # int32 [A, 1 + most], the row's token in front
    logprobs: torch.Tensor | None = None  # float32 [A, 1 + most]


@dataclass(slots=True)
class Launched:
    """A step that the device has been given: the handle to what comes of it."""

    batch: Batch
    hidden: Any  # of all its tokens, if it tells something of given ones
    tokens: HostCopy  # int64 [K]
    asking: np.ndarray | None  # as in Drawn
    ids: HostCopy | None
    logprobs: HostCopy | None
    started: float  # when it was planned: seconds, time.perf_counter
    number: int  # of the step, from 1


class Executor:
    """Launches the steps of an engine. With `feeds`, tokens of a step are kept on the device for the next one."""

    def __init__(self, model: PagedModel, slots: Slots, feeds: bool) -> None:
        self.model = model
        self.slots = slots
        self.feeds = feeds
        self.graphs: Any = None  # a DecodeGraphs, which only a machine with Triton can import
        self._counts: Any = None  # a TokenCounts, likewise
        on_triton = runs_triton(model.device)
        if feeds or on_triton:
            model.feedback = Feedback(slots.capacity, model.device)
        if on_triton:
            from batchrun.engine.token_counts import TokenCounts

            self._counts = TokenCounts(slots, model.vocab_size, model.device)
            slots.counts_apart = True

    def record(
        self, recorder: Any, max_model_len: int, expected_steps: Callable[[], float], at_once: bool = False
    ) -> None:
        """Replay decode steps from now on: see DecodeGraphs, whose errors this raises."""
        from batchrun.engine.graphs import DecodeGraphs

        if self.model.feedback is None:
            self.model.feedback = Feedback(self.slots.capacity, self.model.device)
        self.graphs = DecodeGraphs(self.model, self.slots, max_model_len, recorder, expected_steps, at_once)

    @torch.inference_mode()
    def launch(self, batch: Batch, masks: Masks | None, started: float, number: int) -> Launched:
        """Raises torch.OutOfMemoryError; the step may then be launched again, in smaller ones."""
        hidden, noted = None, False
        outputs = None if self.graphs is None else self.graphs.run(batch)
        if outputs is not None:
            logits, tokens = outputs
            noted = masks is None and not self._edits(batch)
            drawn = Drawn(tokens) if noted else self.draw(batch, logits, masks)
        else:
            hidden = self.model.hidden(batch)
            drawn = self.draw(batch, self.model.logits(hidden, batch.logits_index), masks)
        launched = Launched(
            batch=batch,
            hidden=hidden if self.slots.scoring[batch.slots].any() else None,
            tokens=HostCopy(drawn.tokens),
            asking=drawn.asking,
            ids=None if drawn.ids is None else HostCopy(drawn.ids),
            logprobs=None if drawn.logprobs is None else HostCopy(drawn.logprobs),
            started=started,
            number=number,
        )
        # After all that may fail: a step that is launched again takes the tokens from before this one.
        if not noted and len(batch.sampled):
            self._note(batch.slots[batch.sampled], drawn.tokens)
        return launched

    def _note(self, rows: np.ndarray, tokens: torch.Tensor) -> None:
        """Keep the tokens (int64 [K]) of the slots `rows` on the device, for the next step and its penalties."""
        counted = self._counts is not None and self._counts.table is not None
        if (self.feeds or counted) and self.model.feedback is not None:
            (slots,) = upload(tokens.device, rows)
            self.model.feedback.note(tokens, slots, self._counts.table if counted else None)
        if counted:
            self._counts.sampled(rows)

    def _edits(self, batch: Batch) -> bool:
        """Whether rows want more of their logits than a draw."""
        slots, rows = self.slots, batch.slots[batch.sampled]
        early = slots.num_tokens[rows] + slots.unread[rows] < slots.num_prompt[rows] + slots.min_tokens[rows]
        return bool((early | slots.edited[rows] | (slots.num_logprobs[rows] >= 0)).any())

    def draw(self, batch: Batch, logits: Any, masks: Masks | None) -> Drawn:
        """The next token of each row that samples, from logits [K, V]."""
        slots, rows = self.slots, batch.slots[batch.sampled]
        if not len(rows):
            return Drawn(torch.empty(0, dtype=torch.int64))
        asking = np.flatnonzero(slots.num_logprobs[rows] >= 0)
        if len(asking) or (slots.edited[rows] | (slots.min_tokens[rows] > 0)).any():
            logits = logits.float()
        logprobs = None
        if len(asking):
            most = int(slots.num_logprobs[rows].max())
            logprobs = StepLogprobs(logits, asking, most, exact=self.model.invariant)
        edited = edit_logits(logits, slots, rows, self._counts)
        if masks is not None:
            masks.apply(logits)
        tokens = sample(
            logits,
            slots.temperature[rows],
            slots.top_k[rows],
            slots.top_p[rows],
            slots.min_p[rows],
            slots.seed[rows],
            slots.num_tokens[rows] + slots.unread[rows],
        )
        mark_without_choice(logits, edited, tokens)
        if logprobs is None:
            return Drawn(tokens)
        return Drawn(tokens, asking, *logprobs.with_chosen(tokens))

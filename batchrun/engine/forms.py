"""The forms that texts of running rows must have: how they begin, which tokens may come, and which must."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from batchrun.engine.batch import Batch
from batchrun.engine.constraints import Constraint, Constraints, Masks
from batchrun.engine.params import SamplingParams
from batchrun.engine.slots import Slots
from batchrun.engine.token_rules import RuleBook

# How a row ended: (text if it differs from what its tokens decode to, what stopped it, finish reason).
End = tuple[str | None, str | int | None, str]


class Forms:
    """The rows of an engine that have a form. `take_forced` counts the tokens that they got without a step."""

    def __init__(self, constraints: Constraints, rules: RuleBook, slots: Slots) -> None:
        self._constraints = constraints
        self._rules = rules
        self._slots = slots
        self._num_forced = 0

    def open(self, params: SamplingParams, room: int) -> tuple[Constraint | None, list[int]]:
        """The form of a row's text, and the tokens that it begins with whatever the model says. Raises ValueError."""
        if params.structured_outputs is None:
            return None, []
        # The row's own rules may forbid a token that must come, and log-probabilities are of each token.
        fast_forward = params.logprobs is None and self._rules.of(params) is None
        constraint = self._constraints.open(params.structured_outputs, fast_forward)
        # A row with stops of its own may end at any token, and so gets them in steps.
        opening = [] if params.stop or params.stop_token_ids else constraint.opening(room - 1)
        self._num_forced += len(opening)
        return constraint, opening

    def begin_masks(self, batch: Batch) -> Masks | None:
        """Start to compute, beside the model, what rows of the step may say."""
        rows = batch.slots[batch.sampled]
        constrained = np.flatnonzero(self._slots.constrained[rows])
        if not len(constrained):
            return None
        return self._constraints.begin(constrained, [self._of(slot) for slot in rows[constrained]])

    def follow(
        self, slot: int, token: int, ended: End | None, find_stop: Callable[[int, int], End | None]
    ) -> End | None:
        """Whether the form of the row's text ends it with this token; if not, append the tokens that must follow.

        `find_stop` says whether the row's own stops end it with a token.
        """
        slots, constraint = self._slots, self._of(slot)
        constraint.take(token)
        if ended is None:
            forced = constraint.forced(int(slots.max_total[slot] - slots.num_tokens[slot]))
            stops = (find_stop(slot, token) for token in forced) if slots.watched[slot] else ()
            count, ended = next(((n, end) for n, end in enumerate(stops, 1) if end is not None), (len(forced), None))
            slots.append(slot, forced[:count])
            self._num_forced += count
        if constraint.error:
            return None, None, "error"
        if ended is None and constraint.complete:
            return None, None, "stop"
        if ended is None and slots.num_tokens[slot] >= slots.max_total[slot]:
            return None, None, "length"
        return ended

    def take_forced(self) -> int:
        """Tokens since the last call that rows got because nothing else could come."""
        count, self._num_forced = self._num_forced, 0
        return count

    def _of(self, slot: int) -> Constraint:
        sequence = self._slots.sequences[slot]
        assert sequence is not None
        assert sequence.constraint is not None
        return sequence.constraint

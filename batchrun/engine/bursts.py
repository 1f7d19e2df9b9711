"""Waiting rows that are let in together, on a device that replays the steps which only decode.

A step with a piece of a prompt in it is not recorded: it is launched piece by piece. With many short rows nearly every
step would have one. So while all rows decode, those that wait go on waiting until more places are free. What that costs
is summed: an empty place among N wastes R / N of a step that takes R. Rows are let in once the sum comes to what a
launched step, which takes E, costs beyond a replayed one, as who rents skis buys them when the rent has come to their
price. With rows of L tokens that is after N * sqrt(2 (E - R) / (R L)) ends, where both costs together are least.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

# Estimated, not measured.
REPLAYED_S = 0.001  # of the host, for a step that is replayed
LAUNCHED_S = 0.003  # and for one that is launched piece by piece
BYTES_PER_SECOND = 3.3e12
FLOPS_PER_SECOND = 400e12
RECENT_ROWS = 16


class StepCosts(NamedTuple):
    """What a launched step costs beyond a replayed one."""

    steps: float  # (E - R) / R
    tokens: float  # which the device computes in E - R: with so many in a step it does not wait for the host

    @classmethod
    def of(cls, weight_bytes: float, parameters: float) -> Self:
        """Of a model whose steps read so many bytes, and that multiplies each token by so many parameters."""
        replayed = max(REPLAYED_S, weight_bytes / BYTES_PER_SECOND)
        lost = max(0.0, LAUNCHED_S - replayed)
        return cls(lost / replayed, lost * FLOPS_PER_SECOND / (2 * parameters))


NO_LOSS = StepCosts(0.0, 0.0)


class Bursts:
    """When rows are let in: with NO_LOSS as soon as there is room. `replays`: whether steps that only decode are
    replayed."""

    def __init__(self, costs: StepCosts, replays: Callable[[], bool]) -> None:
        self.spared = 0.0  # launched steps that would have been replayed, had rows been let in together
        self._costs = costs
        self._replays = replays
        self._full = 0  # rows that ran when there was no room for another that waited; 0: there was
        self._wasted = 0  # places that were empty since then, counted in each step
        self._tokens_of_row = 0.0  # in its first step: mean of those let in of late

    def opens(self, running: int, decodes: bool) -> bool:
        """Whether rows may be let into a step of `running` rows, which `decodes` and nothing else. To be asked once for
        each step; `let_in` and `is_full` follow if they may."""
        if decodes and self._full and not self._is_due(max(0, self._full - running)):
            return False
        self._full = self._wasted = 0
        return True

    def let_in(self, tokens: int) -> None:
        """A row was, with so many tokens in its first step."""
        self._tokens_of_row += (tokens - self._tokens_of_row) / RECENT_ROWS

    def is_full(self, running: int) -> None:
        """There was no room for another beside so many."""
        self._full = running

    def _is_due(self, empty: int) -> bool:
        fills = empty * self._tokens_of_row >= self._costs.tokens
        if not self._replays():
            self.spared += 0.5 if empty and not fills else 0.0  # about what is left of them, with short rows
            return True
        self._wasted += empty
        return fills or self._wasted >= self._costs.steps * self._full

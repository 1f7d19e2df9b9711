"""Rows on their way through the engine: what is asked for each, and what comes back. Equal ones are asked once."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from batchrun.data.outputs import RowResult
from batchrun.data.prompt import Prompt
from batchrun.engine.params import Completion, Request
from batchrun.row import Row
from batchrun.tasks.base import Task, prompt_digest
from batchrun.turns import conversation

# Results that are kept for equal prompts to come: the last used ones, with so much text in all.
REMEMBERED_ROWS = 32_768
REMEMBERED_CHARS = 16 * 2**20


@dataclass(slots=True)
class Trip:
    """The requests that are under way for one row, and the rows that take their result: itself and its equals."""

    rows: list[Row]
    completions: list[Completion | None]
    twin: Hashable | None  # what equal rows have in common: all that their requests hold; None: not looked for
    attempts: int = 1


class Flight:
    """Which rows wait for which requests.

    With `dedup`, rows that ask for the same, and whose answers must be the same, are asked for once: those that come
    later wait for the first, or take its result if it is remembered.
    """

    def __init__(self, task: Task, dedup: bool) -> None:
        self.task = task
        self.dedup = dedup
        self._keys = count()
        self._waiting = 0
        self._trips: dict[Hashable, tuple[Trip, int]] = {}  # by key of a request, with its place among its row's
        self._leaders: dict[Hashable, Trip] = {}  # by twin
        self._known = Results(REMEMBERED_ROWS, REMEMBERED_CHARS)

    def __len__(self) -> int:
        """Rows that wait for a request."""
        return self._waiting

    def board(self, row: Row) -> list[Request] | RowResult | None:
        """What is to be done for a row: requests, nothing as its result is here, or wait for that of another."""
        while isinstance(what := self._ask(row), RowResult):
            if (whole := self._whole(row, what)) is not None:
                return whole
        return what

    def _ask(self, row: Row) -> list[Request] | RowResult | None:
        """The same for one of the row's prompts."""
        if row.prompt is None:
            return None
        if row.prompt.error_type is not None:
            return refused(row.prompt)
        try:
            requests, twin = self.task.requests(row), None
        except ValueError as error:  # parameters that are each in their range, and do not go together
            return refused(dataclasses.replace(row.prompt, error_type="invalid_row", error=str(error)))
        if not requests:
            return self.task.result(row, [])
        if self.dedup and self.task.repeatable(row, requests):
            twin = (*row.prompt.texts, *(_content(request) for request in requests))
            if (leader := self._leaders.get(twin)) is not None:
                leader.rows.append(row)
                self._waiting += 1
                return None
            if (result := self._known.get(twin)) is not None:
                return copied(result, row.prompt)
        trip = Trip([row], [None] * len(requests), twin)
        if twin is not None:
            self._leaders[twin] = trip
        self._register(trip, requests)
        self._waiting += 1
        return requests

    def land(self, completion: Completion) -> Iterator[tuple[Row, list[Request] | RowResult]]:
        """The rows that waited for this completion and no other, each with its result, or with requests for its next
        prompt."""
        trip, place = self._trips.pop(completion.key)
        trip.completions[place] = completion
        completions = [done for done in trip.completions if done is not None]
        if len(completions) < len(trip.completions):
            return
        first = trip.rows[0]
        if requests := self.task.again(first, completions, trip.attempts):
            trip.attempts, trip.completions = trip.attempts + 1, [None] * len(requests)
            self._register(trip, requests)
            yield first, requests
            return
        self._waiting -= len(trip.rows)
        result = self.task.result(first, completions)
        result.attempts = trip.attempts
        if trip.twin is not None:
            del self._leaders[trip.twin]
            if result.status == "ok":
                self._known.put(trip.twin, result)
        for row in trip.rows:
            mine = result if row is first else copied(result, row.prompt)
            what = self._whole(row, mine) or self.board(row)
            if what is not None:
                yield row, what

    def _whole(self, row: Row, result: RowResult) -> RowResult | None:
        """What a row comes to with the result of its prompt. None if it has another prompt, which it has from here."""
        if row.prompt is None or row.prompt.follow is None:
            return result
        row.answered.append(result)
        if result.status == "ok" and (prompt := row.prompt.follow([each.text or "" for each in row.answered])):
            row.prompt = prompt
            return None
        return conversation(row.answered, self.task.prompt_names)

    def _register(self, trip: Trip, requests: list[Request]) -> None:
        for place, request in enumerate(requests):
            request.key = next(self._keys)
            self._trips[request.key] = trip, place


def _content(request: Request) -> Hashable:
    types = None if request.type_ids is None else bytes(request.type_ids)
    return prompt_digest(request.prompt_ids), types, request.params, *map(prompt_digest, request.continuations)


class Results:
    """The results that were used last, within bounds of their number and of the characters of their texts."""

    def __init__(self, rows: int, chars: int) -> None:
        self.rows = rows
        self.chars = chars
        self._results: OrderedDict[Hashable, RowResult] = OrderedDict()
        self._held = 0

    def __len__(self) -> int:
        return len(self._results)

    def get(self, twin: Hashable) -> RowResult | None:
        result = self._results.get(twin)
        if result is not None:
            self._results.move_to_end(twin)
        return result

    def put(self, twin: Hashable, result: RowResult) -> None:
        """Remember a result that is not here."""
        self._results[twin] = result
        self._held += _size(result)
        while len(self._results) > self.rows or self._held > self.chars:
            _, old = self._results.popitem(last=False)
            self._held -= _size(old)


def _size(result: RowResult) -> int:
    """Roughly the characters that a result holds: those of its text, and of its values."""
    return len(result.text or "") + _length(result.values)


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (list, dict)):
        return sum(map(_length, value.values() if isinstance(value, dict) else value))
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return 0 if value is None else 8


def refused(prompt: Prompt) -> RowResult:
    """A row that could not be sent to the engine, or is not to be."""
    status = "skipped" if prompt.skipped else "error"
    return RowResult(
        status=status,
        finish_reason=status,
        error_type=prompt.error_type,
        error=prompt.error,
        prompt_tokens=len(prompt.ids),
    )


def copied(result: RowResult, prompt: Prompt | None) -> RowResult:
    """The result of a row with an equal prompt, for which nothing had to be computed."""
    return dataclasses.replace(
        result,
        truncated_tokens=prompt.truncated_tokens if prompt else 0,
        cached_tokens=result.prompt_tokens,
        deduplicated=True,
        queue_s=0.0,
        first_token_s=0.0,
        total_s=0.0,
    )

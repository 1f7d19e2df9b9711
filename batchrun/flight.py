"""Rows on their way through the engine: what is asked for each, and what comes back. Equal ones are asked once."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from batchrun.config import Config, SamplingConfig
from batchrun.data.buffer import ChunkBuffer
from batchrun.data.outputs import RowResult
from batchrun.data.prompt import Prompt
from batchrun.data.row_params import row_sampling
from batchrun.engine.engine import row_seed
from batchrun.engine.params import Completion, Request, SamplingParams

# Results that are kept for equal prompts to come: the last used ones, with so much text in all.
REMEMBERED_ROWS = 32_768
REMEMBERED_CHARS = 16 * 2**20

Twin = tuple[bytes, SamplingParams]  # what equal rows have in common: the prompt's digest, and how it is answered


@dataclass(slots=True)
class Row:
    """One input row on its way; `number` counts within its file. Without a prompt: the last row of a chunk is read,
    and all results are there."""

    buffer: ChunkBuffer
    number: int
    prompt: Prompt | None


class Flight:
    """Which rows wait for which request.

    With `run.dedup`, rows with the same prompt whose completions must be the same, because sampling is greedy or seeded
    by content, are one request: those that come later wait for it, or take its result if it is remembered.
    """

    def __init__(self, config: Config) -> None:
        self.dedup = config.run.dedup
        self.sampling = RowSampling(config.sampling)
        self._keys = count()
        self._waiting = 0
        self._rows: dict[Hashable, list[Row]] = {}
        self._twins: dict[Hashable, Twin] = {}  # by key of the request
        self._leaders: dict[Twin, Hashable] = {}  # keys of the requests under way
        self._known = Results(REMEMBERED_ROWS, REMEMBERED_CHARS)

    def __len__(self) -> int:
        """Rows that wait for a request."""
        return self._waiting

    def board(self, row: Row) -> Request | RowResult | None:
        """What is to be done for a row: a request, nothing as its result is here, or wait for that of another."""
        if row.prompt is None:
            return None
        if row.prompt.error_type is not None:
            return refused(row.prompt)
        params = self.sampling.of(row)
        key = next(self._keys)
        if self.dedup and (params.temperature == 0 or self.sampling.by_content(row)):
            twin = (digest(row.prompt.ids), params)
            if (leader := self._leaders.get(twin)) is not None:
                self._rows[leader].append(row)
                self._waiting += 1
                return None
            if (result := self._known.get(twin)) is not None:
                return copied(result, row.prompt)
            self._twins[key], self._leaders[twin] = twin, key
        self._rows[key] = [row]
        self._waiting += 1
        return Request(key, row.prompt.ids, params)

    def land(self, completion: Completion) -> Iterator[tuple[Row, RowResult]]:
        """The rows that waited for a request, each with its result."""
        first, *others = self._rows.pop(completion.key)
        self._waiting -= 1 + len(others)
        result = finished(first, completion)
        twin = self._twins.pop(completion.key, None)
        if twin is not None:
            del self._leaders[twin]
            if result.status == "ok":
                self._known.put(twin, result)
        yield first, result
        for row in others:
            yield row, copied(result, row.prompt)


class Results:
    """The results that were used last, within bounds of their number and of the characters of their texts."""

    def __init__(self, rows: int, chars: int) -> None:
        self.rows = rows
        self.chars = chars
        self._results: OrderedDict[Twin, RowResult] = OrderedDict()
        self._held = 0

    def __len__(self) -> int:
        return len(self._results)

    def get(self, twin: Twin) -> RowResult | None:
        result = self._results.get(twin)
        if result is not None:
            self._results.move_to_end(twin)
        return result

    def put(self, twin: Twin, result: RowResult) -> None:
        """Remember a result that is not here."""
        self._results[twin] = result
        self._held += len(result.text or "")
        while len(self._results) > self.rows or self._held > self.chars:
            _, old = self._results.popitem(last=False)
            self._held -= len(old.text or "")


class RowSampling:
    """The sampling parameters of each row: the job's, with the row's own in their place."""

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self.greedy = _params(config, seed=0) if config.temperature == 0 else None

    def of(self, row: Row) -> SamplingParams:
        """A row without a seed of its own gets one that follows from the job's seed and the row's place or prompt."""
        own = (row.prompt.params if row.prompt else None) or {}
        if self.greedy is not None and not own:
            return self.greedy
        s = row_sampling(self.config, own)
        if s.temperature == 0:
            return _params(s, seed=0)
        if "seed" in own:
            return _params(s, s.seed)
        if s.seed_by == "content" and row.prompt is not None:
            return _params(s, row_seed(s.seed, digest(row.prompt.ids).hex()))
        return _params(s, row_seed(s.seed, row.buffer.source_name, row.number))

    def by_content(self, row: Row) -> bool:
        """Whether the row's seed follows from its prompt, so that equal prompts have equal completions."""
        own = (row.prompt.params if row.prompt else None) or {}
        return "seed" in own or own.get("seed_by", self.config.seed_by) == "content"


def _params(s: SamplingConfig, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=s.max_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        seed=seed,
        stop=tuple(s.stop),
        stop_token_ids=tuple(s.stop_token_ids),
        ignore_eos=s.ignore_eos,
        skip_special_tokens=s.skip_special_tokens,
        repetition_max_pattern=s.repetition_max_pattern,
        repetition_min_pattern=s.repetition_min_pattern,
        repetition_min_count=s.repetition_min_count,
    )


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


def finished(row: Row, completion: Completion) -> RowResult:
    """A row that the engine is done with."""
    failed = completion.error_type is not None
    return RowResult(
        text=None if failed else completion.text,
        finish_reason=completion.finish_reason,
        status="error" if failed else "ok",
        error_type=completion.error_type,
        error=completion.error,
        prompt_tokens=completion.prompt_tokens,
        truncated_tokens=row.prompt.truncated_tokens if row.prompt else 0,
        cached_tokens=completion.cached_tokens,
        completion_tokens=len(completion.token_ids),
        max_tokens=completion.max_tokens,
        queue_s=completion.queue_s,
        first_token_s=completion.first_token_s,
        total_s=completion.total_s,
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


def digest(ids: Sequence[int]) -> bytes:
    """16 bytes that stand for a prompt."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()

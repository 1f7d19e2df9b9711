"""How likely the model finds a text, or the end of one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pyarrow as pa

from batchrun.data.continuations import Continuations, Ending
from batchrun.data.outputs import RowResult
from batchrun.engine.params import Completion, Request
from batchrun.engine.scoring import Score as Scored
from batchrun.engine.scoring import windows
from batchrun.errors import ConfigError
from batchrun.row import Row
from batchrun.tasks.base import Task, row_result

COLUMNS = {
    "log_likelihood": pa.float64(),
    "num_tokens": pa.int32(),
    "perplexity": pa.float64(),
    "is_greedy": pa.bool_(),
}


class Score(Task):
    columns = COLUMNS

    def continuations(self, schema: pa.Schema) -> Continuations | None:
        template = self.config.score.continuation
        return None if template is None else Ending(template, schema)

    def longest_prompt(self, max_model_len: int) -> int:
        stride = self.config.score.stride
        if stride is not None and stride >= max_model_len:
            raise ConfigError(
                f"score.stride={stride} leaves nothing of a window of model.max_model_len={max_model_len} to the next: "
                "set it lower, to half of that or less"
            )
        return max_model_len if stride is None else sys.maxsize

    def requests(self, row: Row) -> list[Request]:
        """One for each window; none for a text of one token, before which there is nothing."""
        assert row.prompt is not None
        ids = [*row.prompt.ids, *(token for tokens in row.prompt.continuations for token in tokens)]
        start = len(row.prompt.ids) if row.prompt.continuations else 1
        steps = windows(len(ids), start, self.max_length, self.config.score.stride or 1)
        return [
            Request(None, ids[first:scored], self.base_params, continuations=(tuple(ids[scored:stop]),))
            for first, scored, stop in steps
        ]

    def result(self, row: Row, completions: Sequence[Completion]) -> RowResult:
        parts = [part for done in completions for part in done.likelihoods or ()]
        if any(done.error_type is not None for done in completions) or row.prompt is None:
            return row_result(row, completions)
        score = Scored.of(parts)
        values = {
            "log_likelihood": score.log_likelihood,
            "num_tokens": score.num_tokens,
            "perplexity": score.perplexity,
            "is_greedy": score.is_greedy,
        }
        return row_result(row, completions, values=values, prompt_tokens=len(row.prompt.ids))

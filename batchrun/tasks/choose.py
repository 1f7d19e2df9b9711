"""Which of some labels is the likeliest after the prompt."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from batchrun.data.continuations import Continuations, Labels
from batchrun.data.outputs import RowResult
from batchrun.engine.params import Completion, Request
from batchrun.engine.scoring import choose
from batchrun.row import Row
from batchrun.tasks.base import Task, row_result

PROBABILITY = pa.struct([("label", pa.string()), ("probability", pa.float64()), ("log_likelihood", pa.float64())])
COLUMNS = {"label": pa.string(), "margin": pa.float64(), "probabilities": pa.list_(PROBABILITY)}


class Choose(Task):
    columns = COLUMNS

    def continuations(self, schema: pa.Schema) -> Continuations:
        return Labels(self.config.choose, self.config.prompt, schema)

    def requests(self, row: Row) -> list[Request]:
        assert row.prompt is not None
        return [Request(None, row.prompt.ids, self.base_params, continuations=row.prompt.continuations)]

    def result(self, row: Row, completions: Sequence[Completion]) -> RowResult:
        (completion,) = completions
        if completion.likelihoods is None or row.prompt is None:
            return row_result(row, completions)
        choice = choose(row.prompt.texts, completion.likelihoods, self.config.choose.normalize)
        columns = (choice.labels, choice.probabilities, choice.log_likelihoods)
        values = {
            "label": choice.label,
            "margin": choice.margin,
            "probabilities": [dict(zip(PROBABILITY.names, one, strict=True)) for one in zip(*columns, strict=True)],
        }
        return row_result(row, completions, values=values)

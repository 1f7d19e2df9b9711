"""The scores of a classification head for each row: of a reranker, a reward model or a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchrun.data.outputs import RowResult
from batchrun.data.prompts import PromptBuilder
from batchrun.data.texts import TextBuilder
from batchrun.engine.checkpoint import Checkpoint
from batchrun.engine.encoder_config import scores
from batchrun.engine.params import Completion, Request
from batchrun.engine.pooler import ScorePooler
from batchrun.row import Row
from batchrun.tasks.base import Task, row_result


class Rank(Task):
    """Column `score`; of a model with several labels that of the best, beside `label` and `scores`, one for each."""

    purpose = "rank"
    pooler: ScorePooler

    def prepare(self, checkpoint: Checkpoint, tokenizer: Any) -> None:
        self.pooler = scores(checkpoint, tokenizer, self.config.rank)
        self.max_length = self.pooler.max_length
        self.columns = {"score": pa.float32()}
        if self.pooler.size > 1:
            each = pa.struct([pa.field(label, pa.float32()) for label in self.pooler.labels])
            self.columns = {"label": pa.string(), "score": pa.float32(), "scores": each}

    def prompts(self, tokenizer: Any, schema: pa.Schema, folders: Sequence[Path]) -> PromptBuilder:
        rank = self.config.rank
        pair = None if rank.query is None or rank.text is None else (rank.query, rank.text)
        return TextBuilder(self.config.prompt, tokenizer, schema, self.max_length, folders, pair=pair)

    def identity(self) -> dict[str, Any]:
        return {"rank.activation": self.pooler.activation}

    def requests(self, row: Row) -> list[Request]:
        assert row.prompt is not None
        return [Request(None, row.prompt.ids, type_ids=row.prompt.type_ids)]

    def result(self, row: Row, completions: Sequence[Completion]) -> RowResult:
        found = completions[0].values
        if found is None:
            return row_result(row, completions)
        labels, best = self.pooler.labels, int(found.argmax())
        values: dict[str, Any] = {"score": float(found[best])}
        if len(labels) > 1:
            values |= {"label": labels[best], "scores": dict(zip(labels, found.tolist(), strict=True))}
        return row_result(row, completions, values=values)

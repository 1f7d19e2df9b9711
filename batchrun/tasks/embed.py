"""A vector for each row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchrun.data.outputs import RowResult
from batchrun.data.prompts import PromptBuilder
from batchrun.data.texts import TextBuilder
from batchrun.engine.checkpoint import Checkpoint
from batchrun.engine.encoder_config import TextForm, embedding
from batchrun.engine.params import Completion, Request
from batchrun.engine.pooler import EmbeddingPooler
from batchrun.row import Row
from batchrun.tasks.base import Task, row_result

EMBEDDING = "embedding"


class Embed(Task):
    """Column `embedding`: a list of float32 of one length for all rows."""

    purpose = "embed"
    pooler: EmbeddingPooler
    form: TextForm

    def prepare(self, checkpoint: Checkpoint, tokenizer: Any) -> None:
        self.pooler, self.form = embedding(checkpoint, tokenizer, self.config.embed)
        self.max_length = self.pooler.max_length
        self.columns = {EMBEDDING: pa.list_(pa.float32(), self.pooler.size)}

    def prompts(self, tokenizer: Any, schema: pa.Schema, folders: Sequence[Path]) -> PromptBuilder:
        return TextBuilder(
            self.config.prompt,
            tokenizer,
            schema,
            self.max_length,
            folders,
            prefix=self.form.prompt,
            lower_case=self.form.lower_case,
        )

    def identity(self) -> dict[str, Any]:
        layers = b"".join(file.read_bytes() for folder in self.pooler.dense for file in sorted(folder.iterdir()))
        return {
            "embed.pooling": self.pooler.pooling,
            "embed.normalize": self.pooler.normalize,
            "embed.dimensions": self.pooler.size,
            "embed.prompt (text)": self.form.prompt,
            "embed.lower_case": self.form.lower_case,
            "embed.layers": hashlib.sha256(layers).hexdigest() if layers else None,
        }

    def requests(self, row: Row) -> list[Request]:
        assert row.prompt is not None
        return [Request(None, row.prompt.ids)]

    def result(self, row: Row, completions: Sequence[Completion]) -> RowResult:
        return row_result(row, completions, values={EMBEDDING: completions[0].values})

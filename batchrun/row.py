"""One sample of an input row on its way to its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchrun.data.buffer import ChunkBuffer
from batchrun.data.outputs import RowResult
from batchrun.data.prompt import Prompt


@dataclass(slots=True)
class Row:
    """One sample of an input row on its way; `number` counts rows within their file. Without a prompt: the last row of
    a chunk is read, and all results are there."""

    buffer: ChunkBuffer
    number: int
    prompt: Prompt | None
    sample: int = 0
    answered: list[RowResult] = field(default_factory=list)  # results of its prompts before this one

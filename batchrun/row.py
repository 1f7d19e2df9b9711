"""One input row on its way to its result."""

from __future__ import annotations

from dataclasses import dataclass

from batchrun.data.buffer import ChunkBuffer
from batchrun.data.prompt import Prompt


@dataclass(slots=True)
class Row:
    """One input row on its way; `number` counts within its file. Without a prompt: the last row of a chunk is read,
    and all results are there."""

    buffer: ChunkBuffer
    number: int
    prompt: Prompt | None

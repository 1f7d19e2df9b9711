"""What a task is: the requests that a row becomes, and the result that their completions become."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchrun.config import Config
from batchrun.data.continuations import Continuations
from batchrun.data.outputs import RowResult
from batchrun.data.prompts import PromptBuilder
from batchrun.engine.checkpoint import Checkpoint
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.engine.pooler import Pooler
from batchrun.row import Row
from batchrun.turns import turn_columns


class Task(ABC):
    """One way to use a model on a row, made once for a job and asked about each of its rows.

    A new task is a class here, its name in `registry.py` and in `TASKS` of the config, and the settings it has, if
    any, in a config section of its own. Everything else (equal rows asked once, the journal, errors, parts, resume)
    is the same for all tasks and needs no word from them.
    """

    # What the task adds to each output row, as Arrow types by column name. None: a completion, and what it is parsed
    # to. A row's values for them are in RowResult.values, by the same names: what JSON can hold, or arrays of float32.
    columns: dict[str, pa.DataType] | None = None
    purpose = "generate"  # what the model is loaded for, as in engine/support.py
    pooler: Pooler | None = None  # what an Encoder makes of texts; None: the engine is one that generates
    max_tokens = 0  # that may be generated after a prompt, for which the window must have room

    def __init__(self, config: Config) -> None:
        self.config = config
        self.base_params = SamplingParams(adapter=config.sampling.adapter)  # of requests that generate nothing
        self.prompt_names = list(config.prompt.prompts)
        # What a task with a completion adds beside it, in the same way.
        self.more_columns = turn_columns(config.prompt)
        self.max_length = 0  # tokens of the longest prompt and completion; known once prepared

    def prepare(self, checkpoint: Checkpoint, tokenizer: Any) -> None:
        """Take what has to be known of the model's files. Raises ConfigError for what does not fit them."""
        self.max_length = checkpoint.max_model_len

    def prompts(self, tokenizer: Any, schema: pa.Schema, folders: Sequence[Path]) -> PromptBuilder:
        """What makes prompts of rows. Raises InputError."""
        longest = self.longest_prompt(self.max_length)
        return PromptBuilder(
            self.config.prompt, tokenizer, schema, longest, folders, self.max_tokens, self.continuations(schema)
        )

    def identity(self) -> dict[str, Any]:
        """For the fingerprint, what decides the results in the place of an `auto` or of a file, by dotted key."""
        return {}

    def continuations(self, schema: pa.Schema) -> Continuations | None:
        """What is scored after each row's prompt, by the columns of the input. Raises ConfigError, InputError."""
        return None

    def longest_prompt(self, max_model_len: int) -> int:
        """Tokens that a prompt may have with what follows it."""
        return max_model_len

    @abstractmethod
    def requests(self, row: Row) -> list[Request]:
        """What is asked of the engine for a row whose prompt is good, if anything: requests whose keys are not yet set,
        in the order in which `result` gets their completions."""

    @abstractmethod
    def result(self, row: Row, completions: Sequence[Completion]) -> RowResult:
        """What the answers come to. All are there, and any of them may have failed (see `row_result`)."""

    def again(self, row: Row, completions: Sequence[Completion], attempt: int) -> list[Request]:
        """Requests to make in place of these completions, which are those of the attempt of this number, from 1 on;
        none if the completions are to be taken."""
        return []

    def repeatable(self, row: Row, requests: Sequence[Request]) -> bool:
        """Whether equal requests have equal answers, so that rows which make them need be asked only once."""
        return True


def row_result(row: Row, completions: Sequence[Completion], **values: Any) -> RowResult:
    """The fields that rows of all tasks have, from a row's completions, with `values` for others.

    With completions that failed, the row has failed as the first of them.
    """
    failed = next((done for done in completions if done.error_type is not None), None)
    common: dict[str, Any] = {
        "finish_reason": "stop" if failed is None else failed.finish_reason,
        "status": "ok" if failed is None else "error",
        "error_type": None if failed is None else failed.error_type,
        "error": None if failed is None else failed.error,
        "prompt_tokens": sum(done.prompt_tokens for done in completions),
        "truncated_tokens": row.prompt.truncated_tokens if row.prompt else 0,
        "cached_tokens": sum(done.cached_tokens for done in completions),
        "queue_s": max((done.queue_s for done in completions), default=0.0),
        "total_s": max((done.total_s for done in completions), default=0.0),
    }
    return RowResult(**(common | values))


def prompt_digest(ids: Sequence[int] | np.ndarray) -> bytes:
    """16 bytes that stand for a prompt."""
    return hashlib.blake2b(array("q", ids), digest_size=16).digest()

"""Rows of several prompts: the columns that they add to the output, and what their results come to together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pyarrow as pa

from batchrun.config import PromptConfig
from batchrun.data.outputs import RowResult

TURNS = "turns"
TURN = pa.struct(
    {
        "completion": pa.string(),
        "finish_reason": pa.string(),
        "prompt_tokens": pa.int32(),
        "cached_tokens": pa.int32(),
        "completion_tokens": pa.int32(),
    }
)


def turn_columns(config: PromptConfig) -> dict[str, pa.DataType]:
    """The columns of a job beside that of the last answer: the other named answers, and all of them in order."""
    if not config.turns and not config.prompts:
        return {}
    return {name: pa.string() for name in list(config.prompts)[:-1]} | {TURNS: pa.list_(TURN)}


def conversation(results: Sequence[RowResult], names: Sequence[str]) -> RowResult:
    """The result of a row from those of its prompts, of which all but the last one are answered.

    The text and the end are those of the last; tokens and seconds are those of all, but the first token is the first
    one's. `names` are what the prompts are called, if they are.
    """
    last, answered = results[-1], [result for result in results if result.status == "ok"]
    turns = [
        {name: result.text if name == "completion" else getattr(result, name) for name in TURN.names}
        for result in answered
    ]
    texts = dict(zip(names, (result.text for result in answered), strict=False))
    return dataclasses.replace(
        last,
        prompt_tokens=sum(result.prompt_tokens for result in results),
        truncated_tokens=sum(result.truncated_tokens for result in results),
        cached_tokens=sum(result.cached_tokens for result in results),
        completion_tokens=sum(result.completion_tokens for result in results),
        queue_s=sum(result.queue_s for result in results),
        first_token_s=results[0].first_token_s,
        total_s=sum(result.total_s for result in results),
        deduplicated=all(result.deduplicated for result in results),
        values={**(last.values or {}), **{name: texts.get(name) for name in names[:-1]}, TURNS: turns},
    )

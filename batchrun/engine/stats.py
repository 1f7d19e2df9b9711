"""What a step was like, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepStats:
    """One step, for metrics."""

    seconds: float
    tokens: int  # query tokens computed
    sampled: int  # rows that got a token
    forced: int  # tokens that rows got without it, as the form of their text left no choice
    running: int
    waiting: int
    kv_used: float  # share of the KV blocks that are held
    hit_rate: float  # share of all prompt tokens so far that were found in the cache
    ideal_hit_rate: float  # what it would be with a cache that forgets nothing
    preemptions: int  # so far
    padding: int = 0  # places of padding that were computed beside the tokens

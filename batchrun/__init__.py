"""Run a language model over a Parquet dataset offline: one output row for each input row."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchrun.engine.llm import LLM as LLM
    from batchrun.engine.params import Completion as Completion
    from batchrun.engine.params import Delta as Delta
    from batchrun.engine.params import Request as Request
    from batchrun.engine.params import SamplingParams as SamplingParams
    from batchrun.engine.reasoning import Reasoning as Reasoning

__version__ = "0.1.0"

_DOOR = {
    "LLM": "llm",
    "Completion": "params",
    "Delta": "params",
    "Request": "params",
    "SamplingParams": "params",
    "Reasoning": "reasoning",
}


def __getattr__(name: str) -> Any:
    """The names of the library door, imported when they are used: torch takes seconds, and `--help` needs none."""
    if name not in _DOOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"batchrun.engine.{_DOOR[name]}"), name)

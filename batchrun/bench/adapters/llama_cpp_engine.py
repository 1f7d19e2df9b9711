"""llama.cpp through llama-cpp-python. The model is a GGUF file."""

from __future__ import annotations

from itertools import islice
from typing import Any

Row = tuple[list[int], int]


class Engine:
    """One row after the other, which is all that the binding offers; a prompt that begins like the one before it
    keeps that part of the cache."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import llama_cpp

        self.version = llama_cpp.__version__
        self.llm: Any = llama_cpp.Llama(
            model_path=spec["model"],
            n_ctx=spec["max_model_len"],
            n_batch=spec["settings"]["max_batched_tokens"],
            n_threads=spec["threads"],
            n_threads_batch=spec["threads"],
            verbose=False,
        )

    def generate(self, rows: list[Row]) -> list[list[int]]:
        return [list(islice(self.llm.generate(ids, top_k=1, temp=0.0), count)) for ids, count in rows]

    def reset(self, rows: list[Row]) -> None:
        self.llm.reset()

"""batchrun's own engine, or pool of engines: what a job of so many rows would get."""

from __future__ import annotations

import gc
from itertools import islice
from typing import Any

Row = tuple[list[int], int]


class Engine:
    """Continuous batching; or batches of `static` rows, each to its end before the next begins."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import batchrun
        from batchrun.config import EngineConfig, ModelConfig
        from batchrun.engine.checkpoint import load_tokenizer, open_checkpoint

        settings = dict(spec["settings"])
        self.version = batchrun.__version__
        self.static: int = settings.pop("static")
        settings["kv_cache_gib"] = settings["kv_cache_gib"] or spec["kv_cache_gib"]
        settings["num_threads"] = settings["num_threads"] or spec["threads"]
        model = ModelConfig(path=spec["model"], dtype=spec["dtype"], device=spec["device"])
        self.config = EngineConfig(**settings)
        self.checkpoint = open_checkpoint(model, offline=True)
        self.tokenizer = load_tokenizer(self.checkpoint, offline=True)
        self.warmup: list[Row] = []
        self.engine: Any = None
        self.loaded_for = 0

    def generate(self, rows: list[Row]) -> list[list[int]]:
        if self.engine is None:
            self._load(rows)
        self.warmup = self.warmup or rows
        size = self.static or len(rows)
        return [ids for start in range(0, len(rows), size) for ids in self._complete(rows[start : start + size])]

    def reset(self, rows: list[Row]) -> None:
        """Forget all prefixes. A pool is made anew, and so is an engine for another number of rows."""
        from batchrun.engine.engine import Engine as SingleEngine

        if isinstance(self.engine, SingleEngine) and self.loaded_for == len(rows):
            # Handing out every free block makes the pool forget what they held.
            pool = self.engine.pool
            pool.release(pool.allocate(pool.num_free))
            return
        self.engine.close()
        self.engine = None
        gc.collect()
        self._load(rows)
        self.generate(self.warmup)

    def _load(self, rows: list[Row]) -> None:
        from batchrun.engine.loading import load_engine

        self.loaded_for = len(rows)
        self.engine = load_engine(self.checkpoint, self.tokenizer, self.config, len(rows))

    def _complete(self, rows: list[Row]) -> list[list[int]]:
        from batchrun.engine.params import Request, SamplingParams

        requests = (
            Request(number, ids, SamplingParams(max_tokens=count, ignore_eos=True))
            for number, (ids, count) in enumerate(rows)
        )
        outputs: list[list[int]] = [[] for _ in rows]
        while True:
            for request in islice(requests, self.engine.room):
                self.engine.add(request)
            if not self.engine.has_work():
                return outputs
            for done in self.engine.step():
                if done.error_type is not None:
                    raise RuntimeError(f"row {done.key}: {done.error}")
                outputs[done.key] = done.token_ids

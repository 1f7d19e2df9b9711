"""OpenVINO GenAI's `ContinuousBatchingPipeline`. The model is a folder that optimum-cli has exported:

optimum-cli export openvino -m MODEL --task text-generation-with-past --weight-format fp16 FOLDER
"""

from __future__ import annotations

import gc
from typing import Any

Row = tuple[list[int], int]
PRECISIONS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class Engine:
    """One pipeline for each run, warmed up with the rows that came first: none can be told to forget its prefixes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import openvino_genai

        self.version = openvino_genai.__version__
        self.spec = spec
        self.warmup: list[Row] = []
        self.used = False
        self.pipeline: Any = self._build()

    def generate(self, rows: list[Row]) -> list[list[int]]:
        import numpy as np
        import openvino

        self.used = bool(self.warmup)
        self.warmup = self.warmup or rows
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in rows]
        done = self.pipeline.generate(prompts, [_greedy(count) for _, count in rows])
        return [list(result.m_generation_ids[0]) for result in done]

    def reset(self, rows: list[Row]) -> None:
        if self.used:
            self.pipeline = None
            gc.collect()
            self.pipeline = self._build()
            self.generate(self.warmup)
            self.used = False

    def _build(self) -> Any:
        import openvino
        import openvino_genai

        settings, precision = self.spec["settings"], PRECISIONS[self.spec["dtype"]]
        if precision == "bf16" and "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            precision = "f32"  # it refuses to compute in a type that the processor has no instructions for
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = max(1, round(self.spec["kv_cache_gib"]))
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.max_num_batched_tokens = settings["max_batched_tokens"]
        scheduler.enable_prefix_caching = settings["prefix_caching"]
        scheduler.dynamic_split_fuse = settings["split_fuse"]
        options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": self.spec["threads"]}
        if settings["kv_precision"] != "default":
            given = settings["kv_precision"]
            options["KV_CACHE_PRECISION"] = precision if given == "model" else given
        return openvino_genai.ContinuousBatchingPipeline(self.spec["model"], scheduler, "CPU", options)


def _greedy(count: int) -> Any:
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
    return config

"""What is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchrun.config.base import LONGEST_S, in_range, one_of, setting, strings
from batchrun.errors import ConfigError

BENCH_KINDS = ("engines", "scheduler", "pipeline", "article", "structure", "choose", "gpu")
GPU_SHAPES = ("qwen3-0.6b", "llama-8b", "tiny")


@dataclass
class BenchConfig:
    """What `mode=bench` measures: see docs/performance.md."""

    kind: str = setting(
        "engines",
        "engines: side by side; scheduler: host time of a step; pipeline: the rest; structure: forms beside free text; "
        "choose: labels beside loops over transformers; article: one claim a line; "
        "gpu: models of known shapes with random weights, and every kernel",
        identity=False,
    )
    engines: Any = setting(
        "auto",
        "engines, each with settings as in transformers:batch=8:sort=false; rivals: those that are installed; "
        "auto: ours, transformers, and these",
        identity=False,
    )
    workloads: Any = setting(
        ["annotate", "generate", "summarise", "single"],
        "fixed workloads; input.path adds one of your own rows",
        identity=False,
    )
    rounds: int = setting(3, "times that each engine runs a workload, in turn with the others", identity=False)
    rows: int | None = setting(
        None, "first rows of each workload; default: all (scheduler: 100,000, pipeline: 1,000,000)", identity=False
    )
    python: dict[str, str] = setting(
        {}, "interpreters that have an engine, as in bench.python.vllm=/venv/bin/python", identity=False
    )
    models: dict[str, str] = setting(
        {},
        "the model in an engine's own format, as in bench.models.openvino=FOLDER or bench.models.llama_cpp=FILE",
        identity=False,
    )
    kv_cache_gib: float = setting(
        4.0, "KV cache of each engine in GiB, where engine.kv_cache_gib is not set", identity=False
    )
    limit_seconds: float = setting(
        1800.0, "an engine that takes longer to load, or for one round, is given up", identity=False
    )
    shapes: Any = setting(
        ["qwen3-0.6b", "llama-8b"], f"gpu: which models are made: {', '.join(GPU_SHAPES)}", identity=False
    )
    lengths: float = setting(1.0, "gpu: factor of the lengths of all prompts and outputs", identity=False)
    running: int = setting(256, "scheduler: rows that run", identity=False)
    waiting: list[int] = setting(
        [1_000, 100_000, 1_000_000], "scheduler: rows that wait, one measurement each", identity=False
    )
    steps: int = setting(1000, "scheduler: steps of one measurement", identity=False)

    def __post_init__(self) -> None:
        one_of("bench.kind", self.kind, BENCH_KINDS)
        for key in ("rounds", "rows", "running", "steps"):
            in_range(f"bench.{key}", getattr(self, key), 1)
        for count in self.waiting:
            in_range("bench.waiting", count, 0)
        in_range("bench.kv_cache_gib", self.kv_cache_gib, 0.01)
        in_range("bench.limit_seconds", self.limit_seconds, 1, LONGEST_S)
        self.engines = strings("bench.engines", self.engines)
        self.shapes = strings("bench.shapes", self.shapes)
        for shape in self.shapes:
            one_of("bench.shapes", shape, GPU_SHAPES)
        if not 0 < self.lengths <= 1:
            raise ConfigError(f"bench.lengths={self.lengths} must be above 0 and at most 1")
        self.workloads = strings("bench.workloads", self.workloads)

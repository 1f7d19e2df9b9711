"""`mode=bench`: engines side by side, the scheduler alone, all but the engine, forms, a task, or one claim a line."""

from __future__ import annotations

from batchrun.bench.engines import choose_engines
from batchrun.bench.measure import Bench, Model, Trial, check_lengths, open_model, print_limits
from batchrun.bench.table import comparison
from batchrun.bench.workloads import Workload, fixed_workload, own_workload
from batchrun.config import Config
from batchrun.errors import ConfigError
from batchrun_kernels.precision import TF32


def run(config: Config) -> int:
    """Measure what bench.kind says; returns the exit code, which is 1 if an engine failed. Raises BatchrunError."""
    if config.bench.kind == "scheduler":
        from batchrun.bench import scheduler

        return scheduler.run(config)
    if config.bench.kind == "article":
        from batchrun.bench import article

        return article.run(config)
    if config.bench.kind == "choose":
        from batchrun.bench import choose

        return choose.run(config)
    if config.bench.kind == "pipeline":
        from batchrun.bench import pipeline

        return pipeline.run(config)
    if config.bench.kind == "structure":
        from batchrun.bench import structure

        return structure.run(config)
    if config.model.dtype == TF32:
        raise ConfigError(
            f"bench.kind={config.bench.kind} gives engines one type, and not all of them have model.dtype={TF32}: set "
            "model.dtype=float32"
        )
    if config.bench.kind == "gpu":
        from batchrun.bench import gpu

        return gpu.run(config)
    return run_engines(config)


def run_engines(config: Config) -> int:
    """Every engine on every workload, in turn."""
    model = open_model(config)
    engines = choose_engines(config, str(model.checkpoint.folder))
    bench = Bench(config, model)
    trials = [Trial(workload, engines) for workload in choose_workloads(config, model)]
    print_limits(model)
    bench.measure(trials)
    print("\n".join(comparison(bench.measurements)))
    return bench.finish()


def choose_workloads(config: Config, model: Model) -> list[Workload]:
    """The fixed workloads that are asked for, and the rows of input.path. Raises ConfigError."""
    limit = config.bench.rows
    workloads = [fixed_workload(name, model.tokenizer, limit) for name in dict.fromkeys(config.bench.workloads)]
    if config.input.path:
        workloads.append(own_workload(config, limit))
    if not workloads:
        raise ConfigError("there is nothing to run: set bench.workloads, or input.path for rows of your own")
    check_lengths(workloads, model)
    return workloads

"""`bench.kind=gpu`: engines on models of known shapes with random weights, beside what the device can do at most.

Nothing is downloaded: models are made where they run, and prompts are random numbers. `mixed` is the public setting of
nano-vllm's benchmark: 256 prompts, prompts and outputs of 100 to 1,024 tokens each, seed 0.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from batchrun.bench.engines import choose_engines
from batchrun.bench.limits import count_work, floor
from batchrun.bench.measure import (
    Bench,
    Measurement,
    Model,
    Trial,
    check_lengths,
    open_model,
    output_folder,
    print_limits,
)
from batchrun.bench.shapes import save_random_model
from batchrun.bench.table import align, comparison, ratio
from batchrun.bench.workloads import Row, Workload
from batchrun.config import Config
from batchrun.engine.memory import KvShape
from batchrun.engine.model import choose_device
from batchrun.errors import ConfigError

VOCABULARY = 10_000  # of prompts, at most: half of a small model's, so that rows to warm up with can begin otherwise

Lengths = tuple[int, int]  # of a prompt and of its output


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a workload makes a device do at least."""

    operations: float
    bytes: float  # weights once for each token of the longest output, and each generated token's own past


def run(config: Config) -> int:
    """Every engine on every workload of every shape, then every kernel; the exit code is 1 if one failed."""
    codes = []
    for shape in config.bench.shapes:
        with TemporaryDirectory(prefix="batchrun-model-") as folder:
            codes.append(_run_shape(config, shape, Path(folder)))
    if choose_device(config.model.device).type == "cuda":
        codes.append(_time_kernels(output_folder(config)))
    return max(codes)


def make_workload(name: str, vocabulary: int, limit: int | None = None, factor: float = 1.0) -> Workload:
    """One of WORKLOADS, its first `limit` rows, all lengths times `factor`. Raises ConfigError for another name."""
    if name not in WORKLOADS:
        raise ConfigError(f"bench.workloads has {name!r}: for bench.kind=gpu there are {', '.join(WORKLOADS)}")
    tokens = range(4, min(VOCABULARY, vocabulary // 2))
    rows = WORKLOADS[name](random.Random(0), tokens, factor)
    return Workload(name, rows[:limit])


def traffic(workload: Workload, model: Model) -> Traffic:
    """Of a workload whose rows all run at once."""
    least = floor(count_work(workload.rows), model.shape, model.limits)
    kv = KvShape.of(model.checkpoint.text_config, _dtype(model.dtype)).bytes_per_token
    past = sum(
        count * len(row.prompt_ids) + count * (count - 1) // 2 for row in workload.rows for count in (row.max_tokens,)
    )
    return Traffic(least.compute * model.limits.flops, least.weights * model.limits.read + kv * past)


def achieved(measurements: Sequence[Measurement], workloads: Sequence[Workload], model: Model) -> list[str]:
    """A line for each workload and engine: rates, their share of the device's, and how many times faster ours is."""
    rows = [["workload", "engine", "median s", "output tok/s", "TFLOP/s", "of product", "GB/s", "of copy", "ours is"]]
    for workload in workloads:
        done = traffic(workload, model)
        here = [m for m in measurements if m.workload == workload.name and m.seconds]
        ours = [m for m in here if m.ours]
        for engine in dict.fromkeys(m.engine for m in here):
            group = [m for m in here if m.engine == engine]
            seconds = median(m.seconds or 0.0 for m in group)
            flops, moved = done.operations / seconds, done.bytes / seconds
            faster = ratio(group, ours)
            rows.append(
                [
                    workload.name,
                    engine,
                    f"{seconds:.2f}",
                    f"{workload.output_tokens / seconds:,.0f}",
                    f"{flops / 1e12:.2f}",
                    f"{flops / model.limits.flops:.1%}",
                    f"{moved / 1e9:.1f}",
                    f"{moved / model.limits.read:.1%}",
                    "-" if faster is None or group == ours else f"{faster:.2f}x as fast",
                ]
            )
    return align(rows)


def _run_shape(config: Config, shape: str, folder: Path) -> int:
    dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
    save_random_model(shape, folder, dtype, str(choose_device(config.model.device)))
    config = replace(config, model=replace(config.model, path=str(folder), dtype=dtype))
    model = open_model(config)
    bench = config.bench
    workloads = [make_workload(name, model.shape.vocabulary, bench.rows, bench.lengths) for name in bench.workloads]
    check_lengths(workloads, model)
    engines = choose_engines(config, str(folder))
    print(f"\n{shape}")
    print_limits(model)
    measured = Bench(config, model, name=shape)
    measured.measure([Trial(workload, engines) for workload in workloads])
    print("\n".join([*comparison(measured.measurements), "", *achieved(measured.measurements, workloads, model)]))
    return measured.finish()


def _time_kernels(folder: Path) -> int:
    """The table of kernels, by a process that has the device for itself."""
    command = [sys.executable, "-m", "batchrun_kernels.timing"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    (folder / "kernels.md").write_text(done.stdout, "utf-8")
    print(f"\n{done.stdout}")
    return min(done.returncode, 1) if done.returncode >= 0 else 1


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _rows(
    rng: random.Random, tokens: range, lengths: Iterator[Lengths], factor: float, prefix: Sequence[int] = ()
) -> list[Row]:
    return [
        Row([*prefix, *rng.choices(tokens, k=max(1, round(factor * prompt)))], max(1, round(factor * output)))
        for prompt, output in lengths
    ]


def _mixed(rng: random.Random, tokens: range, factor: float) -> list[Row]:
    """Prompts and outputs of all lengths, drawn in the order of nano-vllm's benchmark."""
    prompts = [[rng.randint(0, VOCABULARY) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    outputs = [rng.randint(100, 1024) for _ in prompts]
    return [
        Row(
            [tokens[token % len(tokens)] for token in prompt[: max(1, round(factor * len(prompt)))]],
            max(1, round(factor * output)),
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _shared(rng: random.Random, tokens: range, factor: float) -> list[Row]:
    """Eight long instructions, each before 64 short texts; short answers."""
    rows = []
    for _ in range(8):
        prefix = rng.choices(tokens, k=max(1, round(factor * 2048)))
        lengths = [(rng.randint(32, 128), 32) for _ in range(64)]
        rows += _rows(rng, tokens, iter(lengths), factor, prefix)
    return rows


def _long(rng: random.Random, tokens: range, factor: float) -> list[Row]:
    """Long documents."""
    lengths = [(rng.randint(8_000, 16_000), 128) for _ in range(16)]
    return _rows(rng, tokens, iter(lengths), factor)


def _decode(rng: random.Random, tokens: range, factor: float) -> list[Row]:
    """256 rows that are all at the same place: little but steps in which each gets a token."""
    return _rows(rng, tokens, iter([(128, 512)] * 256), factor)


def _single(rng: random.Random, tokens: range, factor: float) -> list[Row]:
    """One prompt alone."""
    return _rows(rng, tokens, iter([(512, 256)]), factor)


WORKLOADS: dict[str, Callable[[random.Random, range, float], list[Row]]] = {
    "mixed": _mixed,
    "shared": _shared,
    "long": _long,
    "decode": _decode,
    "single": _single,
}

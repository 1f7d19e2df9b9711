"""What caching and batching bring, measured: `job=article` prints one claim a line, each as a ratio of two times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq

from batchrun.bench.engines import choose_engines
from batchrun.bench.measure import (
    Bench,
    Measurement,
    Model,
    Trial,
    as_table,
    check_lengths,
    machine_name,
    open_model,
    print_limits,
)
from batchrun.bench.table import align, ratio
from batchrun.bench.workloads import Row, Workload, fixed_workload
from batchrun.config import Config

TOKENS = 128  # of each of the four prompts
FEW = 4
LONG_PROMPT = 1024
UNEVEN_ROWS, UNEVEN_BATCH = 32, 8

CACHE, NO_CACHE = "transformers:batch=1", "transformers:batch=1:use_cache=false"
OURS, ONE_BY_ONE = "batchrun", "batchrun:max_num_seqs=1"
CONTINUOUS = f"batchrun:max_num_seqs={UNEVEN_BATCH}"
STATIC = f"{CONTINUOUS}:static={UNEVEN_BATCH}"


@dataclass(frozen=True, slots=True)
class Side:
    """An engine on a workload, and the number of tokens its time is divided by."""

    engine: str
    workload: str
    per: int = 1


@dataclass(frozen=True, slots=True)
class Claim:
    """`fast` takes less time than `slow`."""

    text: str
    slow: Side
    fast: Side


@dataclass(slots=True)
class Result:
    """A claim with its medians; the ratio is the median over the rounds."""

    claim: str
    slow_engine: str
    slow_s: float | None
    fast_engine: str
    fast_s: float | None
    ratio: float | None


def run(config: Config) -> int:
    """Measure every claim and print a line for each; returns the exit code, which is 1 if an engine failed."""
    model = open_model(config)
    workloads = make_workloads(model, config.bench.rows)
    check_lengths(list(workloads.values()), model)
    claims = make_claims(workloads)
    config.bench.engines = [label for name in workloads for label in _engines_on(claims, name)]
    engines = {spec.label: spec for spec in choose_engines(config, str(model.checkpoint.folder))}
    trials = [
        Trial(workload, [engines[label] for label in _engines_on(claims, name)]) for name, workload in workloads.items()
    ]
    bench = Bench(config, model)
    print_limits(model)
    bench.measure(trials)
    results = [judge(claim, bench.measurements) for claim in claims]
    print("\n".join(_lines(results)))
    _save(results, bench)
    return bench.finish()


def make_workloads(model: Model, limit: int | None = None) -> dict[str, Workload]:
    """The rows of the claims, by name."""
    single = fixed_workload("single", model.tokenizer)
    generate = fixed_workload("generate", model.tokenizer)
    long = fixed_workload("summarise", model.tokenizer, 1).rows[0].prompt_ids
    four = [Row(row.prompt_ids, TOKENS) for row in generate.rows[:FEW]]
    made = [
        single,
        Workload("four", four),
        Workload("uneven", generate.rows[:UNEVEN_ROWS][:limit]),
        Workload("prefill", [Row(long[:LONG_PROMPT], 1)]),
    ]
    return {workload.name: workload for workload in made}


def make_claims(workloads: dict[str, Workload]) -> list[Claim]:
    """The claims in the order they are printed."""
    single, prefill = workloads["single"], workloads["prefill"]
    return [
        Claim("a KV cache against none, one prompt", Side(NO_CACHE, "single"), Side(CACHE, "single")),
        Claim("batchrun against transformers, one prompt", Side(CACHE, "single"), Side(OURS, "single")),
        Claim("four prompts batched against one by one", Side(ONE_BY_ONE, "four"), Side(OURS, "four")),
        Claim(
            f"continuous against static batches of {UNEVEN_BATCH}, uneven outputs",
            Side(STATIC, "uneven"),
            Side(CONTINUOUS, "uneven"),
        ),
        Claim(
            "a token in prefill against one in decode",
            Side(OURS, "single", single.output_tokens),
            Side(OURS, "prefill", prefill.prompt_tokens),
        ),
    ]


def judge(claim: Claim, measurements: Sequence[Measurement]) -> Result:
    """The medians of both sides, and how many times faster one is."""
    slow, fast = _of(claim.slow, measurements), _of(claim.fast, measurements)
    times = ratio(slow, fast)
    return Result(
        claim=claim.text,
        slow_engine=claim.slow.engine,
        slow_s=_median(slow, claim.slow.per),
        fast_engine=claim.fast.engine,
        fast_s=_median(fast, claim.fast.per),
        ratio=None if times is None else times * claim.fast.per / claim.slow.per,
    )


def _engines_on(claims: Sequence[Claim], workload: str) -> list[str]:
    """Labels of the engines that some claim needs on a workload, without repetition."""
    sides = [side for claim in claims for side in (claim.fast, claim.slow)]
    return list(dict.fromkeys(side.engine for side in sides if side.workload == workload))


def _of(side: Side, measurements: Sequence[Measurement]) -> list[Measurement]:
    return [m for m in measurements if (m.engine, m.workload) == (side.engine, side.workload) and m.seconds]


def _median(measurements: Sequence[Measurement], per: int) -> float | None:
    return median(m.seconds or 0.0 for m in measurements) / per if measurements else None


def _lines(results: Sequence[Result]) -> list[str]:
    rows = [["claim", "", "slower", "faster", "ratio"]]
    for result in results:
        times = [_time(result.slow_s), _time(result.fast_s), f"{result.ratio:.2f}x" if result.ratio else "-"]
        rows.append([result.claim, "", *times])
    return align(rows)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "failed"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.2f} ms"


def _save(results: Sequence[Result], bench: Bench) -> None:
    """The lines as a Parquet file beside the measurements."""
    path: Path = bench.path.parent / "claims" / bench.path.name
    path.parent.mkdir(exist_ok=True)
    pq.write_table(as_table(results, {"run": bench.run, "machine": machine_name()}), path)

"""What a form costs and what forced tokens bring: the same rows free, with their form, and with its tokens forced."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
import numpy as np
import pyarrow.parquet as pq
import torch

from batchrun.bench.measure import as_table, machine_name, output_folder
from batchrun.bench.table import align
from batchrun.config import Config
from batchrun.data.runs import new_run_id
from batchrun.engine.constraints import Masks
from batchrun.engine.engine import Engine
from batchrun.engine.loading import load_single
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.engine.structure import StructuredOutputs
from batchrun.errors import ConfigError
from batchrun.job import open_job
from batchrun.structured import job_form

PART_ROWS = 100  # in turn free and with their form, so that all see the same hour of the machine
FREE, FORM, FORCED = "free", "form", "form, forced tokens"


@dataclass(slots=True)
class FormCost:
    """Some rows in one way. Seconds of all rows: by the clock, of all threads, and waited for masks."""

    way: str
    part: int
    rows: int
    steps: int
    output_tokens: int
    forced_tokens: int
    seconds: float
    cpu_s: float
    mask_wait_s: float
    cut: int  # rows that max_tokens ended
    valid: int  # of the others, those that follow the schema

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.output_tokens / self.cpu_s


def run(config: Config) -> int:
    """Measure, print the table and write it as Parquet; the exit code is 1 if a whole row does not follow its schema.

    Raises ConfigError for a job without a form, InputError for one that cannot be used.
    """
    form = job_form(config)
    if form is None or not config.input.path:
        raise ConfigError("bench=structure needs rows and their form, as in job=extract mode=bench input.path=...")
    job = open_job(config, weights=True)
    built = (job.prompts.build(batch) for _, _, batch in job.read(np.arange(job.plan.num_chunks), job.prompts.columns))
    prompts = [p.ids for p in islice((p for batch in built for p in batch if p.error_type is None), config.bench.rows)]
    engine = load_single(job.checkpoint, job.tokenizer, config.engine)
    if not isinstance(engine, Engine):
        raise ConfigError(f"model={config.model.path} completes no text: bench=structure needs one that does")
    print(f"{machine_name()}: {len(prompts):,} rows by structure.{form.kind}, {torch.get_num_threads()} threads\n")
    costs = measure(engine, prompts, form, config.sampling.max_tokens)
    print("\n".join(align(_lines(costs))))
    print(f"\nmeasurements: {_save(config, costs)}")
    whole = [cost for cost in costs if cost.way != FREE]
    return int(sum(cost.valid for cost in whole) < sum(cost.rows - cost.cut for cost in whole))


def measure(
    engine: Engine, prompts: Sequence[list[int]], form: StructuredOutputs, max_tokens: int, part_rows: int = PART_ROWS
) -> list[FormCost]:
    """Complete the prompts part by part, each in all three ways, greedily and without prefixes of earlier ones.

    Free rows have as many tokens as those of the same prompt with their form.
    """
    slow, fast = (
        SamplingParams(max_tokens=max_tokens, structured_outputs=replace(form, fast_forward=forced))
        for forced in (False, True)
    )
    # Grammars are compiled, and the engine is warm, before anything counts.
    for params in (slow, fast):
        _complete(engine, prompts[:2], [params] * 2)
    costs = []
    for part, start in enumerate(range(0, len(prompts), part_rows)):
        mine = prompts[start : start + part_rows]
        done, cost = _timed(engine, FORM, part, mine, [slow] * len(mine))
        free = [SamplingParams(max_tokens=len(completion.token_ids), ignore_eos=True) for completion in done]
        costs += [
            _timed(engine, FREE, part, mine, free)[1],
            cost,
            _timed(engine, FORCED, part, mine, [fast] * len(mine))[1],
        ]
    return costs


def _timed(
    engine: Engine, way: str, part: int, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> tuple[list[Completion], FormCost]:
    # Handing out every free block makes the pool forget what they held.
    engine.pool.release(engine.pool.allocate(engine.pool.num_free))
    engine.take_steps()
    with _mask_waits() as waits:
        seconds, cpu = time.perf_counter(), time.process_time()
        done = _complete(engine, prompts, params)
        seconds, cpu = time.perf_counter() - seconds, time.process_time() - cpu
    steps, form = engine.take_steps(), params[0].structured_outputs
    cut = [completion.finish_reason == "length" for completion in done]
    return done, FormCost(
        way=way,
        part=part,
        rows=len(done),
        steps=len(steps),
        output_tokens=sum(len(completion.token_ids) for completion in done),
        forced_tokens=sum(step.forced for step in steps),
        seconds=seconds,
        cpu_s=cpu,
        mask_wait_s=sum(waits),
        cut=sum(cut) if form else 0,
        valid=sum(_follows(form, completion.text) for completion, is_cut in zip(done, cut, strict=True) if not is_cut)
        if form
        else 0,
    )


def _complete(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Completion]:
    """Completions in order."""
    requests = (Request(i, ids, params[i]) for i, ids in enumerate(prompts))
    done: dict[Any, Completion] = {}
    while len(done) < len(prompts):
        for request in islice(requests, engine.room):
            engine.add(request)
        done |= {completion.key: completion for completion in engine.step()}
    return [done[i] for i in range(len(prompts))]


def _follows(form: StructuredOutputs, text: str) -> bool:
    if form.json is None:
        return True
    try:
        jsonschema.validate(json.loads(text), json.loads(str(form.json)))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@contextmanager
def _mask_waits() -> Iterator[list[float]]:
    """Seconds of each wait for masks that were not there yet. Timed from outside: the engine carries no timers."""
    waits: list[float] = []
    original = Masks.apply

    def apply(masks: Masks, logits: torch.Tensor) -> None:
        started = time.perf_counter()
        masks.wait()
        waits.append(time.perf_counter() - started)
        original(masks, logits)

    Masks.apply = apply  # type: ignore[method-assign, assignment]
    try:
        yield waits
    finally:
        Masks.apply = original  # type: ignore[method-assign]


def _lines(costs: Sequence[FormCost]) -> list[list[str]]:
    rows = [
        ["", "tok/s", "beside free", "of a CPU", "beside free", "steps", "forced", "ms waited a step", "cut", "valid"]
    ]
    free = [cost for cost in costs if cost.way == FREE]
    for way in (FREE, FORM, FORCED):
        mine = [cost for cost in costs if cost.way == way]
        tokens, steps = sum(c.output_tokens for c in mine), sum(c.steps for c in mine)
        whole = sum(c.rows - c.cut for c in mine)
        rows.append([
            way,
            f"{tokens / sum(c.seconds for c in mine):,.0f}",
            f"{median(a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, free, strict=True)):.2f}x",
            f"{tokens / sum(c.cpu_s for c in mine):,.0f}",
            f"{median(a.tokens_per_cpu_s / b.tokens_per_cpu_s for a, b in zip(mine, free, strict=True)):.2f}x",
            f"{steps:,}",
            f"{sum(c.forced_tokens for c in mine) / tokens:.0%}",
            f"{1000 * sum(c.mask_wait_s for c in mine) / steps:.2f}",
            "" if way == FREE else f"{sum(c.cut for c in mine):,}",
            "" if way == FREE else f"{sum(c.valid for c in mine):,} of {whole:,}",
        ])  # fmt: skip
    return rows


def _save(config: Config, costs: Sequence[FormCost]) -> Path:
    run, folder = new_run_id(), output_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    about = {"run": run, "machine": machine_name(), "threads": torch.get_num_threads()}
    pq.write_table(as_table(list(costs), about), folder / f"structure-{run}.parquet")
    return folder / f"structure-{run}.parquet"

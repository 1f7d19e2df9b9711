"""task=choose beside a loop over transformers, on the rows of a job: the same labels, in how much less CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from batchrun.bench.measure import as_table, machine_name, output_folder
from batchrun.bench.table import align
from batchrun.config import Config
from batchrun.data.prompt import Prompt
from batchrun.data.runs import new_run_id
from batchrun.engine.engine import Engine
from batchrun.engine.loading import load_single
from batchrun.engine.params import Likelihood, Request
from batchrun.engine.scoring import Choice, choose
from batchrun.errors import ConfigError
from batchrun.job import open_job

SLICE_ROWS = 100  # that each way does in turn
BATCH_EVERY = 5  # slices: what the second loop costs is known from a few, and hours are saved
LOOPS = ("one label at a time", "the labels of a row as a batch")
CLOSE = 1e-3  # of two labels' log-likelihoods: nearer than that, float32 rounding may choose either

Way = Callable[[list[Prompt]], list[list[Likelihood]]]


@dataclass(slots=True)
class Slice:
    """One way on some rows. `same` are those with the label of the plain loop, `tied` those where that is in doubt."""

    way: str
    first: int
    rows: int
    cpu_s: float
    wall_s: float
    same: int
    tied: int
    largest_difference: float  # of the labels' log-likelihoods


def run(config: Config) -> int:
    """Measure, print the table and write it as Parquet; returns the exit code, 1 if a label differs and no tie excuses
    it. Raises BatchrunError."""
    if config.task != "choose":
        raise ConfigError("bench.kind=choose measures a job that chooses: add job=classify, or task=choose")
    job = open_job(config, weights=True)
    threads = config.engine.num_threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    engine = load_single(job.checkpoint, job.tokenizer, config.engine)
    assert isinstance(engine, Engine), "a task that chooses needs a model that generates"
    reference = _reference(job.checkpoint.folder, engine)
    ways: dict[str, Way] = {
        "batchrun": lambda prompts: _engine(engine, prompts),
        LOOPS[0]: lambda prompts: [_loop(reference, prompt) for prompt in prompts],
        LOOPS[1]: lambda prompts: [_batch(reference, prompt) for prompt in prompts],
    }
    print(f"{machine_name()}: {config.model.path}, {engine.model.dtype}, {threads} threads\n", flush=True)
    prompts = [prompt for batch in _batches(job) for prompt in job.prompts.build(batch) if prompt.error_type is None]
    prompts = prompts[: config.bench.rows]
    for way in ways.values():
        way(prompts[-2:])  # kernels are compiled
    slices: list[Slice] = []
    for first in range(0, len(prompts), SLICE_ROWS):
        some = prompts[first : first + SLICE_ROWS]
        mine = dict(ways) if first // SLICE_ROWS % BATCH_EVERY == 0 else {k: ways[k] for k in ("batchrun", LOOPS[0])}
        slices += _measure(mine, first, some, config.choose.normalize)
        print("\n".join(align(_lines(slices))), flush=True)
    folder = output_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"choose-{new_run_id()}.parquet"
    pq.write_table(as_table(slices, {"model": str(config.model.path), "threads": threads}), path)
    print(f"\nmeasurements: {path}")
    return int(any(one.rows > one.same + one.tied for one in slices))


def _batches(job: Any) -> Iterator[Any]:
    for _, _, batch in job.read(np.arange(job.plan.num_chunks), job.prompts.columns):
        yield batch


def _measure(ways: dict[str, Way], first: int, prompts: list[Prompt], normalize: str) -> list[Slice]:
    """All ways on the same rows, each in turn the first."""
    found: dict[str, tuple[float, float, list[Choice]]] = {}
    turn = first // SLICE_ROWS % len(ways)
    for name in [*islice(ways, turn, None), *islice(ways, turn)]:
        cpu, wall = time.process_time(), time.perf_counter()
        likelihoods = ways[name](prompts)
        chosen = [choose(p.texts, each, normalize) for p, each in zip(prompts, likelihoods, strict=True)]
        found[name] = time.process_time() - cpu, time.perf_counter() - wall, chosen
    expected = found[LOOPS[0]][2]
    slices = []
    for name, (cpu_s, wall_s, chosen) in found.items():
        pairs = list(zip(chosen, expected, strict=True))
        differences = [np.abs(np.subtract(a.log_likelihoods, b.log_likelihoods)).max() for a, b in pairs]
        tied = sum(a.label != b.label and _is_tie(b) for a, b in pairs)
        same = sum(a.label == b.label for a, b in pairs)
        slices.append(Slice(name, first, len(prompts), cpu_s, wall_s, same, tied, float(max(differences))))
    return slices


def _is_tie(choice: Choice) -> bool:
    best, second = sorted(choice.log_likelihoods, reverse=True)[:2]
    return best - second < CLOSE


def _reference(folder: Path, engine: Engine) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=engine.model.dtype)
    return model.to(engine.model.device).eval()


def _engine(engine: Engine, prompts: list[Prompt]) -> list[list[Likelihood]]:
    for number, prompt in enumerate(prompts):
        engine.add(Request(number, prompt.ids, continuations=prompt.continuations))
    found: dict[Any, list[Likelihood]] = {}
    while engine.has_work():
        found |= {done.key: done.likelihoods or [] for done in engine.step()}
    engine.take_steps()
    return [found[number] for number in range(len(prompts))]


@torch.inference_mode()
def _loop(model: Any, prompt: Prompt) -> list[Likelihood]:
    """A forward pass of prompt and label for each label."""
    found = []
    for tokens in prompt.continuations:
        ids = torch.tensor([[*prompt.ids, *tokens]], device=model.device)
        found.append(_likelihood(model(ids, use_cache=False).logits[0], len(prompt.ids), tokens))
    return found


@torch.inference_mode()
def _batch(model: Any, prompt: Prompt) -> list[Likelihood]:
    """One forward pass of all labels of a row, padded on the right, which needs no mask for what stands before."""
    longest = max(map(len, prompt.continuations))
    rows = [[*prompt.ids, *tokens, *[0] * (longest - len(tokens))] for tokens in prompt.continuations]
    logits = model(torch.tensor(rows, device=model.device), use_cache=False).logits
    return [_likelihood(row, len(prompt.ids), tokens) for row, tokens in zip(logits, prompt.continuations, strict=True)]


def _likelihood(logits: torch.Tensor, start: int, tokens: tuple[int, ...]) -> Likelihood:
    told = logits[start - 1 : start - 1 + len(tokens)].float().log_softmax(dim=-1)
    index = torch.tensor(tokens, device=logits.device)
    logprobs = told.gather(1, index[:, None])[:, 0]
    return Likelihood(logprobs.double().cpu().numpy(), (told.argmax(dim=-1) == index).cpu().numpy())


def _lines(slices: list[Slice]) -> list[list[str]]:
    lines = [["", "rows", "CPU s", "rows/CPU s", "times slower", "same labels", "ties", "largest difference"]]
    by_slice = {(one.way, one.first): one for one in slices}
    for way in dict.fromkeys(one.way for one in slices):
        mine = [one for one in slices if one.way == way]
        rows, cpu = sum(one.rows for one in mine), sum(one.cpu_s for one in mine)
        ratio = np.median([one.cpu_s / by_slice["batchrun", one.first].cpu_s for one in mine])
        same, tied = sum(one.same for one in mine), sum(one.tied for one in mine)
        worst = max(one.largest_difference for one in mine)
        lines.append(
            [
                way,
                f"{rows:,}",
                f"{cpu:,.1f}",
                f"{rows / cpu:,.1f}",
                f"{ratio:.1f}",
                f"{same:,}",
                str(tied),
                f"{worst:.1e}",
            ]
        )
    return lines

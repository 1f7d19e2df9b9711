"""The modes that compute nothing: `preview` shows prompts, `plan` shows what a run would cost."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from operator import eq

import numpy as np
import torch

from batchrun.config import Config
from batchrun.data.manifest import fingerprint
from batchrun.data.outputs import OutputSchema
from batchrun.data.plan import Chunk
from batchrun.data.prompt import Prompt
from batchrun.engine.attention.base import kv_dtype
from batchrun.engine.attention.registry import attention_backend, page_size
from batchrun.engine.checkpoint import Checkpoint
from batchrun.engine.kv_cache import blocks_for
from batchrun.engine.kv_layout import KvLayout
from batchrun.engine.linear import library_packs
from batchrun.engine.memory import KvShape, kv_budget
from batchrun.engine.model import choose_device, choose_dtype
from batchrun.engine.support import encoder_class
from batchrun.job import Job, open_job

SAMPLED_ROWS = 2000  # whose prompts `plan` renders
SAMPLED_PLACES = 8  # chunks they are taken from
HISTOGRAM_BINS = 8
SHOWN_CONTINUATIONS = 8  # of a prompt, by `preview`
GIB, MIB = 2**30, 2**20


def preview(config: Config) -> int:
    """Print the first `preview_rows` prompts as the model would get them, special tokens and all."""
    job = open_job(config, weights=False)
    shown = 0
    for chunk, first, prompts in _prompts(job, job.plan.chunks()):
        for i in range(min(len(prompts), config.preview_rows - shown)):
            _print_prompt(job, job.source.files[chunk.file].name, first + i, prompts[i])
            shown += 1
        if shown >= config.preview_rows:
            break
    if not shown:
        print("the input has no rows")
    return 0


def plan(config: Config) -> int:
    """Print files, rows, chunks, token counts, memory and a lower bound of the time."""
    job = open_job(config, weights=False)
    # Output columns that collide are an error of the job, found here as in a run.
    OutputSchema(
        config.output,
        job.source.schema,
        fingerprint({}, job.source.files),
        task_types=job.task.columns,
        samples=config.sampling.n,
        more_types=job.task.more_columns,
    )
    files, source = job.source.files, job.plan
    print(f"{'files':<12}{len(files):,}")
    for file in files[:10]:
        print(f"{'':<12}{file.name}: {file.rows:,} rows, {file.size / MIB:.1f} MiB")
    if len(files) > 10:
        print(f"{'':<12}and {len(files) - 10:,} more")
    print(f"{'rows':<12}{source.rows:,}" + (f", {source.samples} samples of each" if source.samples > 1 else ""))
    print(f"{'chunks':<12}{source.num_chunks:,} of up to {config.output.chunk_rows:,} rows, one part each")
    sample = _sample(job)
    _print_lengths(sample, source.rows)
    if job.task.pooler is None:
        _print_memory(job, sample)
    _print_time(job, sample)
    return 0


def _prompts(job: Job, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, int, list[Prompt]]]:
    for chunk in chunks:
        file = job.source.files[chunk.file]
        for first, batch in job.source.read(file, [(chunk.start, chunk.stop)], job.prompts.columns):
            yield chunk, first, job.prompts.build(batch)


def _print_prompt(job: Job, source: str, number: int, prompt: Prompt) -> None:
    cut = f" ({prompt.truncated_tokens:,} more were cut)" if prompt.truncated_tokens else ""
    print(f"--- {source} row {number}: {len(prompt.ids):,} tokens{cut}")
    if prompt.error_type is not None:
        print(f"{'skipped: ' if prompt.skipped else ''}{prompt.error_type}: {prompt.error}")
    elif prompt.ids:
        print(job.tokenizer.decode(prompt.ids, skip_special_tokens=False))
        for number, later in enumerate(_later(prompt), 2):
            print(f"--- its prompt {number}, with made-up answers: {len(later.ids):,} tokens")
            wrong = f"{later.error_type}: {later.error}"
            print(wrong if later.error_type else job.tokenizer.decode(later.ids, skip_special_tokens=False))
        for ids in prompt.continuations[:SHOWN_CONTINUATIONS]:
            print(f"-> {job.tokenizer.decode(ids, skip_special_tokens=False)!r}: {len(ids)} tokens to score")
        if len(prompt.continuations) > SHOWN_CONTINUATIONS:
            print(f"-> and {len(prompt.continuations) - SHOWN_CONTINUATIONS} more")


def _later(prompt: Prompt) -> Iterator[Prompt]:
    """What the row asks after this prompt, up to one that fails, with words in the place of the answers."""
    answers: list[str] = []
    later: Prompt | None = prompt
    while later is not None and later.error_type is None and later.follow is not None:
        answers.append(f"[answer {len(answers) + 1}]")
        later = later.follow(answers)
        if later is not None:
            yield later


@dataclass(frozen=True, slots=True)
class Sample:
    """What the prompts of some rows, taken from all over the input, look like: all that each row asks."""

    lengths: np.ndarray  # int64 [n], ascending
    unusable: int  # rows that make no prompt
    per_row: float  # prompts that a usable row asks
    shared: float  # share of the prompts' tokens that repeat the beginning of another sampled prompt

    @property
    def mean(self) -> float:
        return float(self.lengths.mean()) if len(self.lengths) else 0.0


def _sample(job: Job) -> Sample:
    places = set(np.linspace(0, job.plan.num_chunks - 1, SAMPLED_PLACES).astype(int).tolist())
    chosen = [chunk for i, chunk in enumerate(job.plan.chunks()) if i in places]
    per_place = -(-SAMPLED_ROWS // len(chosen))
    heads = (dataclasses.replace(chunk, stop=min(chunk.stop, chunk.start + per_place)) for chunk in chosen)
    prompts = [prompt for _, _, batch in _prompts(job, heads) for prompt in batch]
    rows = [[prompt, *_later(prompt)] for prompt in prompts if prompt.error_type is None]
    asked = sorted(prompt.ids for row in rows for prompt in row if prompt.error_type is None)
    lengths = np.sort(np.array([len(ids) for ids in asked], dtype=np.int64))
    shared = _shared_tokens(asked) / max(int(lengths.sum()), 1)
    return Sample(lengths, len(prompts) - len(rows), len(asked) / max(len(rows), 1), shared)


def _shared_tokens(prompts: Sequence[list[int]]) -> int:
    """Tokens of sorted prompts that a prefix tree holds once for several: what each has in common with the
    one before it."""
    return sum(len(list(takewhile(bool, map(eq, a, b)))) for a, b in pairwise(prompts))


def _print_lengths(sample: Sample, rows: int) -> None:
    lengths = sample.lengths
    if not len(lengths):
        print(f"{'prompts':<12}none of the {sample.unusable:,} sampled rows makes a prompt; mode=preview shows why")
        return
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
    print(
        f"{'prompts':<12}mean {sample.mean:,.0f} tokens, median {p50:,.0f}, 90 % {p90:,.0f}, 99 % {p99:,.0f}, "
        f"longest {lengths[-1]:,}; {sample.shared:.0%} of them in prefixes that prompts share"
    )
    unusable = f", {sample.unusable:,} of them unusable" if sample.unusable else ""
    sampled = round(len(lengths) / sample.per_row) + sample.unusable
    several = f", each with {sample.per_row:.3g} prompts, short words for answers" if sample.per_row != 1 else ""
    print(f"{'':<12}({sampled:,} of {rows:,} rows sampled{unusable}{several})")
    counts, edges = np.histogram(lengths, bins=min(HISTOGRAM_BINS, int(lengths[-1] - lengths[0]) + 1))
    for i in range(len(counts)):
        bar = "#" * round(40 * counts[i] / counts.max())
        print(f"{'':<12}{edges[i]:>8,.0f} - {edges[i + 1]:>8,.0f} tokens {counts[i]:>7,} rows {bar}".rstrip())


def _print_memory(job: Job, sample: Sample) -> None:
    engine, checkpoint = job.config.engine, job.checkpoint
    device = choose_device(job.config.model.device)
    dtype = kv_dtype(engine.kv_cache_dtype, choose_dtype(job.config.model.dtype, checkpoint, device, engine))
    shape = KvShape.of(checkpoint.text_config, dtype)
    layout, longest = KvLayout.of(shape.layers), job.task.max_length
    # A plan may be made on a machine without the GPU of the run.
    backend = attention_backend("auto" if device.type == "cpu" else engine.attention, device, shape.layers)
    block_size = page_size(engine, backend)
    engine = dataclasses.replace(engine, block_size=block_size)
    per_token, per_block = shape.bytes_per_token, layout.block_bytes(block_size, dtype)
    print(f"{'KV cache':<12}{shape.formula()} = {per_token:,} bytes = {per_token / MIB:.3g} MiB a token")
    for window, count in sorted(Counter(layer.window for layer in shape.layers if layer.window is not None).items()):
        print(f"{'':<12}{count} of the {len(shape.layers)} layers keep the last {window:,} tokens only")
    for count in (1, 16):
        blocks = count * blocks_for(layout.groups, block_size, longest)
        print(f"{'':<12}{count} x {longest:,} tokens take {blocks * per_block / GIB:.2f} GiB")
    budget = kv_budget(engine, layout, dtype, longest, device)
    # A conversation ends with all of its answers in it.
    answers = max(round(sample.per_row), 1) if job.config.prompt.turns else 1
    per_row = min(int(sample.mean or longest) + answers * job.task.max_tokens, longest)
    room = int(budget // per_block) // blocks_for(layout.groups, block_size, per_row)
    fit = min(engine.max_num_seqs, room)
    print(
        f"{'':<12}{budget / GIB:.2f} GiB on {device} hold {fit:,} rows of {per_row:,} tokens at once "
        f"(engine.max_num_seqs={engine.max_num_seqs})"
    )


def _print_time(job: Job, sample: Sample) -> None:
    """2 x parameters operations a token, at the rate of a large matrix product measured here."""
    if not len(sample.lengths):
        return
    config = job.config
    device = choose_device(config.model.device)
    encodes = job.task.pooler is not None
    dtype = choose_dtype(config.model.dtype, job.checkpoint, device, config.engine, encodes=encodes)
    if device.type == "cpu" and not library_packs(dtype):
        dtype = torch.float32  # which our kernels widen to
    parameters, rate = count_parameters(job.checkpoint, job.task.purpose), matmul_rate(dtype, device)
    prompts = int(sample.mean * sample.per_row * job.plan.rows)
    caches, generates = job.task.pooler is None and config.engine.prefix_caching, job.task.max_tokens > 0
    computed = int(prompts * (1 - sample.shared)) if caches else prompts
    most = int(job.task.max_tokens * sample.per_row * job.plan.results)
    least, longest = (2 * parameters * tokens / rate for tokens in (computed, computed + most))
    answers = f"; at most {most:,} to generate" if generates else ""
    print(f"{'tokens':<12}about {prompts:,} in prompts, {computed:,} of them to compute{answers}")
    answers = f", {_duration(longest)} with full-length answers" if generates else ""
    print(f"{'time':<12}at least {_duration(least)} for the prompts{answers}")
    print(
        f"{'':<12}(2 x {parameters / 1e6:,.0f} M parameters x tokens at {rate / 1e12:.2f} TFLOP/s, measured here on "
        f"{device} in {str(dtype).removeprefix('torch.')}; attention and short batches come on top)"
    )


def count_parameters(checkpoint: Checkpoint, purpose: str = "generate") -> int:
    """Parameters that a token passes through, from the config alone; no weight is read or allocated."""
    from transformers import AutoModelForCausalLM

    auto_class = AutoModelForCausalLM if purpose == "generate" else encoder_class(checkpoint.config, purpose)
    with torch.device("meta"):
        model = auto_class.from_config(checkpoint.config, trust_remote_code=checkpoint.model.trust_remote_code)
    config = checkpoint.text_config
    # Looking up a token's vector is no product; a head that shares that table makes it one.
    looked_up = 0 if purpose == "generate" else model.get_input_embeddings().weight.numel()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    used = (getattr(config, "num_experts_per_tok", None) or experts) / max(experts, 1)
    # Experts are stacked: one tensor [experts, ...] for all of a layer, of which a token uses a few.
    numbers = sum(p.numel() * (used if p.dim() == 3 and p.shape[0] == experts else 1) for p in model.parameters())
    return int(numbers) - looked_up


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int = 1024) -> float:
    """FLOP/s of a square matrix product, the best of a few."""
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        (a @ b)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"

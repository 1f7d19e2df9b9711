"""What the machine can do at most, and from that a lower bound of the seconds that a workload takes.

The bound counts what no engine can leave out: one pass of the layers over each distinct position of the prompts'
prefix tree and over each generated token but the last, the head where a token is chosen, attention of each position
to its own past, and all weights read once for each token of the longest output.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from batchrun.bench.workloads import Row
from batchrun.engine.checkpoint import Checkpoint

GEMM_ROWS = (64, 128, 256, 512)
SQUARE = 2048
CUDA_SQUARE = 8192  # smaller ones leave multiprocessors of a GPU idle
COPIED_BYTES = 2**31
SECONDS = 0.2  # spent on each product
READ_SECONDS = 1.0
READ_BYTES = (256 * 2**20, 2**30)  # the buffer is as large as the weights, within these bounds


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the work for one token. Counts are of parameters."""

    layers: int  # parameters of the layers that a token passes through
    head: int
    attention: int  # query heads x head dimension, summed over the layers with full attention
    element_bytes: int
    hidden: int
    feed_forward: int
    vocabulary: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: Any) -> ModelShape:
        """From the config alone: the model is built without storage."""
        import torch
        from transformers import AutoModelForCausalLM

        from batchrun.dry import count_parameters

        config = checkpoint.text_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                checkpoint.config, trust_remote_code=checkpoint.model.trust_remote_code
            )
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        apart = embedding.numel() + (0 if head is embedding else head.numel())
        heads = config.num_attention_heads
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        return cls(
            layers=count_parameters(checkpoint) - apart,
            head=head.numel(),
            attention=types.count("full_attention")
            * heads
            * (getattr(config, "head_dim", None) or config.hidden_size // heads),
            element_bytes=dtype.itemsize,
            hidden=config.hidden_size,
            feed_forward=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            vocabulary=head.shape[0],
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes that a step reads at least."""
        return (self.layers + self.head) * self.element_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """The best rates seen on this machine."""

    flops: float  # floating-point operations a second; on a CPU in the model's type or float32, whichever is faster
    read: float  # bytes a second; on a GPU those of a copy, read and written


@dataclass(frozen=True, slots=True)
class Work:
    """What a workload cannot avoid."""

    tokens: int  # through the layers
    heads: int  # tokens chosen
    pairs: int  # of a query and a key that it sees
    steps: int  # one after the other


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bounds in seconds."""

    compute: float
    weights: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.weights)


def count_work(rows: Sequence[Row]) -> Work:
    """Sorted prompts share with the one before them what a prefix tree holds once."""
    prompts = sorted(row.prompt_ids for row in rows)
    new = [(0, len(prompts[0]))] if prompts else []
    new += [(_common(a, b), len(b)) for a, b in pairwise(prompts)]
    pairs = sum(_triangle(end) - _triangle(start) for start, end in new)
    generated = 0
    for row in rows:
        length, count = len(row.prompt_ids), row.max_tokens - 1
        generated += count
        pairs += _triangle(length + count) - _triangle(length)
    return Work(
        tokens=sum(end - start for start, end in new) + generated,
        heads=sum(row.max_tokens for row in rows),
        pairs=pairs,
        steps=max((row.max_tokens for row in rows), default=0),
    )


def floor(work: Work, shape: ModelShape, limits: Limits) -> Floor:
    """Two operations for each parameter and token; four for each dimension of a head and each pair."""
    operations = 2 * (shape.layers * work.tokens + shape.head * work.heads) + 4 * shape.attention * work.pairs
    return Floor(operations / limits.flops, work.steps * shape.weight_bytes / limits.read)


def measure_limits(shape: ModelShape, dtype: str, device: str, threads: int) -> Limits:
    """Measure in a process of its own, so that no idle thread pool stays behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, shape, dtype, device, threads).result()


def _measure(shape: ModelShape, dtype: str, device: str, threads: int) -> Limits:
    import torch

    from batchrun.engine.linear import library_packs

    torch.set_num_threads(threads)
    place, kinds = torch.device(device), {getattr(torch, dtype)}
    if place.type == "cpu":
        kinds.add(torch.float32)  # which some processors multiply faster than 16 bits
        kinds = {kind for kind in kinds if kind != torch.bfloat16 or library_packs(kind)}
    hidden, inner = shape.hidden, shape.feed_forward
    square = CUDA_SQUARE if place.type == "cuda" else SQUARE
    sizes = [(square, square, square)]
    for rows in GEMM_ROWS:
        sizes += [(rows, hidden, inner), (rows, inner, hidden), (rows, hidden, shape.vocabulary)]
    rates = [
        2 * m * k * n / _best(product, place, SECONDS)
        for kind in kinds
        for m, k, n in sizes
        for product in _products(m, k, n, kind, place)
    ]
    if place.type == "cuda":
        source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=place)
        target = torch.empty_like(source)
        return Limits(max(rates), 2 * COPIED_BYTES / _best(lambda: target.copy_(source), place, READ_SECONDS))
    size = min(max(shape.weight_bytes, READ_BYTES[0]), READ_BYTES[1])
    buffer = torch.ones(size // 4, device=place)
    return Limits(max(rates), buffer.nbytes / _best(buffer.sum, place, READ_SECONDS))


def _products(m: int, k: int, n: int, dtype: Any, device: Any) -> list[Callable[[], Any]]:
    """Ways to multiply [m, k] by the transpose of [n, k]: as it is, and with the weight packed beforehand."""
    import torch

    from batchrun.engine.linear import library_packs

    x = torch.randn(m, k, device=device).to(dtype)
    weight = torch.randn(n, k, device=device).to(dtype)
    ways: list[Callable[[], Any]] = [lambda: torch.nn.functional.linear(x, weight)]
    if device.type == "cpu" and dtype is torch.bfloat16 and library_packs(dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, m)
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    return ways


def _best(call: Callable[[], Any], device: Any, seconds: float) -> float:
    """The shortest of the runs that fit into `seconds`, at least three."""
    import torch

    def timed() -> float:
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    timed()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        times.append(timed())
    return min(times)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _triangle(n: int) -> int:
    """1 + 2 + ... + n."""
    return n * (n + 1) // 2

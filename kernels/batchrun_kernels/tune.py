"""Finds the fastest launch options of the kernels on the GPU that is there, and writes them to the table of tuned.py.

`python -m batchrun_kernels.tune [--kernel NAME] [--table FILE]`. Each candidate runs and must equal the reference in
float64 before it is timed; an option that the GPU has no room for, or that computes something else, is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from batchrun_kernels import tuned as tables
from batchrun_kernels.decode_plan import plan_decode
from batchrun_kernels.grouped_gemm import (
    down_experts,
    down_experts_torch,
    gate_up_experts,
    gate_up_experts_torch,
    route,
    tiles_of,
)
from batchrun_kernels.paged import KvPages, Rows, Scoring, attention_shape, paged_attention_torch
from batchrun_kernels.paged_decode import paged_decode
from batchrun_kernels.paged_prefill import paged_prefill, plan_prefill
from batchrun_kernels.prefix_group import Groups, prefix_group, prefix_group_torch
from batchrun_kernels.prefix_plan import PrefixPlan, plan_prefix
from batchrun_kernels.tuned import TABLE, Key, Options, gpu_name

BLOCK_SIZE = 64
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 1e-4}  # relative to the largest number
RUNS = 20
CACHE_BYTES = 2**28  # more than the cache of any GPU holds
WARPS, STAGES = (2, 4, 8), (1, 2, 3, 4)


class Case(NamedTuple):
    """A kernel at one shape. What `prepare` gives launches it with the options that the table has; `expected` is in
    float64."""

    kernel: str
    shape: str
    dtype: torch.dtype
    candidates: list[Options]
    prepare: Callable[[], Callable[[], Tensor]]
    expected: Callable[[], Tensor]


class Layer(NamedTuple):
    """An attention layer, where it is computed and in which type."""

    heads: int
    kv_heads: int
    dim: int
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    num_sms: int = 132

    def rows(self, lengths: list[int], counts: list[int]) -> tuple[Tensor, KvPages, Rows]:
        """Random queries, and pages of their own for each sequence."""
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        numbers = torch.arange(sum(blocks)).split(blocks)
        tables = torch.nn.utils.rnn.pad_sequence(list(numbers), batch_first=True)
        shape = (sum(blocks), BLOCK_SIZE, self.kv_heads, self.dim)
        keys, values = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        q = torch.randn(sum(counts), self.heads, self.dim, device=self.device, dtype=self.dtype)
        starts = torch.tensor([0, *counts]).cumsum(0)[:-1]
        each = (tables, torch.tensor(lengths), starts, torch.tensor(counts))
        return q, KvPages(keys, values), Rows(*(x.int().to(self.device) for x in each))


def decode_case(layer: Layer, lengths: list[int]) -> Case:
    """One query for each sequence."""
    counts = [1] * len(lengths)
    q, pages, rows = layer.rows(lengths, counts)
    scoring = Scoring(layer.dim**-0.5)

    def prepare() -> Callable[[], Tensor]:
        plan = plan_decode(lengths, counts, layer.heads, pages, q.element_size(), num_sms=layer.num_sms)
        return lambda: paged_decode(q, pages, rows, scoring, plan)

    shape = attention_shape(pages, q.element_size())
    candidates = _choices(num_warps=WARPS, num_stages=STAGES, programs_per_sm=(1, 2, 3, 4))
    return Case("paged_decode", shape, q.dtype, candidates, prepare, lambda: _attention(q, pages, rows, scoring))


def prefill_case(layer: Layer, lengths: list[int]) -> Case:
    """Whole prompts."""
    q, pages, rows = layer.rows(lengths, lengths)
    scoring, group = Scoring(layer.dim**-0.5), layer.heads // layer.kv_heads
    plan = plan_prefill(lengths, lengths, group, layer.dim, q.element_size(), device=layer.device)
    shape = attention_shape(pages, q.element_size())
    return Case(
        "paged_prefill",
        shape,
        q.dtype,
        _choices(num_warps=(4, 8), num_stages=STAGES),
        lambda: lambda: paged_prefill(q, pages, rows, scoring, plan),
        lambda: _attention(q, pages, rows, scoring),
    )


def prefix_inputs(
    layer: Layer, shared: int, tokens: int, chunk: int | None = None
) -> tuple[Tensor, KvPages, Groups, Scoring, PrefixPlan]:
    """Of prefix_group: one group of so many rows over so many shared positions."""
    q, pages, rows = layer.rows([shared], [tokens])
    places = torch.arange(tokens, device=layer.device, dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32).to(layer.device)
    leaders = torch.zeros(1, device=layer.device, dtype=torch.int32)
    groups = Groups(rows.block_tables, leaders, rows.seq_lens, starts, places, places + shared)
    sizes = (layer.heads, pages, q.element_size())
    plan = plan_prefix([shared], [tokens], *sizes, num_sms=layer.num_sms, chunk=chunk)
    return q, pages, groups, Scoring(layer.dim**-0.5), plan


def prefix_case(layer: Layer, shared: int, tokens: int) -> Case:
    """One group, its keys read as one chunk."""
    inputs = prefix_inputs(layer, shared, tokens, chunk=-(-shared // 64) * 64)
    q, pages, groups, scoring, plan = inputs

    def run() -> Tensor:
        prefix_group(*inputs)
        return plan.runs

    return Case(
        "prefix_group",
        f"{attention_shape(pages, q.element_size())}x{plan.block_m}",
        q.dtype,
        _choices(num_warps=(4, 8), num_stages=STAGES),
        lambda: run,
        lambda: prefix_group_torch(q.double(), _double(pages), groups, scoring)[0],
    )


def expert_cases(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    """Both products of a layer with experts, chosen at random."""
    index = torch.rand(tokens, experts, device=device).topk(top_k).indices
    routing, pairs = route(index, experts), tokens * top_k
    x, scales = (torch.randn(tokens, n, device=device, dtype=dtype) for n in (hidden, top_k))
    sizes = ((2 * inner, hidden), (hidden, inner))
    up, down = (torch.randn(experts, n, k, device=device, dtype=dtype) * k**-0.5 for n, k in sizes)
    gated = gate_up_experts_torch(x, up, routing, "silu")
    size = x.element_size()
    rows = tiles_of(pairs, experts, size, gated=True).block_m
    heights = (rows,) if rows == 16 else (rows // 2, rows)
    candidates = _choices(block_m=heights, block_n=(64, 128), block_k=(64, 128), num_warps=(4, 8), num_stages=(3, 4))
    yield Case(
        "gate_up_experts",
        f"{rows}x{up.shape[1]}x{up.shape[2]}x{size}",
        dtype,
        candidates,
        lambda: lambda: gate_up_experts(x, up, routing, "silu"),
        lambda: gate_up_experts_torch(x.double(), up.double(), routing, "silu"),
    )
    yield Case(
        "down_experts",
        f"{rows}x{down.shape[1]}x{down.shape[2]}x{size}",
        dtype,
        candidates,
        lambda: lambda: down_experts(gated, down, routing, scales),
        lambda: down_experts_torch(gated.double(), down.double(), routing, scales.double()),
    )


def cases(device: torch.device, num_sms: int) -> Iterator[Case]:
    """What is tuned: heads of 64, 128 and 256, and experts of Qwen3-30B-A3B and of Mixtral, in bfloat16."""
    for dim in (64, 128, 256):
        layer = Layer(32, 8, dim, device, num_sms=num_sms)
        yield decode_case(layer, [2048] * 64)
        yield prefill_case(layer, [2048])
        yield prefix_case(layer, 2048, 256)
    for tokens in (16, 256, 2048):
        yield from expert_cases(tokens, 8, 128, 2048, 768, device, torch.bfloat16)
        yield from expert_cases(tokens, 2, 8, 4096, 14336, device, torch.bfloat16)


def tune(
    chosen: Iterable[Case], gpu: str, seconds: Callable[[Callable[[], Tensor]], float]
) -> Iterator[tuple[Key, Options]]:
    """The fastest candidate of each case by the timer `seconds`; a case that no candidate computes has none."""
    for case in chosen:
        key, expected = Key(gpu, case.kernel, case.shape), case.expected()
        before, times = tables.entries().get(key), {}
        try:
            for number, candidate in enumerate(case.candidates):
                tables.entries()[key] = candidate
                run = case.prepare()
                if _computes(case, run, candidate, expected):
                    times[number] = seconds(run)
        finally:
            tables.entries().pop(key)
            if before is not None:
                tables.entries()[key] = before
        if times:
            best = min(times, key=times.__getitem__)
            print(f"{case.kernel} {case.shape}: {times[best] * 1e6:.1f} us with {case.candidates[best]}", flush=True)
            yield key, case.candidates[best]


def cuda_seconds(run: Callable[[], object]) -> float:
    """Median of RUNS launches, by the GPU's own clock, each with nothing of its inputs in the cache."""
    for _ in range(3):
        run()
    other = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(RUNS)]
    for start, end in spans:
        other.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in spans) / 1000


def _computes(case: Case, run: Callable[[], Tensor], candidate: Options, expected: Tensor) -> bool:
    try:
        out = run().double()
    except OutOfResources:
        return False
    if bool((out - expected).abs().max() <= TOLERANCE[case.dtype] * expected.abs().max()):
        return True
    print(f"{case.kernel} {case.shape}: wrong numbers with {candidate}", file=sys.stderr, flush=True)
    return False


def _attention(q: Tensor, pages: KvPages, rows: Rows, scoring: Scoring) -> Tensor:
    return paged_attention_torch(q.double(), _double(pages), rows, scoring)[0]


def _double(pages: KvPages) -> KvPages:
    return pages._replace(keys=pages.keys.double(), values=pages.values.double())


def _choices(**values: tuple[int, ...]) -> list[Options]:
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def main(arguments: list[str] | None = None) -> int:
    """Tune the GPU that is there; the exit code is 2 if there is none."""
    parser = argparse.ArgumentParser(prog="python -m batchrun_kernels.tune", description=__doc__)
    parser.add_argument("--kernel", help="this one alone")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table to renew; default: the installed one")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no GPU to tune for", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    torch.manual_seed(0)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    chosen = (case for case in cases(device, sms) if given.kernel in (None, case.kernel))
    found = tables.read_table(given.table) if given.table.exists() else {}
    for key, options in tune(chosen, gpu_name(device), cuda_seconds):
        found[key] = options
        tables.write_table(given.table, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

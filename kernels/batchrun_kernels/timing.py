"""The launches behind the table of roofline.py, timed on the GPU that is there: `python -m batchrun_kernels.timing`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from batchrun_kernels.act_and_mul import act_and_mul
from batchrun_kernels.decode_plan import plan_decode
from batchrun_kernels.gather_last import gather_last
from batchrun_kernels.grouped_gemm import down_experts, gate_up_experts, route
from batchrun_kernels.matmul import matmul
from batchrun_kernels.merge_runs import merge_runs
from batchrun_kernels.paged import FP8, Scoring
from batchrun_kernels.paged_decode import paged_decode
from batchrun_kernels.paged_prefill import paged_prefill, plan_prefill
from batchrun_kernels.penalise import penalise
from batchrun_kernels.prefix_group import prefix_group
from batchrun_kernels.reshape_and_cache import reshape_and_cache
from batchrun_kernels.rms_norm import add_rms_norm
from batchrun_kernels.roofline import Shape, table
from batchrun_kernels.rope_and_cache import Pages, rope_and_cache
from batchrun_kernels.sample import sample
from batchrun_kernels.token_logprobs import token_logprobs
from batchrun_kernels.tune import Layer, cuda_seconds, prefix_inputs

Run = Callable[[], object]
COPIED_BYTES = 4 * 2**30
SQUARE = 8192


def launches(device: torch.device, num_sms: int) -> dict[Shape, Callable[[], Run]]:
    """What makes the inputs of a shape of the table, and gives its launch."""
    new = partial(torch.randn, device=device, dtype=torch.bfloat16)
    layer = Layer(32, 8, 128, device, num_sms=num_sms)
    return {
        ("paged_decode", "64 rows x 2,048 keys"): partial(_decode, layer, [2048] * 64),
        ("paged_decode", "64 rows x 2,048 keys, 4 queries"): partial(_decode, layer, [2048] * 64, 4),
        ("paged_decode", "64 rows x 2,048 keys in fp8"): partial(_decode, layer, [2048] * 64, fp8=True),
        ("paged_decode", "1 row x 131,072 keys"): partial(_decode, layer, [131072]),
        ("paged_prefill", "1 prompt of 4,096"): partial(_prefill, layer, [4096], [4096]),
        ("paged_prefill", "64 prompts of 64 after 2,048"): partial(_prefill, layer, [2112] * 64, [64] * 64),
        ("paged_prefill", "1 prompt of 4,096, window 512"): partial(_prefill, layer, [4096], [4096], 512),
        ("prefix_group", "256 rows share 2,048 keys"): lambda: partial(prefix_group, *prefix_inputs(layer, 2048, 256)),
        ("merge_runs", "256 tokens, 1 run"): partial(_merge, layer, 256),
        ("reshape_and_cache", "2,048 tokens"): partial(_cache, layer, 2048),
        ("rope_and_cache", "2,048 tokens"): partial(_rope, layer, 2048),
        ("rms_norm", "2,048 tokens, with residual"): lambda: partial(
            add_rms_norm, new(2048, 4096), new(2048, 4096), new(4096), 1e-6
        ),
        ("act_and_mul", "2,048 tokens x 14,336"): lambda: partial(act_and_mul, new(2048, 28672), "silu"),
        ("grouped_gemm", "64 tokens, 8 of 128 experts of 768"): partial(_experts, new, 64),
        ("grouped_gemm", "2,048 tokens, 8 of 128 experts of 768"): partial(_experts, new, 2048),
        ("matmul", "64 rows, 4,096 to 28,672"): lambda: partial(matmul, new(64, 4096), new(28672, 4096)),
        ("matmul", "2,048 rows, 4,096 to 28,672"): lambda: partial(matmul, new(2048, 4096), new(28672, 4096)),
        ("gather_last", "256 rows"): lambda: partial(
            gather_last, new(2048, 4096), torch.randint(2048, (256,), device=device)
        ),
        ("penalise", "256 rows x 128,256 logits"): partial(_penalise, new, 256),
        ("sample", "256 rows x 128,256 logits, no filter"): partial(_sample, new, 256, 1.0),
        ("sample", "256 rows x 128,256 logits, top-p"): partial(_sample, new, 256, 0.9),
        ("token_logprobs", "256 rows x 128,256 logits"): lambda: partial(
            token_logprobs, new(256, 128256), torch.randint(128256, (256,), device=device)
        ),
    }


def _decode(layer: Layer, lengths: list[int], queries: int = 1, *, fp8: bool = False) -> Run:
    counts = [queries] * len(lengths)
    q, pages, rows = layer.rows(lengths, counts)
    if fp8:
        pages = pages._replace(keys=pages.keys.to(FP8), values=pages.values.to(FP8))
    plan = plan_decode(lengths, counts, layer.heads, pages, q.element_size(), num_sms=layer.num_sms)
    return partial(paged_decode, q, pages, rows, Scoring(layer.dim**-0.5), plan)


def _prefill(layer: Layer, lengths: list[int], counts: list[int], window: int | None = None) -> Run:
    q, pages, rows = layer.rows(lengths, counts)
    sizes = (layer.heads // layer.kv_heads, layer.dim, q.element_size())
    plan = plan_prefill(lengths, counts, *sizes, window=window, device=layer.device)
    return partial(paged_prefill, q, pages, rows, Scoring(layer.dim**-0.5, window), plan)


def _merge(layer: Layer, tokens: int) -> Run:
    out, lse = (torch.randn(tokens, layer.heads, *end, device=layer.device) for end in ((layer.dim,), ()))
    starts = torch.arange(tokens + 1, device=layer.device, dtype=torch.int32)
    return partial(merge_runs, out.bfloat16(), lse, starts[:-1], starts, out, lse)


def _cache(layer: Layer, tokens: int) -> Run:
    _, pages, _ = layer.rows([tokens], [1])
    k, v = (torch.randn_like(pages.keys[0, :1]).expand(tokens, -1, -1).contiguous() for _ in range(2))
    return partial(reshape_and_cache, k, v, pages.keys, pages.values, torch.arange(tokens, device=layer.device))


def _rope(layer: Layer, tokens: int) -> Run:
    q, pages, _ = layer.rows([tokens], [tokens])
    k, v = (q[:, : layer.kv_heads].contiguous() for _ in range(2))
    cos, sin = (torch.randn(tokens, layer.dim, device=layer.device, dtype=layer.dtype) for _ in range(2))
    into = Pages(pages.keys, pages.values, torch.arange(tokens, device=layer.device))
    return partial(rope_and_cache, q, k, v, cos, sin, into)


def _experts(new: Callable[..., Tensor], tokens: int) -> Run:
    x, up, down = new(tokens, 2048), new(128, 1536, 2048), new(128, 2048, 768)
    routing, scales = route(new(tokens, 128).topk(8).indices, 128), new(tokens, 8)
    return lambda: down_experts(gate_up_experts(x, up, routing, "silu"), down, routing, scales)


def _penalise(new: Callable[..., Tensor], rows: int) -> Run:
    logits = new(rows, 128256)
    counts = torch.zeros(logits.shape, device=logits.device, dtype=torch.int32)
    slots = torch.arange(rows, device=logits.device)
    one, zero = torch.ones(rows, device=logits.device), torch.zeros(rows, device=logits.device)
    return partial(penalise, logits, counts, slots, one, zero, zero)


def _sample(new: Callable[..., Tensor], rows: int, top_p: float) -> Run:
    logits = new(rows, 128256)
    one, places = torch.ones(rows, device=logits.device), torch.arange(rows, device=logits.device)
    return partial(sample, logits, one, 0 * places, top_p * one, 0 * one, places, places)


def measure(device: torch.device) -> Iterator[tuple[Shape, float]]:
    """Seconds of each launch; those of the table that run on this GPU."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    for shape, make in launches(device, sms).items():
        if shape[1].endswith("fp8") and torch.cuda.get_device_capability(device) < (8, 9):
            continue
        yield shape, cuda_seconds(make())


def ceilings(device: torch.device) -> tuple[float, float]:
    """The best rates of this GPU: bytes a second, read and written, of a copy; operations of a product of bfloat16."""
    source = torch.empty(COPIED_BYTES // 2, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    a, b = (torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * source.nbytes / cuda_seconds(lambda: target.copy_(source)), 2 * SQUARE**3 / cuda_seconds(lambda: a @ b)


def main() -> int:
    """Print the table with what was measured; the exit code is 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print("there is no GPU to time kernels on", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    print("\n".join(table(dict(measure(device)), *ceilings(device))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

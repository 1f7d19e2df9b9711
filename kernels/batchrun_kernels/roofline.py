"""What each kernel costs at stated shapes, and how long an H200 would take for it at least.

`python -m batchrun_kernels.roofline` prints the table of docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from batchrun_kernels.act_and_mul import act_and_mul_cost
from batchrun_kernels.cost import Cost
from batchrun_kernels.gather_last import gather_last_cost
from batchrun_kernels.grouped_gemm import grouped_gemm_cost
from batchrun_kernels.matmul import matmul_cost
from batchrun_kernels.merge_runs import merge_runs_cost
from batchrun_kernels.paged_decode import paged_decode_cost
from batchrun_kernels.paged_prefill import paged_prefill_cost
from batchrun_kernels.penalise import penalise_cost
from batchrun_kernels.prefix_group import prefix_group_cost
from batchrun_kernels.reshape_and_cache import reshape_and_cache_cost
from batchrun_kernels.rms_norm import rms_norm_cost
from batchrun_kernels.rope_and_cache import rope_and_cache_cost
from batchrun_kernels.sample import sample_cost
from batchrun_kernels.token_logprobs import token_logprobs_cost

BYTES_PER_SECOND = 4.3e12  # an H200 copying its own memory
FLOPS_PER_SECOND = 790e12  # an H200's matrix products of bfloat16
UNMEASURED = "not measured: no GPU"
Shape = tuple[str, str]  # a kernel, and at which shape


def shapes() -> dict[Shape, Cost]:
    """Cost by kernel and shape, in bfloat16: layers of 32 query heads over 8 key-value heads of 128, hidden 4096."""
    heads, kv_heads, dim = 32, 8, 128
    layer = (heads, kv_heads, dim, dim, 2)
    return {
        ("paged_decode", "64 rows x 2,048 keys"): paged_decode_cost([2048] * 64, *layer),
        ("paged_decode", "64 rows x 2,048 keys, 4 queries"): paged_decode_cost([2048] * 64, *layer, queries=4),
        ("paged_decode", "64 rows x 2,048 keys in fp8"): paged_decode_cost([2048] * 64, *layer, kv_itemsize=1),
        ("paged_decode", "1 row x 131,072 keys"): paged_decode_cost([131072], *layer),
        ("paged_prefill", "1 prompt of 4,096"): paged_prefill_cost([4096], [4096], *layer),
        ("paged_prefill", "64 prompts of 64 after 2,048"): paged_prefill_cost([2112] * 64, [64] * 64, *layer),
        ("paged_prefill", "1 prompt of 4,096, window 512"): paged_prefill_cost([4096], [4096], *layer, window=512),
        ("prefix_group", "256 rows share 2,048 keys"): prefix_group_cost([2048], [256], *layer),
        ("merge_runs", "256 tokens, 1 run"): merge_runs_cost(256, heads, 1, dim, 2),
        ("reshape_and_cache", "2,048 tokens"): reshape_and_cache_cost(2048, kv_heads, dim, dim, 2),
        ("rope_and_cache", "2,048 tokens"): rope_and_cache_cost(2048, heads, kv_heads, dim, dim, dim, 2, 2),
        ("rms_norm", "2,048 tokens, with residual"): rms_norm_cost(2048, 4096, 2, residual=True),
        ("act_and_mul", "2,048 tokens x 14,336"): act_and_mul_cost(2048, 14336, 2),
        ("grouped_gemm", "64 tokens, 8 of 128 experts of 768"): grouped_gemm_cost(64, 512, 128, 2048, 768, 2),
        ("grouped_gemm", "2,048 tokens, 8 of 128 experts of 768"): grouped_gemm_cost(2048, 16384, 128, 2048, 768, 2),
        ("matmul", "64 rows, 4,096 to 28,672"): matmul_cost(64, 28672, 4096, 2),
        ("matmul", "2,048 rows, 4,096 to 28,672"): matmul_cost(2048, 28672, 4096, 2),
        ("gather_last", "256 rows"): gather_last_cost(256, 4096, 2),
        ("penalise", "256 rows x 128,256 logits"): penalise_cost(256, 128256, 2),
        ("sample", "256 rows x 128,256 logits, no filter"): sample_cost(256, 128256, 2),
        ("sample", "256 rows x 128,256 logits, top-p"): sample_cost(256, 128256, 2, filters=1),
        ("token_logprobs", "256 rows x 128,256 logits"): token_logprobs_cost(256, 128256, 2),
    }


def table(
    measured: Mapping[Shape, float] | None = None,
    bytes_per_second: float = BYTES_PER_SECOND,
    flops_per_second: float = FLOPS_PER_SECOND,
) -> Iterator[str]:
    """The lines of a Markdown table, with the seconds that were `measured` and a device's best rates."""
    yield "| kernel | shape | MB | GFLOP | bound | at least, µs | measured |"
    yield "|---|---|---|---|---|---|---|"
    for (kernel, shape), cost in shapes().items():
        bound = "bytes" if cost.bytes / bytes_per_second > cost.flops / flops_per_second else "operations"
        least = cost.seconds(bytes_per_second, flops_per_second)
        seconds = (measured or {}).get((kernel, shape))
        found = UNMEASURED if seconds is None else f"{seconds * 1e6:,.1f} µs, {least / seconds:.0%} of the bound"
        numbers = f"{cost.bytes / 1e6:,.1f} | {cost.flops / 1e9:,.1f} | {bound} | {least * 1e6:,.1f}"
        yield f"| `{kernel}` | {shape} | {numbers} | {found} |"


if __name__ == "__main__":
    print("\n".join(table()))

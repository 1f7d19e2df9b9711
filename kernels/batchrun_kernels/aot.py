"""Compiles every kernel at representative shapes for every target, without a GPU.

`python -m batchrun_kernels.aot` prints what each will use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchrun_kernels.act_and_mul import act_and_mul
from batchrun_kernels.decode_plan import plan_decode
from batchrun_kernels.gather_last import feed_tokens, gather_last, note_tokens
from batchrun_kernels.grouped_gemm import down_experts, gate_up_experts, route
from batchrun_kernels.matmul import matmul
from batchrun_kernels.merge_runs import merge_runs
from batchrun_kernels.paged import FP8, KvPages, Rows, Scoring
from batchrun_kernels.paged_decode import paged_decode
from batchrun_kernels.paged_prefill import PrefillPlan, block_m_of, paged_prefill
from batchrun_kernels.penalise import count_tokens, penalise
from batchrun_kernels.precision import TF32
from batchrun_kernels.prefix_group import Groups, prefix_group
from batchrun_kernels.prefix_plan import plan_prefix
from batchrun_kernels.reshape_and_cache import reshape_and_cache
from batchrun_kernels.rms_norm import add_rms_norm, rms_norm
from batchrun_kernels.rope_and_cache import HeadNorm, Pages, rope, rope_and_cache
from batchrun_kernels.sample import sample
from batchrun_kernels.targets import TARGETS, Resources, compile_launch, record
from batchrun_kernels.token_logprobs import token_logprobs


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _pages(kv_heads: int, dk: int, dv: int, dtype: torch.dtype, block_size: int = 64) -> KvPages:
    return KvPages(_meta(512, block_size, kv_heads, dk, dtype=dtype), _meta(512, block_size, kv_heads, dv, dtype=dtype))


def _rows() -> Rows:
    return Rows(_meta(32, 64, dtype=torch.int32), *(_meta(32, dtype=torch.int32) for _ in range(3)))


class _Attention(NamedTuple):
    """A layer whose attention kernels are to be compiled."""

    heads: int
    kv_heads: int
    dk: int
    dv: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None

    def inputs(self) -> tuple[Tensor, KvPages, Rows, Scoring]:
        pages = _pages(self.kv_heads, self.dk, self.dv, self.kv_dtype or self.dtype, self.block_size)
        scoring = Scoring(self.dk**-0.5, self.window, self.softcap, _meta(self.heads) if self.sinks else None)
        return _meta(2048, self.heads, self.dk, dtype=self.dtype), pages, _rows(), scoring

    def decode(self, queries: int = 1, merged: bool = False) -> None:
        q, pages, rows, scoring = self.inputs()
        plan = plan_decode([4096] * 32, [queries] * 32, self.heads, pages, q.element_size(), num_sms=132)
        lse = _meta(*q.shape[:2], dtype=torch.float32) if merged else None
        paged_decode(q, pages, rows._replace(first_keys=rows.seq_lens), scoring, plan, lse=lse)

    def prefill(self, invariant: bool = False) -> None:
        plan = PrefillPlan(_meta(64, 2, dtype=torch.int32), block_m_of(max(self.dk, self.dv), self.dtype.itemsize))
        paged_prefill(*self.inputs(), plan, invariant=invariant)

    def prefix(self) -> None:
        q, pages, rows, scoring = self.inputs()
        plan = plan_prefix([4096], [64], self.heads, pages, q.element_size(), num_sms=132)
        one, two, tokens = (_meta(n, dtype=torch.int32) for n in (1, 2, 64))
        groups = Groups(rows.block_tables, one, one, two, tokens, tokens)
        prefix_group(q, pages, groups, scoring, plan)


def _merge() -> None:
    lse, run_lse, runs = (_meta(*shape, dtype=torch.float32) for shape in ((256, 32), (512, 32), (512, 32, 128)))
    tokens, run_starts = (_meta(n, dtype=torch.int32) for n in (64, 65))
    merge_runs(_meta(256, 32, 128), lse, tokens, run_starts, runs, run_lse)


def _cache(heads: int, dk: int, dv: int, dtype: torch.dtype = torch.bfloat16) -> None:
    pages = _meta(512, 64, heads, dk, dtype=dtype), _meta(512, 64, heads, dv, dtype=dtype)
    reshape_and_cache(_meta(256, heads, dk), _meta(256, heads, dv), *pages, _meta(256, dtype=torch.int64))


def _rope(
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    rotary: int | None = None,
    norm: bool = False,
    interleaved: bool = False,
    cached: bool = True,
    pages: torch.dtype = torch.bfloat16,
) -> None:
    qkv = _meta(256, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    angles = _meta(256, rotary or dim), _meta(256, rotary or dim)
    head_norm = HeadNorm(_meta(dim), _meta(dim), 1e-6) if norm else None
    if not cached:
        rope(q, k, *angles, norm=head_norm, interleaved=interleaved)
        return
    stored = [_meta(512, 64, kv_heads, dim, dtype=pages) for _ in range(2)]
    into = Pages(stored[0], stored[1], _meta(256, dtype=torch.int64), 0.5, 0.5)
    rope_and_cache(q, k, v, *angles, into, norm=head_norm, interleaved=interleaved)


def _experts(tokens: int, hidden: int, inner: int, experts: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Both products of a layer whose tokens choose two experts each."""
    routing = route(_meta(tokens, 2, dtype=torch.int64), experts)
    gated = gate_up_experts(
        _meta(tokens, hidden, dtype=dtype), _meta(experts, 2 * inner, hidden, dtype=dtype), routing, "silu"
    )
    down_experts(gated, _meta(experts, hidden, inner, dtype=dtype), routing, _meta(tokens, 2, dtype=torch.float32))


def _matmul(rows: int, width: int, depth: int, dtype: torch.dtype = torch.bfloat16, *, bias: bool = False) -> None:
    weight = _meta(width, depth, dtype=dtype)
    matmul(_meta(rows, depth, dtype=dtype), weight, _meta(width, dtype=dtype) if bias else None)


def _in_tf32(call: Callable[[], object]) -> None:
    setting = torch.backends.cuda.matmul
    before, setting.fp32_precision = setting.fp32_precision, TF32
    try:
        call()
    finally:
        setting.fp32_precision = before


def _sample(dtype: torch.dtype) -> None:
    """What becomes of the logits of a step, up to the input of the next."""
    rows, vocabulary, capacity = 64, 151936, 256
    logits, some = _meta(rows, vocabulary, dtype=dtype), _meta(rows, dtype=torch.float32)
    slots, lengths = _meta(rows, dtype=torch.int64), _meta(capacity, dtype=torch.int64)
    counts = _meta(capacity, vocabulary, dtype=torch.int32)
    count_tokens(_meta(capacity, 4096, dtype=torch.int32), slots, lengths, lengths, counts)
    penalise(logits, counts, slots, some, some, some)
    tokens = sample(logits, some, slots, some, some, slots, slots)
    token_logprobs(logits, tokens)
    note_tokens(tokens, slots, lengths, counts)
    feed_tokens(_meta(2048, dtype=torch.int64), _meta(2048, dtype=torch.int64), lengths)


def cases() -> dict[str, Callable[[], object]]:
    """The launches to compile, by name: each dtype path, each head size and each flag of the kernels at least once."""
    x = _meta(256, 4096)
    plain, latent = _Attention(32, 8, 128, 128), _Attention(64, 4, 192, 128)
    gpt_oss = _Attention(64, 8, 64, 64, window=128, sinks=True)
    gemma2 = _Attention(16, 8, 256, 256, window=4096, softcap=50.0)
    narrow = _Attention(32, 32, 80, 80, dtype=torch.float16)
    return {
        "norm 4096": partial(rms_norm, x, _meta(4096), 1e-6),
        "norm 4096 add": partial(add_rms_norm, x, x, _meta(4096), 1e-6),
        "norm 16384 add": partial(add_rms_norm, _meta(8, 16384), _meta(8, 16384), _meta(16384), 1e-6),
        "norm 128 unit offset": partial(rms_norm, _meta(2048, 128), _meta(128), 1e-6, unit_offset=True),
        "silu 14336": partial(act_and_mul, _meta(256, 28672), "silu"),
        "gelu_tanh 9216": partial(act_and_mul, _meta(256, 18432), "gelu_tanh"),
        "cache 8x128": partial(_cache, 8, 128, 128),
        "cache 4x192/128": partial(_cache, 4, 192, 128),
        "cache 8x128 to fp8": partial(_cache, 8, 128, 128, FP8),
        "rope 32+8x128 norm": partial(_rope, 32, 8, 128, norm=True),
        "rope 32x80 of 32": partial(_rope, 32, 32, 80, rotary=32),
        "rope 16+8x256 in place": partial(_rope, 16, 8, 256, norm=True, cached=False),
        "rope 64+8x128 interleaved": partial(_rope, 64, 8, 128, interleaved=True),
        "rope 32+8x128 to fp8": partial(_rope, 32, 8, 128, pages=torch.float8_e5m2),
        "gather 4096": partial(gather_last, x, _meta(64, dtype=torch.int64)),
        "sample bfloat16": partial(_sample, torch.bfloat16),
        "sample float32": partial(_sample, torch.float32),
        "experts 64 of 2048x768": partial(_experts, 64, 2048, 768, 128),
        "experts 256 of 2048x768": partial(_experts, 2048, 2048, 768, 128),
        "experts 2048 of 4096x14336": partial(_experts, 2048, 4096, 14336, 8),
        "experts 64 float32": partial(_experts, 64, 2048, 768, 8, torch.float32),
        "matmul 4096x4096": partial(_matmul, 256, 4096, 4096),
        "matmul 151936x896 float16": partial(_matmul, 1, 151936, 896, torch.float16, bias=True),
        "matmul 4096x4096 float32": partial(_matmul, 256, 4096, 4096, torch.float32),
        "matmul 4096x4096 tf32": partial(_in_tf32, partial(_matmul, 256, 4096, 4096, torch.float32)),
        "experts 64 tf32": partial(_in_tf32, partial(_experts, 64, 2048, 768, 8, torch.float32)),
        "decode 128 queries": partial(plain.decode, 8),
        "decode 128 merged": partial(plain.decode, merged=True),
        "decode 128 page 16": plain._replace(block_size=16).decode,
        "decode 64 sinks window": gpt_oss.decode,
        "decode 64 sinks window merged": partial(gpt_oss.decode, merged=True),
        "decode 80": narrow.decode,
        "decode 192/128": latent.decode,
        "decode 256 softcap window": gemma2.decode,
        "decode 256 softcap window merged": partial(gemma2.decode, merged=True),
        "decode 128 fp8": plain._replace(kv_dtype=FP8).decode,
        "decode 128 fp8 bits": plain._replace(kv_dtype=torch.uint8).decode,
        "decode 128 float32": plain._replace(dtype=torch.float32).decode,
        "decode 128 tf32": partial(_in_tf32, plain._replace(dtype=torch.float32).decode),
        "merge 8x128": _merge,
        "prefix 128": plain.prefix,
        "prefix 256 softcap window": gemma2.prefix,
        "prefill 128": plain.prefill,
        "prefill invariant 128": partial(plain.prefill, True),
        "prefill 64 sinks window": gpt_oss.prefill,
        "prefill 192/128": latent.prefill,
        "prefill 256 softcap window": gemma2.prefill,
        "prefill 128 tf32": partial(_in_tf32, plain._replace(dtype=torch.float32).prefill),
        "prefix 128 fp8": plain._replace(kv_dtype=FP8).prefix,
        "prefill 128 fp8": plain._replace(kv_dtype=FP8).prefill,
        "prefill 128 fp8 bits": plain._replace(kv_dtype=torch.uint8).prefill,
    }


def targets_of(case: str) -> tuple[str, ...]:
    """All targets; prompts in their less common forms for one, since they take long; fp8 and TF32 where they are."""
    if case.startswith("pref") and not case.endswith(" 128"):
        return ("sm_90",)
    lacking = {"fp8": "sm_80", "tf32": "gfx942"}
    return tuple(target for target in TARGETS if lacking.get(case.rpartition(" ")[2]) != target)


def compile_all() -> Iterator[tuple[str, Resources]]:
    """Compiles each case for each target, one (case, resources) per launch."""
    for name, call in cases().items():
        for target in targets_of(name):
            with _built_for(target):
                launches = record(call)
            for launch in launches:
                yield name, compile_launch(launch, target)


@contextmanager
def _built_for(target: str) -> Iterator[None]:
    """Lets launchers choose as with the torch that is for this target."""
    version: Any = torch.version
    before, version.hip = version.hip, "" if TARGETS[target].backend == "hip" else None
    try:
        yield
    finally:
        version.hip = before


def main() -> None:
    """Prints the resources of every compiled kernel."""
    for case, used in compile_all():
        fields = ", ".join(f"{field} {value}" for field, value in list(used._asdict().items())[2:])
        print(f"{case:24} {used.kernel:26} {used.target:7} {fields}", flush=True)


if __name__ == "__main__":
    main()

"""Compiles every kernel at representative shapes for every target, without a GPU.

`python -m batchrun_kernels.aot` prints what each will use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from batchrun_kernels.act_and_mul import act_and_mul
from batchrun_kernels.gather_last import feed_tokens, gather_last, note_tokens
from batchrun_kernels.paged_decode import paged_decode
from batchrun_kernels.penalise import count_tokens, penalise
from batchrun_kernels.reshape_and_cache import reshape_and_cache
from batchrun_kernels.rms_norm import add_rms_norm, rms_norm
from batchrun_kernels.rope_and_cache import HeadNorm, Pages, rope, rope_and_cache
from batchrun_kernels.sample import sample
from batchrun_kernels.targets import TARGETS, Resources, compile_launch, record
from batchrun_kernels.token_logprobs import token_logprobs


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _decode(
    heads: int,
    kv_heads: int,
    dk: int,
    dv: int,
    *,
    block_size: int = 64,
    num_splits: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    paged_decode(
        _meta(32, heads, dk, dtype=dtype),
        _meta(512, block_size, kv_heads, dk, dtype=dtype),
        _meta(512, block_size, kv_heads, dv, dtype=dtype),
        _meta(32, 64, dtype=torch.int32),
        _meta(32, dtype=torch.int32),
        scale=dk**-0.5,
        num_splits=num_splits,
        window=window,
        softcap=softcap,
        sinks=_meta(heads) if sinks else None,
    )


def _cache(heads: int, dk: int, dv: int) -> None:
    pages = _meta(512, 64, heads, dk), _meta(512, 64, heads, dv)
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
    return {
        "norm 4096": partial(rms_norm, x, _meta(4096), 1e-6),
        "norm 4096 add": partial(add_rms_norm, x, x, _meta(4096), 1e-6),
        "norm 16384 add": partial(add_rms_norm, _meta(8, 16384), _meta(8, 16384), _meta(16384), 1e-6),
        "norm 128 unit offset": partial(rms_norm, _meta(2048, 128), _meta(128), 1e-6, unit_offset=True),
        "silu 14336": partial(act_and_mul, _meta(256, 28672), "silu"),
        "gelu_tanh 9216": partial(act_and_mul, _meta(256, 18432), "gelu_tanh"),
        "cache 8x128": partial(_cache, 8, 128, 128),
        "cache 4x192/128": partial(_cache, 4, 192, 128),
        "rope 32+8x128 norm": partial(_rope, 32, 8, 128, norm=True),
        "rope 32x80 of 32": partial(_rope, 32, 32, 80, rotary=32),
        "rope 16+8x256 in place": partial(_rope, 16, 8, 256, norm=True, cached=False),
        "rope 64+8x128 interleaved": partial(_rope, 64, 8, 128, interleaved=True),
        "rope 32+8x128 to fp8": partial(_rope, 32, 8, 128, pages=torch.float8_e5m2),
        "gather 4096": partial(gather_last, x, _meta(64, dtype=torch.int64)),
        "sample bfloat16": partial(_sample, torch.bfloat16),
        "sample float32": partial(_sample, torch.float32),
        "decode 128 split": partial(_decode, 32, 8, 128, 128, num_splits=8),
        "decode 128 page 16": partial(_decode, 32, 8, 128, 128, block_size=16),
        "decode 64 sinks window": partial(_decode, 64, 8, 64, 64, sinks=True, window=128),
        "decode 80": partial(_decode, 32, 32, 80, 80),
        "decode 192/128": partial(_decode, 64, 4, 192, 128),
        "decode 256 softcap": partial(_decode, 16, 8, 256, 256, softcap=50.0, window=4096),
        "decode 256 group 71": partial(_decode, 71, 1, 256, 256),
        "decode 128 float32": partial(_decode, 32, 8, 128, 128, dtype=torch.float32),
    }


def compile_all() -> Iterator[tuple[str, Resources]]:
    """Compiles each case for each target, one (case, resources) per launch."""
    for name, call in cases().items():
        for launch in record(call):
            for target in TARGETS:
                yield name, compile_launch(launch, target)


def main() -> None:
    """Prints the resources of every compiled kernel."""
    for case, used in compile_all():
        fields = ", ".join(f"{field} {value}" for field, value in list(used._asdict().items())[2:])
        print(f"{case:24} {used.kernel:26} {used.target:7} {fields}", flush=True)


if __name__ == "__main__":
    main()

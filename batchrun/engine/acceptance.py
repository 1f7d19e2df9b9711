"""Whether a loaded model says the same through our pages as through its own eager attention.

Three sequences go through `eager` one by one, then flattened through the paged attention, first in one
step and then in chunks. The second pass is what finds wrong positions, shared KV layers and rotary
embeddings that depend on the batch. Sliding windows are narrowed on both sides for as long, so that these
short sequences tell which layers have one. It costs a few small forward passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from batchrun.engine import hook
from batchrun.engine.attention.base import AttentionBackend, LayerCall
from batchrun.engine.batch import Batch, make_batch
from batchrun.engine.model import PagedModel, UnsupportedModel
from batchrun.engine.params import Request
from batchrun.engine.prequantized import quantization_method
from batchrun.engine.sequence import Sequence
from batchrun.engine.slots import Slots
from batchrun.engine.staging import Staging

STEP = 7  # tokens of a chunk
LENGTHS = (5, 36, 22)  # two of them leave one token for the last step, as decoding does
BLOCK_SIZE = 16
NARROW = 8  # tokens: a window that makes a difference to LENGTHS
# Relative error of the logits. Half precision rounds differently in every order of operations, so
# there only a gross mistake can be told from rounding.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}
QUANTIZED = 0.1  # where weights are quantised, activations may be too, by scales that are those of the whole batch


def check_model(model: PagedModel, backend: type[AttentionBackend]) -> float:
    """Relative error of the paged logits against eager. Raises UnsupportedModel if it is too large.

    Leaves the model on the paged attention and without a backend.
    """
    family, dtype = model.module.config.model_type, model.dtype
    vocabulary = model.module.config.get_text_config(decoder=True).vocab_size
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, vocabulary, size=length, dtype=np.int32) for length in LENGTHS]
    with _narrow_windows(model.module):
        expected = _eager_logits(model, prompts)
    if not expected.isfinite().all():
        raise UnsupportedModel(
            f"{family}: its own logits are not finite in {dtype}: its weights are damaged, or model.dtype should be "
            "bfloat16 or float32"
        )
    limit = TOLERANCE[dtype]
    if quantization_method(model.module.config) is not None:
        limit = max(limit, QUANTIZED)
    worst = 0.0
    for chunk in (max(LENGTHS), STEP):
        logits = paged_logits(model, backend, prompts, chunk, max_window=NARROW)
        error = float((logits - expected).norm() / expected.norm())
        worst = max(worst, error)
        if not error < limit:
            raise UnsupportedModel(
                f"{family}: logits differ from eager attention by {error:.1%} "
                f"(limit {limit:.1%}) in steps of {chunk} tokens, so this family is refused"
            )
    return worst


@contextmanager
def _narrow_windows(module: Any) -> Iterator[None]:
    """Let the masks of eager attention, which are made from the configs at each call, have windows of NARROW."""
    configs = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values()
    windows = [(config, getattr(config, "sliding_window", None)) for config in configs]
    wide = [(config, window) for config, window in windows if isinstance(window, int) and window > NARROW]
    for config, _ in wide:
        config.sliding_window = NARROW
    try:
        yield
    finally:
        for config, window in wide:
            config.sliding_window = window


class _NarrowAttention(AttentionBackend):
    """Another backend, with windows of at most `limit` tokens."""

    def __init__(self, backend: AttentionBackend, limit: int) -> None:
        self._backend = backend
        self._limit = limit

    def begin(self, batch: Batch, staging: Staging | None = None) -> None:
        self._backend.begin(batch, staging)

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        window = None if call.window is None else min(call.window, self._limit)
        return self._backend.attend(replace(call, window=window), q, k, v)


@torch.inference_mode()
def _eager_logits(model: PagedModel, prompts: list[np.ndarray]) -> torch.Tensor:
    model.module.set_attn_implementation("eager")
    try:
        rows = [torch.from_numpy(ids.astype(np.int64)).to(model.device)[None] for ids in prompts]
        return torch.stack([model.module(input_ids=ids, use_cache=False).logits[0, -1].float() for ids in rows])
    finally:
        model.module.set_attn_implementation(hook.NAME)


def paged_logits(
    model: PagedModel,
    backend: type[AttentionBackend],
    prompts: list[np.ndarray],
    chunk: int,
    max_window: int | None = None,
    block_size: int | None = None,
) -> torch.Tensor:
    """float32 logits [rows, vocabulary] of the last token of each prompt, fed in steps of `chunk` tokens."""
    size = block_size or max(BLOCK_SIZE, backend.page_multiple)
    per_row, groups = -(-max(map(len, prompts)) // size), model.kv_layout.groups
    per_table, tables = per_row * len(prompts), model.kv_layout.num_tables
    pages = backend(model.layers, per_table * tables, size, model.dtype, model.device)
    model.backend = pages if max_window is None else _NarrowAttention(pages, max_window)
    slots = Slots(len(prompts), size, groups)
    # Blocks are dealt out backwards and across rows, so that no backend can rely on neighbours.
    blocks = np.arange(per_table * tables)[::-1].reshape(tables, per_row, len(prompts)).transpose(2, 0, 1)
    rows = [
        slots.put(Sequence(Request(i, ids), 0, ids, len(ids), len(ids) + 1, [], 0.0), blocks[i].tolist(), 0)
        for i, ids in enumerate(prompts)
    ]
    last: dict[int, torch.Tensor] = {}
    while len(last) < len(rows):
        left = np.array([slots.num_tokens[slot] - slots.num_computed[slot] for slot in rows])
        active = np.array(rows)[left > 0]
        batch = make_batch(slots, active, np.minimum(left[left > 0], chunk))
        logits = model.forward(batch).float()
        slots.num_computed[batch.slots] = batch.seq_lens
        last.update(zip(batch.slots[batch.sampled].tolist(), logits, strict=True))
    model.backend = None
    return torch.stack([last[slot] for slot in rows])

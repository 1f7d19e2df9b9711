"""Whether a loaded model says the same through our pages as through its own eager attention.

Three sequences go through `eager` one by one, then flattened through the paged attention, first in one
step and then in chunks. The second pass is what finds wrong positions, shared KV layers and rotary
embeddings that depend on the batch. It costs a few small forward passes.
"""

from __future__ import annotations

import numpy as np
import torch

from batchrun.engine import hook
from batchrun.engine.attention.base import AttentionBackend
from batchrun.engine.batch import make_batch
from batchrun.engine.model import PagedModel, UnsupportedModel
from batchrun.engine.params import Request
from batchrun.engine.sequence import Sequence
from batchrun.engine.slots import Slots

LENGTHS = (5, 40, 23)
BLOCK_SIZE = 16
# Relative error of the logits. Half precision rounds differently in every order of operations, so
# there only a gross mistake can be told from rounding.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}


def check_model(model: PagedModel, backend: type[AttentionBackend]) -> float:
    """Relative error of the paged logits against eager. Raises UnsupportedModel if it is too large.

    Leaves the model on the paged attention and without a backend.
    """
    vocabulary = model.module.config.get_text_config(decoder=True).vocab_size
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, vocabulary, size=length, dtype=np.int32) for length in LENGTHS]
    expected = _eager_logits(model, prompts)
    worst = 0.0
    for chunk in (max(LENGTHS), 7):
        logits = paged_logits(model, backend, prompts, chunk)
        error = float((logits - expected).norm() / expected.norm())
        worst = max(worst, error)
        if not error < TOLERANCE[model.dtype]:
            raise UnsupportedModel(
                f"{model.module.config.model_type}: logits differ from eager attention by {error:.1%} "
                f"(limit {TOLERANCE[model.dtype]:.1%}) in steps of {chunk} tokens, so this family is refused"
            )
    return worst


@torch.inference_mode()
def _eager_logits(model: PagedModel, prompts: list[np.ndarray]) -> torch.Tensor:
    model.module.set_attn_implementation("eager")
    try:
        rows = [torch.from_numpy(ids.astype(np.int64)).to(model.device)[None] for ids in prompts]
        return torch.stack([model.module(input_ids=ids, use_cache=False).logits[0, -1].float() for ids in rows])
    finally:
        model.module.set_attn_implementation(hook.NAME)


def paged_logits(
    model: PagedModel, backend: type[AttentionBackend], prompts: list[np.ndarray], chunk: int
) -> torch.Tensor:
    """float32 logits [rows, vocabulary] of the last token of each prompt, fed in steps of `chunk` tokens."""
    per_row = -(-max(map(len, prompts)) // BLOCK_SIZE)
    model.backend = backend(model.layers, per_row * len(prompts), BLOCK_SIZE, model.dtype, model.device)
    slots = Slots(len(prompts), BLOCK_SIZE)
    # Blocks are dealt out backwards and across rows, so that no backend can rely on neighbours.
    blocks = np.arange(per_row * len(prompts))[::-1].reshape(per_row, len(prompts)).T
    rows = [
        slots.put(Sequence(Request(i, ids), 0, ids, len(ids), len(ids) + 1, [], 0.0), list(blocks[i]), 0)
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

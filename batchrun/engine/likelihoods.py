"""Log-probabilities of given tokens, from the hidden states before them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from batchrun.engine.batch import Batch
from batchrun.engine.continuations import Scoring
from batchrun.engine.model import PagedModel

# Places whose logits are held at once: all of a long prompt's are gigabytes. On a CPU more leave the cache.
CHUNK_ROWS = {"cpu": 128}
DEFAULT_CHUNK_ROWS = 512


@torch.inference_mode()
def token_logprobs(
    logits_at: Callable[[np.ndarray], torch.Tensor], places: np.ndarray, tokens: np.ndarray, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """`logits_at(places [n])` gives logits [n, V]. `tokens` [M] are scored by the logits at `places` [M], ascending.

    Returns float32 [M], the log-softmax of the logits at each token, and bool [M], whether the token is the likeliest.
    """
    distinct, owner = np.unique(places, return_inverse=True)
    size = CHUNK_ROWS.get(device.type, DEFAULT_CHUNK_ROWS)
    found: list[torch.Tensor] = []
    for start in range(0, len(distinct), size):
        rows = logits_at(distinct[start : start + size]).float()
        low, high = np.searchsorted(owner, (start, start + size))
        index = torch.from_numpy(owner[low:high] - start).to(device)
        token = torch.from_numpy(tokens[low:high]).to(device)
        logprobs = rows[index, token] - rows.logsumexp(dim=-1)[index]
        found.append(torch.stack([logprobs, (rows.argmax(dim=-1)[index] == token).float()]))
    logprobs, greedy = torch.cat(found, dim=1).cpu().numpy()
    return logprobs, greedy == 1


def score_step(
    model: PagedModel, hidden: torch.Tensor, batch: Batch, rows: np.ndarray, scorings: list[Scoring]
) -> None:
    """Give the rows of a computed step (int64 [R]), which have these scorings, what its hidden states tell them."""
    starts, stops = batch.query_starts[rows], batch.query_starts[rows + 1]
    positions = batch.positions[starts]
    wanted = [
        scoring.wanted(position, position + length)
        for scoring, position, length in zip(scorings, positions.tolist(), (stops - starts).tolist(), strict=True)
    ]
    parts = list(zip(scorings, wanted, strict=True))
    tokens = np.concatenate([scoring.current.tokens[part] for scoring, part in parts])
    if not len(tokens):
        return
    # Depth d of a row's path is told by its position start + d - 1.
    before = starts - positions + [scoring.start - 1 for scoring in scorings]
    places = np.concatenate(
        [scoring.current.depths[part] + shift for (scoring, part), shift in zip(parts, before, strict=True)]
    )
    logprobs, greedy = token_logprobs(partial(model.logits, hidden), places, tokens, hidden.device)
    at = 0
    for scoring, part in parts:
        count = part.stop - part.start
        scoring.note(part, logprobs[at : at + count], greedy[at : at + count])
        at += count

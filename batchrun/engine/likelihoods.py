"""Log-probabilities of given tokens, from the hidden states before them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from batchrun.engine.batch import Batch
from batchrun.engine.continuations import Scoring
from batchrun.engine.device import runs_triton
from batchrun.engine.logprobs import likeliest
from batchrun.engine.model import PagedModel
from batchrun.engine.sequence import Sequence
from batchrun.engine.slots import Slots

# Places whose logits are held at once: all of a long prompt's are gigabytes. On a CPU more leave the cache.
CHUNK_ROWS = {"cpu": 128}
DEFAULT_CHUNK_ROWS = 512


class TokenScores(NamedTuple):
    """What logits say of M tokens, each at a place of its own or one that it shares."""

    logprobs: np.ndarray  # float32 [M]: log-softmax of the logits
    greedy: np.ndarray  # bool [M]: whether the token is the likeliest
    top_ids: np.ndarray  # int64 [M, top]: the likeliest tokens there, best first
    top_logprobs: np.ndarray  # float32 [M, top]


@torch.inference_mode()
def token_scores(
    logits_at: Callable[[np.ndarray], torch.Tensor],
    places: np.ndarray,
    tokens: np.ndarray,
    device: torch.device,
    top: int = 0,
    exact: bool = False,
) -> TokenScores:
    """`logits_at(places [n])` gives logits [n, V]. `tokens` [M] are scored by the logits at `places` [M], ascending.
    `exact`: see `likeliest` in logprobs.py."""
    distinct, owner = np.unique(places, return_inverse=True)
    size = CHUNK_ROWS.get(device.type, DEFAULT_CHUNK_ROWS)
    found: list[torch.Tensor] = []
    best: list[torch.Tensor] = []
    for start in range(0, len(distinct), size):
        rows = logits_at(distinct[start : start + size])
        rows = rows if runs_triton(device) else rows.float()
        low, high = np.searchsorted(owner, (start, start + size))
        index = torch.from_numpy(owner[low:high] - start).to(device)
        token = torch.from_numpy(tokens[low:high]).to(device)
        values, ids = likeliest(rows, top, exact) if top else rows.max(dim=-1, keepdim=True)
        total = _log_sum(rows, ids[:, 0])
        top_logprobs = values.float() - total[:, None]
        logprob = rows[index, token].float() - total[index]
        found.append(torch.stack([logprob, (ids[index, 0] == token).float()]))
        # A float32 holds each token id exactly.
        best.append(torch.stack([ids[index, :top].float(), top_logprobs[index, :top]]))
    logprobs, greedy = torch.cat(found, dim=1).cpu().numpy()
    top_ids, values = torch.cat(best, dim=1).cpu().numpy()
    return TokenScores(logprobs, greedy == 1, top_ids.astype(np.int64), values)


def _log_sum(logits: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """float32 [n]: log-sum-exp of logits [n, V], of which `likeliest` int64 [n] are largest."""
    if not runs_triton(logits.device):
        return logits.logsumexp(dim=-1)
    from batchrun_kernels.token_logprobs import token_logprobs

    largest = logits.gather(1, likeliest[:, None])[:, 0].float()
    return largest - token_logprobs(logits, likeliest.contiguous())


def score_step(model: PagedModel, slots: Slots, batch: Batch, hidden: torch.Tensor) -> list[int]:
    """Note what a computed step tells of given tokens, and let rows go on to their next pass.

    Returns the slots of rows that have all they asked for and generate nothing.
    """
    rows = np.flatnonzero(slots.scoring[batch.slots])
    if not len(rows):
        return []
    scorings = [_scoring(slots, slot)[1] for slot in batch.slots[rows]]
    for asks_top in (False, True):  # apart, so that only rows which ask for the likeliest tokens pay for them
        some = [i for i, scoring in enumerate(scorings) if bool(scoring.top) == asks_top]
        if some:
            _score_rows(model, hidden, batch, rows[some], [scorings[i] for i in some])
    at = batch.slots[rows]
    ends = np.where(slots.silent[at], slots.num_tokens[at], slots.num_prompt[at])
    return [int(slot) for slot in at[batch.seq_lens[rows] >= ends] if _go_on(slots, slot)]


def _go_on(slots: Slots, slot: int) -> bool:
    """A row has computed its pass: whether it has nothing more to do."""
    sequence, scoring = _scoring(slots, slot)
    if scoring.advance():
        keep = scoring.current.keep
        slots.rewind(slot, scoring.start + keep, scoring.current.path[keep:])
        return False
    if not sequence.request.continuations:
        sequence.prompt_logprobs = scoring.token_logprobs()
    if not slots.silent[slot]:
        sequence.scoring, slots.scoring[slot] = None, False
    return bool(slots.silent[slot])


def _scoring(slots: Slots, slot: int) -> tuple[Sequence, Scoring]:
    sequence = slots.sequences[slot]
    assert sequence is not None
    assert sequence.scoring is not None
    return sequence, sequence.scoring


def _score_rows(
    model: PagedModel, hidden: torch.Tensor, batch: Batch, rows: np.ndarray, scorings: list[Scoring]
) -> None:
    """Give rows of the step (int64 [R]), which have these scorings, what the hidden states tell them."""
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
    top = max(scoring.top for scoring in scorings)
    scores = token_scores(partial(model.logits, hidden), places, tokens, hidden.device, top, exact=model.invariant)
    at = 0
    for scoring, part in parts:
        mine = slice(at, at + part.stop - part.start)
        scoring.note(part, scores.logprobs[mine], scores.greedy[mine])
        if scoring.top:
            scoring.note_top(part, scores.top_ids[mine], scores.top_logprobs[mine])
        at = mine.stop

"""What rows ask to have changed in their logits before a token is drawn: penalties, biases, masks.

The order is: repetition, frequency and presence penalty, logit bias, allowed tokens, bad words, minimum of tokens. The
sampler's filters come after all of them. Whatever a penalty needs to know is in the slots' token ids, so nothing is
kept beside them, and a row that was preempted goes on as if it had not been.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from batchrun.engine.slots import Slots
from batchrun.engine.staging import upload
from batchrun.engine.token_rules import TokenRules

if TYPE_CHECKING:
    from batchrun.engine.token_counts import TokenCounts

NEVER = float("-inf")


def edit_logits(logits: torch.Tensor, slots: Slots, rows: np.ndarray, counts: TokenCounts | None = None) -> np.ndarray:
    """Change the logits (float32 [K, V]) of those of the slots `rows` (int64 [K]) that ask for it, in place.

    Returns their places in `rows` (int64 [E]). With `counts`, penalties are made of these.
    """
    generated = slots.num_tokens[rows] + slots.unread[rows] - slots.num_prompt[rows]
    early = generated < slots.min_tokens[rows]
    asking = np.flatnonzero(slots.edited[rows] | early)
    if not len(asking):
        return asking
    (index,) = upload(logits.device, asking)
    scores, rows = logits[index], rows[asking]
    if counts is None:
        _penalise_repetition(scores, slots, rows)
        _penalise_generated(scores, slots, rows)
    else:
        counts.penalise(scores, rows)
    _apply_rules(scores, _rules(slots, rows), slots, rows, early[asking])
    logits[index] = scores
    return asking


def mark_without_choice(logits: torch.Tensor, places: np.ndarray, tokens: torch.Tensor) -> None:
    """Put -1 for those of `tokens` (int64 [K]) at places (int64 [E]) that cannot be: these rows had no other."""
    if len(places):
        (place,) = upload(logits.device, places)
        token = tokens[place]
        tokens[place] = torch.where(logits[place, token] == NEVER, -1, token)


def _penalise_repetition(scores: torch.Tensor, slots: Slots, rows: np.ndarray) -> None:
    """Logits of tokens of the prompt and the completion: divided by the penalty if above 0, else multiplied.

    The definition of Keskar et al. 2019 (CTRL, section 4.1) with the sign rule of transformers.
    """
    at = np.flatnonzero(slots.repetition_penalty[rows] != 1)
    if not len(at):
        return
    ends = slots.num_tokens[rows[at]]
    columns = np.minimum(np.arange(ends.max()), ends[:, None] - 1)
    ids = slots.token_ids[rows[at][:, None], columns]
    given = at[:, None], ids.astype(np.int64), slots.repetition_penalty[rows[at]][:, None]
    place, token, penalty = upload(scores.device, *given)
    seen = scores[place, token]
    scores[place, token] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _penalise_generated(scores: torch.Tensor, slots: Slots, rows: np.ndarray) -> None:
    """Logits of generated tokens: less the presence penalty, and less the frequency penalty for each time.

    The definition of OpenAI's API reference.
    """
    presence, frequency = slots.presence_penalty[rows], slots.frequency_penalty[rows]
    first, end = slots.num_prompt[rows], slots.num_tokens[rows]
    at = np.flatnonzero(((presence != 0) | (frequency != 0)) & (end > first))
    if not len(at):
        return
    columns = first[at, None] + np.arange((end - first)[at].max())
    inside = columns < end[at, None]
    ids = slots.token_ids[rows[at][:, None], np.where(inside, columns, 0)]
    vocabulary = scores.shape[-1]
    seen, times = np.unique((at[:, None] * vocabulary + ids)[inside], return_counts=True)
    less = presence[seen // vocabulary] + frequency[seen // vocabulary] * times
    place, token, less_there = upload(scores.device, seen // vocabulary, seen % vocabulary, less)
    scores[place, token] -= less_there.to(scores)


def _apply_rules(
    scores: torch.Tensor, rules: list[tuple[np.ndarray, TokenRules]], slots: Slots, rows: np.ndarray, early: np.ndarray
) -> None:
    if biased := [(at, rule) for at, rule in rules if len(rule.biased)]:
        biases = np.concatenate([np.tile(rule.biases, len(at)) for at, rule in biased])
        place, token, more = upload(scores.device, *_flat([(at, rule.biased) for at, rule in biased]), biases)
        scores[place, token] += more.to(scores)
    if allowed := [(at, rule.allowed) for at, rule in rules if rule.allowed is not None]:
        place, token, limited = upload(scores.device, *_flat(allowed), np.concatenate([at for at, _ in allowed]))
        kept = scores[place, token]
        scores[limited] = NEVER
        scores[place, token] = kept
    banned = [_flat([(at, rule.banned), (at[early[at]], rule.ends)]) for at, rule in rules]
    banned += [_completing(at, rule, slots, rows[at]) for at, rule in rules if len(rule.lasts)]
    if banned:
        place, token = upload(scores.device, *map(np.concatenate, zip(*banned, strict=True)))
        scores[place, token] = NEVER


def _rules(slots: Slots, rows: np.ndarray) -> list[tuple[np.ndarray, TokenRules]]:
    """(places in `rows` int64 [n], the rules of these) for all that have any."""
    numbers = slots.rules[rows]
    order = np.argsort(numbers, kind="stable")
    _, starts = np.unique(numbers[order], return_index=True)
    own = ((at, slots.sequence(rows[at[0]]).rules) for at in np.split(order, starts[1:]))
    return [(at, rules) for at, rules in own if rules is not None]


def _completing(places: np.ndarray, rules: TokenRules, slots: Slots, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (place, token), each int64 [N]: the tokens that would complete a bad word of which a row has generated all
    others. `rows` int64 [R] are the slots at these places."""
    first, end = slots.num_prompt[rows, None], slots.num_tokens[rows, None]
    columns = end + np.arange(-rules.heads.shape[1], 0)
    tails = np.where(columns >= first, slots.token_ids[rows[:, None], np.maximum(columns, 0)], -1)
    row, word = ((tails[:, None] == rules.heads) | (rules.heads < 0)).all(axis=2).nonzero()
    return places[row], rules.lasts[word]


def _flat(lists: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (place, token), each int64 [N]: of every place with every token of its list."""
    places = [np.repeat(at, len(tokens)) for at, tokens in lists]
    return np.concatenate(places), np.concatenate([np.tile(tokens, len(at)) for at, tokens in lists])

"""What became of sequences that have been taken out, as completions."""

from __future__ import annotations

import time
from typing import Any

from batchrun.engine.detokenizer import whole_characters
from batchrun.engine.forms import End
from batchrun.engine.params import Completion, refusal
from batchrun.engine.sequence import Sequence


def generated(sequence: Sequence, tokenizer: Any, end: End) -> Completion:
    """Of a row that ended so."""
    text, stop_reason, finish_reason = end
    request, now = sequence.request, time.perf_counter()
    token_ids = [int(token) for token in sequence.token_ids[sequence.num_prompt :]]
    hidden = isinstance(stop_reason, int) and not request.params.include_stop_str_in_output
    shown = token_ids[:-1] if hidden else token_ids
    thinking = sequence.thinking
    if text is None:
        answer = shown if thinking is None else shown[thinking.answer_at :]
        text = tokenizer.decode(answer, skip_special_tokens=request.params.skip_special_tokens)
        text = whole_characters(text) if finish_reason == "length" else text
    return Completion(
        key=request.key,
        text=text if thinking is None else thinking.answer(text),
        token_ids=token_ids,
        reasoning=None if thinking is None else thinking.thought(shown),
        reasoning_tokens=0 if thinking is None else thinking.count(token_ids),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error_type="constraint_error" if finish_reason == "error" else None,
        error=sequence.constraint.error if finish_reason == "error" and sequence.constraint else None,
        max_tokens=sequence.max_total - sequence.num_prompt,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=sequence.cached_tokens,
        queue_s=sequence.admitted_at - sequence.arrived_at,
        first_token_s=sequence.first_token_at - sequence.arrived_at,
        total_s=now - sequence.arrived_at,
        logprobs=None if sequence.logprobs is None else sequence.logprobs.take(),
        prompt_logprobs=sequence.prompt_logprobs,
    )


def without_choice(sequence: Sequence) -> Completion:
    """Of a row that no token was left for."""
    done = len(sequence.token_ids) - sequence.num_prompt - 1
    why = (
        f"no token is possible after {done}: what its allowed_token_ids, bad_words, min_tokens and other "
        "constraints leave has nothing in common"
    )
    return refusal(sequence.request, "constraint_error", why)


def scored(sequence: Sequence) -> Completion:
    """Of a row that generates nothing and has all the likelihoods that it asked for."""
    asked, scoring, now = sequence.request.continuations, sequence.scoring, time.perf_counter()
    return Completion(
        key=sequence.request.key,
        text="",
        token_ids=[],
        finish_reason="stop" if asked else "length",
        max_tokens=0,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=sequence.cached_tokens,
        queue_s=sequence.admitted_at - sequence.arrived_at,
        first_token_s=now - sequence.arrived_at,
        total_s=now - sequence.arrived_at,
        prompt_logprobs=sequence.prompt_logprobs,
        likelihoods=scoring.likelihoods() if scoring is not None and asked else None,
    )

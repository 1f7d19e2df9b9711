"""From texts to the tokens whose likelihood is asked for, and from that to scores and choices among labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from batchrun.border import tokens_after
from batchrun.config.tasks import NORMALIZE
from batchrun.engine.params import Completion, Likelihood, Request, SamplingParams
from batchrun.engine.prompts import one_each, prompt_text, token_ids


class Asked(NamedTuple):
    """What is asked about one prompt."""

    prompt: list[int]  # token ids
    continuations: tuple[tuple[int, ...], ...]  # those of what may follow it; an empty one: there is nothing to score
    adapter: str | None = None  # one of model.adapters


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a text is: the tokens that count, each after all tokens before it."""

    log_likelihood: float  # natural logarithm
    num_tokens: int
    is_greedy: bool  # whether each token is the likeliest at its place, so that greedy sampling would say the same

    @classmethod
    def of(cls, parts: Sequence[Likelihood]) -> Self:
        """The score of a text from those of its parts."""
        return cls(
            log_likelihood=float(sum(part.logprobs.sum() for part in parts)),
            num_tokens=sum(len(part.logprobs) for part in parts),
            is_greedy=all(bool(part.greedy.all()) for part in parts),
        )

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-likelihood of a token. None without tokens."""
        if not self.num_tokens:
            return None
        mean = -self.log_likelihood / self.num_tokens
        return math.exp(mean) if mean < 709 else math.inf


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of some labels is the likeliest, and how likely each is among them."""

    label: str
    labels: list[str]
    probabilities: list[float]  # of the labels, in their order: they sum to 1
    log_likelihoods: list[float]  # of the whole labels, whatever they are compared by
    margin: float  # from the best probability to the next


def choose(labels: Sequence[str], likelihoods: Sequence[Likelihood], normalize: str = "none") -> Choice:
    """The choice among labels: the softmax of their log-likelihoods, whole or per token or byte of the label.

    Of equal ones the first is chosen.
    """
    if normalize not in NORMALIZE:
        raise ValueError(f"normalize={normalize!r} is not one of {', '.join(NORMALIZE)}")
    total = [float(one.logprobs.sum()) for one in likelihoods]
    lengths = {
        "none": [1] * len(labels),
        "tokens": [len(one.logprobs) for one in likelihoods],
        "bytes": [len(label.encode()) for label in labels],
    }[normalize]
    compared = np.array(total) / lengths
    weights = np.exp(compared - compared.max())
    probabilities = weights / weights.sum()
    best = int(compared.argmax())
    second, first = np.sort(probabilities)[-2:]
    return Choice(labels[best], list(labels), probabilities.tolist(), total, float(first - second))


def windows(num_tokens: int, start: int, size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows (first, scored from, stop) over a text of `num_tokens`, of at most `size` tokens and `stride` < `size`
    apart, that score each token from `start` > 0 on once, with as much of the text before it as its window holds.

    As in https://huggingface.co/docs/transformers/perplexity. The first window begins with the text.
    """
    scored, first = start, 0
    while scored < num_tokens:
        stop = min(first + size, num_tokens)
        if stop > scored:
            yield first, scored, stop
            scored = stop
        first += stride


def following(tokenizer: Any, text: str | None, ids: list[int], texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Tokens of texts after a prompt with these ids: of both as one text, if the prompt is text whose tokens stay."""
    alone = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    both = alone if text is None else tokenizer([text + follow for follow in texts])["input_ids"]
    return tuple(tokens_after(ids, whole, own) for whole, own in zip(both, alone, strict=True))


def texts_after(tokenizer: Any, prompts: Any, continuations: Sequence[str] | None, adapter: Any) -> list[Asked]:
    """Each prompt's own tokens after its first one, or those of its continuation.

    `adapter` is a name for all, or a list. Raises ValueError unless there is one of each for a prompt.
    """
    if isinstance(continuations, str):
        raise ValueError(f"continuations={continuations!r} must be a list of texts, one for each prompt")
    if continuations is not None and len(continuations) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(continuations)} continuations: give one each")
    asked: list[Asked] = []
    for i, (prompt, own) in enumerate(zip(prompts, one_each(adapter, len(prompts), "adapters"), strict=True)):
        ids = _ids(tokenizer, prompt)
        if continuations is None:
            asked.append(Asked(ids[:1], (tuple(ids[1:]),), own))
        else:
            asked.append(Asked(ids, following(tokenizer, prompt_text(prompt), ids, [continuations[i]]), own))
    return asked


def labels_after(tokenizer: Any, prompts: Any, labels: Any, adapter: Any) -> tuple[Sequence[Any], list[Asked]]:
    """The labels of each prompt, and those after it. `labels` are one list for all prompts, or one each.

    Raises ValueError for fewer than two labels, and for lists of another length.
    """
    if isinstance(labels, str):
        raise ValueError(f"labels={labels!r} must be a list of texts")
    each = [labels] * len(prompts) if all(isinstance(label, str) for label in labels) else labels
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(each)} lists of labels: give one for all, or one each")
    if few := [list(mine) for mine in each if len(mine) < 2 or len(set(mine)) < len(mine)]:
        raise ValueError(f"labels={few[0]} must be two or more, no two of them equal")
    asked: list[Asked] = []
    for prompt, mine, own in zip(prompts, each, one_each(adapter, len(prompts), "adapters"), strict=True):
        ids = _ids(tokenizer, prompt)
        asked.append(Asked(ids, following(tokenizer, prompt_text(prompt), ids, mine), own))
    return each, asked


def _ids(tokenizer: Any, prompt: Any) -> list[int]:
    return list(map(int, token_ids(tokenizer, prompt)))


def ask(stream: Callable[[Iterable[Request]], Iterable[Completion]], asked: Sequence[Asked]) -> list[list[Likelihood]]:
    """The likelihoods of what may follow each prompt, in order; none for a text with nothing to score.

    `stream` is that of an LLM. Raises ValueError for a prompt that cannot run.
    """
    found: list[list[Likelihood]] = [[] for _ in asked]
    requests = (
        Request(i, ids, SamplingParams(adapter=adapter), continuations=many)
        for i, (ids, many, adapter) in enumerate(asked)
        if many != ((),)
    )
    for done in stream(requests):
        if done.likelihoods is None or not isinstance(done.key, int):
            raise ValueError(f"prompt {done.key}: {done.error or done.finish_reason}")
        found[done.key] = done.likelihoods
    return found

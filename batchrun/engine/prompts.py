"""Prompts of every kind that `LLM` takes, as requests."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from batchrun.engine.params import Request, SamplingParams
from batchrun.engine.reasoning import Reasoning
from batchrun.engine.seeds import sample_seed
from batchrun.tool_calls import MARKERS, special_texts

Messages = Sequence[Mapping[str, Any]]
# Text, token ids, or one of {"prompt": text}, {"prompt_token_ids": ids} and {"messages": messages}, the last with
# "tools" and "chat_template_kwargs" beside it if need be.
Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]
Params = SamplingParams | Iterable[SamplingParams] | None


class Requester:
    """Makes requests of prompts, in order, each with its parameters, if there is one each, and its number as the key.

    Chats have the `reasoning` if their parameters have none; with tools, their text shows the marker of `tool_format`,
    which may be a special token.
    """

    def __init__(
        self, tokenizer: Any, params: Params, reasoning: Reasoning | None = None, tool_format: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._marked = tool_format is not None and MARKERS[tool_format] in special_texts(tokenizer)
        self._numbers = itertools.count()
        self._params = iter(params) if isinstance(params, Iterable) else itertools.repeat(params or SamplingParams())

    def __call__(self, prompt: Prompt | Request) -> Request:
        """Raises ValueError if there are fewer parameters than prompts, TypeError for what is no prompt."""
        number, params = next(self._numbers), next(self._params, None)
        if params is None:
            raise ValueError(f"there are {number} sampling parameters and more prompts: give one for all, or one each")
        _check_params(params)
        if isinstance(prompt, Request):
            return prompt
        if isinstance(prompt, Mapping) and "messages" in prompt:
            params = self._of_chat(prompt, params)
        return Request(number, token_ids(self._tokenizer, prompt), params)

    async def each_of(self, prompts: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Request]:
        """A request of each sample of each prompt, which may come by and by; while they do, others have their turn."""
        if isinstance(prompts, AsyncIterable):
            async for prompt in prompts:
                for request in samples(self(prompt)):
                    yield request
        else:
            for prompt in several(prompts):
                for request in samples(self(prompt)):
                    yield request
                    await asyncio.sleep(0)

    def _of_chat(self, prompt: Mapping[str, Any], params: SamplingParams) -> SamplingParams:
        if self._reasoning and not params.reasoning:
            params = dataclasses.replace(params, reasoning=self._reasoning)
        if self._marked and prompt.get("tools") and params.skip_special_tokens:
            params = dataclasses.replace(params, skip_special_tokens=False)
        return params


def token_ids(tokenizer: Any, prompt: Any) -> Any:
    """The ids of a prompt of any kind. Raises TypeError for what is none, ValueError for messages without a text."""
    match prompt:
        case str(text) | {"prompt": str(text)}:
            return tokenizer(text)["input_ids"]
        case {"prompt_token_ids": ids}:
            return token_ids(tokenizer, ids)
        case {"messages": messages}:
            return _chat_ids(tokenizer, messages, prompt)
        case np.ndarray() | Sequence() if _are_ids(prompt):
            return prompt
    raise TypeError(
        f"{prompt!r:.60} is not a prompt: it must be text, token ids, a Request, or a dict with prompt, "
        "prompt_token_ids or messages"
    )


def _chat_ids(tokenizer: Any, messages: Any, prompt: dict[str, Any]) -> Any:
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=prompt.get("tools") or None,
            add_generation_prompt=True,
            return_dict=False,
            **(prompt.get("chat_template_kwargs") or {}),
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"the chat template cannot render {messages!r:.60}: {error}. A message is a dict with role and content"
        ) from error


def _are_ids(prompt: Any) -> bool:
    whole = all(isinstance(token, (int, np.integer)) for token in prompt[:1])
    return whole and (not len(prompt) or np.asarray(prompt).dtype.kind in "iu")


def prompt_text(prompt: Any) -> str | None:
    """The text of a prompt that is text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def several(prompts: Any) -> Any:
    """Several prompts, of one or several."""
    one = isinstance(prompts, (str, Mapping, Request)) or (
        isinstance(prompts, (Sequence, np.ndarray)) and len(prompts) and isinstance(prompts[0], (int, np.integer))
    )
    return [prompts] if one else prompts


def one_each(values: Any, count: int, what: str) -> list[Any]:
    """So many values of one for all, or of a list of them. Raises ValueError for a list of another length."""
    if values is None or isinstance(values, str):
        return [values] * count
    if len(values) != count:
        raise ValueError(f"{count} prompts and {len(values)} {what}: give one for all, or one each")
    return list(values)


def samples(request: Request) -> Iterator[Request]:
    """A request for each of the n samples; the first has the seed of the whole."""
    params = request.params
    for number, key in enumerate(sample_keys(request.key, params.n)):
        seed = None if params.seed is None else sample_seed(params.seed, number)
        yield (
            request
            if params.n == 1
            else dataclasses.replace(request, key=key, params=dataclasses.replace(params, n=1, seed=seed))
        )


def keys_of(prompts: Iterable[Any], params: SamplingParams | Sequence[SamplingParams] | None) -> Iterator[Hashable]:
    """The keys of all requests of some prompts, in order."""
    each = params if isinstance(params, Sequence) else itertools.repeat(params)
    for number, (prompt, own) in enumerate(zip(prompts, each, strict=False)):
        key, own = (prompt.key, prompt.params) if isinstance(prompt, Request) else (number, own)
        yield from sample_keys(key, _check_params(own).n)


def _check_params(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams | None):
        raise TypeError(f"{params!r:.60} is not SamplingParams")
    return params or SamplingParams()


def sample_keys(key: Hashable, n: int) -> list[Hashable]:
    """The keys of the n samples of the request with this key."""
    return [key] if n == 1 else [(key, number) for number in range(n)]

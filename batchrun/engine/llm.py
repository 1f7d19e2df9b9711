"""The library door: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import Any, Literal, Self, overload

import numpy as np
import torch

from batchrun.config import EmbedConfig, EngineConfig, ModelConfig, RankConfig
from batchrun.config.base import one_of
from batchrun.engine.acceptance import check_model
from batchrun.engine.attention.registry import attention_backend, cache_backend
from batchrun.engine.checkpoint import Checkpoint, eos_token_ids, generation_defaults, load_tokenizer, open_checkpoint
from batchrun.engine.driver import Driver
from batchrun.engine.encoder import WINDOW, Encoder
from batchrun.engine.encoder_model import load_encoder_model
from batchrun.engine.engine import Engine, sample_seed
from batchrun.engine.layers import fuse_model
from batchrun.engine.lora import install, name_products
from batchrun.engine.memory import make_pool
from batchrun.engine.model import choose_device, choose_dtype, load_model
from batchrun.engine.params import Completion, Delta, Request, SamplingParams
from batchrun.engine.pool import EnginePool
from batchrun.engine.pooler import EmbeddingPooler, Pooler
from batchrun.engine.quantized import check_int8, quantize_model
from batchrun.engine.reasoning import Reasoning, known_markers
from batchrun.engine.scoring import Asked, Choice, Score, ask, choose, following
from batchrun.engine.stream import StopWhen, Stream
from batchrun.engine.texts import Text, Texts, stacked
from batchrun.engine.worker import place_workers
from batchrun.errors import BatchrunError, ConfigError
from batchrun.tool_calls import FORMATS, MARKERS, ToolCall, known_format, special_texts, split_calls

Messages = Sequence[Mapping[str, Any]]
# Text, token ids, or one of {"prompt": text}, {"prompt_token_ids": ids} and {"messages": messages}, the last with
# "tools" and "chat_template_kwargs" beside it if need be.
Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]
Params = SamplingParams | Iterable[SamplingParams] | None


READING = {"embed": EmbedConfig, "rank": RankConfig}  # the sections of tasks that only read, by task


class LLM:
    """A model with its engine.

    `options` are the settings of the model and engine sections of the config, by their own names:
    `LLM("folder", dtype="float32", max_num_seqs=64)`. Raises ConfigError for an unknown option, a
    model that cannot be found, or a family that the engine cannot serve.

    With `task="embed"` or `"rank"` it gives vectors or scores of texts and generates nothing; `options` are then those
    of the section of that name too.

    Any thread and any event loop may use it, several at once too: their requests share the batch. The engine runs in a
    thread of its own.

    `reasoning` says how the thinking of answers to messages is told from them, if their parameters do not: by the
    markers that the chat template speaks of. Set it to None to leave these texts whole. `tool_format` is the one of
    batchrun/tool_calls.py that the template speaks of, or None; set it for a template that does not say it.
    """

    def __init__(self, model: str, *, task: str = "generate", offline: bool = False, **options: Any) -> None:
        one_of("task", task, ("generate", *READING))
        model_config, engine_config, settings = _split_options(model, options, READING.get(task))
        self.checkpoint = open_checkpoint(model_config, offline=offline, purpose=task)
        self.tokenizer = load_tokenizer(self.checkpoint, offline=offline)
        template = getattr(self.tokenizer, "chat_template", None)
        markers = known_markers(template)
        self.reasoning = Reasoning(*markers) if markers else None
        self.tool_format = known_format(template)
        self._texts = None if settings is None else Texts(self.checkpoint, self.tokenizer, settings)
        pooler = None if self._texts is None else self._texts.pooler
        engine = load_engine(self.checkpoint, self.tokenizer, engine_config, pooler=pooler)
        self._driver: Driver | None = Driver(engine)
        # As many that wait as may run: no step runs short.
        self._window = (2 if pooler is None else WINDOW) * engine_config.max_num_seqs
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        weakref.finalize(self, self._driver.close).atexit = False  # the driver sees to that itself

    @property
    def engine(self) -> Engine | Encoder | EnginePool:
        """What computes. Only while nothing is under way may it be used directly."""
        return self._open().engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt | Request],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop_when: StopWhen | None = None,
    ) -> list[Completion]:
        """Complete every prompt, in order. `params` is one for all or one each.

        A prompt whose parameters have n > 1 gives n completions, one after the other.

        A prompt that cannot run gives a completion with finish_reason "error"; the others are not touched.
        `stop_when` is as for `stream`.
        """
        many = _many(prompts)
        if isinstance(params, Sequence) and len(params) != len(many):
            raise ValueError(
                f"{len(many)} prompts and {len(params)} sampling parameters: give one for all, or one each"
            )
        each = params if isinstance(params, Sequence) else [params] * len(many)
        order: dict[Hashable, int] = {}
        for i, (prompt, own) in enumerate(zip(many, each, strict=True)):
            key, own = (prompt.key, prompt.params) if isinstance(prompt, Request) else (i, own)
            for sample in _sample_keys(key, 1 if own is None else own.n):
                order[sample] = len(order)
        return sorted(self.stream(many, params, stop_when=stop_when), key=lambda completion: order[completion.key])

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop_when: StopWhen | None = None,
    ) -> list[Completion]:
        """The answers to one conversation or several, in order, by the model's chat template.

        `tools` are JSON schemas of functions, for templates that show them to the model.
        """
        several: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [{"messages": each, "tools": tools, "chat_template_kwargs": chat_template_kwargs} for each in several]
        return self.generate(prompts, params, stop_when=stop_when)

    def tool_calls(self, completion: Completion) -> list[ToolCall]:
        """The tools that an answer of `chat` with tools calls; none if it calls none.

        Raises ValueError for calls that cannot be read, and for a model whose `tool_format` is not known.
        """
        if self.tool_format is None:
            raise ValueError(f"how this model calls tools is not known: set tool_format to one of {', '.join(FORMATS)}")
        answer = split_calls(completion.text, self.tool_format, completion.finish_reason)
        if answer.calls is None:
            raise ValueError(answer.error)
        return answer.calls

    def embed(self, texts: str | Sequence[str]) -> np.ndarray:
        """Vectors float32 [texts, size], in order, with `task="embed"`. A text that is too long is cut at the right.

        Raises ValueError for a text without tokens.
        """
        return self._vectors("embed", [texts] if isinstance(texts, str) else texts)

    def rank(self, texts: Sequence[Text]) -> np.ndarray:
        """Scores float32 [texts, labels] of texts or of pairs (query, text), in order, with `task="rank"`.

        What is too long is cut: of a pair, the longer one. Raises ValueError for a text without tokens.
        """
        return self._vectors("rank", texts)

    def _vectors(self, task: str, texts: Sequence[Text]) -> np.ndarray:
        if self._texts is None or isinstance(self._texts.pooler, EmbeddingPooler) != (task == "embed"):
            raise BatchrunError(f'this LLM was not made to {task}: use LLM(model, task="{task}")')
        return stacked(self.generate(self._texts.requests(texts)), self._texts.pooler.size)

    def score(self, prompts: Prompt | Sequence[Prompt], continuations: Sequence[str] | None = None) -> list[Score]:
        """How likely each text is, in order, or, with `continuations`, each of them after its prompt.

        Raises ValueError for a text that cannot be scored, as one beyond the window.
        """
        many = _many(prompts)
        if continuations is not None and len(continuations) != len(many):
            raise ValueError(f"{len(many)} prompts and {len(continuations)} continuations: give one each")
        asked: list[Asked] = []
        for i, prompt in enumerate(many):
            ids = list(map(int, self._token_ids(prompt)))
            if continuations is None:
                asked.append((ids[:1], (tuple(ids[1:]),)))
            else:
                asked.append((ids, following(self.tokenizer, _text(prompt), ids, [continuations[i]])))
        return [Score.of(parts) for parts in ask(self.stream, asked)]

    def choose(
        self,
        prompts: Prompt | Sequence[Prompt],
        labels: Sequence[str] | Sequence[Sequence[str]],
        normalize: Literal["none", "tokens", "bytes"] = "none",
    ) -> list[Choice]:
        """The likeliest label after each prompt, in order; `labels` are for all prompts, or a list for each.

        Labels are compared whole, or per token or byte. Raises ValueError for what cannot be scored.
        """
        many = _many(prompts)
        each: Sequence[Any] = [labels] * len(many) if all(isinstance(label, str) for label in labels) else labels
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts and {len(each)} lists of labels: give one for all, or one each")
        if few := [list(mine) for mine in each if len(mine) < 2]:
            raise ValueError(f"labels={few[0]} must be two or more")
        asked: list[Asked] = []
        for prompt, mine in zip(many, each, strict=True):
            ids = list(map(int, self._token_ids(prompt)))
            asked.append((ids, following(self.tokenizer, _text(prompt), ids, mine)))
        return [choose(mine, found, normalize) for mine, found in zip(each, ask(self.stream, asked), strict=True)]

    @overload
    def stream(
        self, prompts: Iterable[Prompt | Request], params: Params = ..., *, stop_when: StopWhen | None = ...
    ) -> Generator[Completion, None, None]: ...
    @overload
    def stream(
        self,
        prompts: Iterable[Prompt | Request],
        params: Params = ...,
        *,
        deltas: Literal[True],
        stop_when: StopWhen | None = ...,
    ) -> Generator[Delta, None, None]: ...
    def stream(
        self,
        prompts: Iterable[Prompt | Request],
        params: Params = None,
        *,
        deltas: bool = False,
        stop_when: StopWhen | None = None,
    ) -> Generator[Any, None, None]:
        """Completions as they finish, or, with `deltas`, what the texts have grown by.

        Prompts, and `params` if there is one each, are taken as there is room, at most twice `max_num_seqs` ahead of
        the completions, so an endless iterable is fine. The key of a completion is the prompt's number, or that of its
        Request; with n > 1 it is (that, number of the sample). `stop_when` is asked about each row's text whenever it
        has grown, and ends the row when it says yes (finish_reason "stop", stop_reason "stop_when"). A caller that
        stops listening aborts what is under way.
        """
        requests = map(self._requester(params), _many(prompts))
        return self._stream(deltas, stop_when).run(itertools.chain.from_iterable(map(_samples, requests)))

    @overload
    def astream(
        self,
        prompts: Iterable[Prompt | Request] | AsyncIterable[Prompt | Request],
        params: Params = ...,
        *,
        stop_when: StopWhen | None = ...,
    ) -> AsyncGenerator[Completion, None]: ...
    @overload
    def astream(
        self,
        prompts: Iterable[Prompt | Request] | AsyncIterable[Prompt | Request],
        params: Params = ...,
        *,
        deltas: Literal[True],
        stop_when: StopWhen | None = ...,
    ) -> AsyncGenerator[Delta, None]: ...
    def astream(
        self,
        prompts: Iterable[Prompt | Request] | AsyncIterable[Prompt | Request],
        params: Params = None,
        *,
        deltas: bool = False,
        stop_when: StopWhen | None = None,
    ) -> AsyncGenerator[Any, None]:
        """As `stream`, for asyncio: the event loop is free while the engine computes.

        `prompts` may be asynchronous too; a plain iterable is read in the loop. Cancelling the task that listens aborts
        what is under way.
        """
        make = self._requester(params)

        async def requests() -> AsyncIterator[Request]:
            if isinstance(prompts, AsyncIterable):
                async for prompt in prompts:
                    for request in _samples(make(prompt)):
                        yield request
            else:
                for prompt in _many(prompts):
                    for request in _samples(make(prompt)):
                        yield request
                        await asyncio.sleep(0)  # others have their turn while the window fills

        return self._stream(deltas, stop_when).run_async(requests())

    def abort(self, key: Hashable) -> None:
        """Forget the requests with this key, in whichever streams, and free their blocks before this returns.

        Their completions say finish_reason "abort". A key that is not there, or not any more, is ignored.
        """
        self._open()
        for stream in list(self._streams):
            stream.abort(key)

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Parameters as the model's generation_config.json says, with `changes` in their place.

        Raises ConfigError if that is no JSON, ValueError for a value out of its range.
        """
        return SamplingParams(**{**generation_defaults(self.checkpoint), **changes})

    def close(self) -> None:
        """End the engine and its processes, and free the memory. Also on leaving a `with` block; twice is fine.

        Streams under way raise BatchrunError, and so does every use after this.
        """
        if self._driver is not None:
            self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        """For hashes of functions that use an LLM, as `datasets` makes them to name its caches: equal for equal models.

        A copy cannot compute: the engine stays in its process.
        """
        model = {key: getattr(self.checkpoint.model, key) for key in _identity_fields(ModelConfig)}
        texts = self._texts and (self._texts.pooler, self._texts.form)
        identity = self.checkpoint.identity(), repr(self.checkpoint.adapter_identity())
        return _stand_in, (*identity, tuple(sorted(model.items())), repr(texts))

    def _open(self) -> Driver:
        if self._driver is None:
            raise BatchrunError(
                "this is a copy of an LLM, whose engine stays in the process that made it: with datasets.map leave "
                "num_proc at None, and set `workers` of the LLM to use more cores or devices"
            )
        if self._driver.ended is not None:
            raise BatchrunError(str(self._driver.ended)) from self._driver.ended.__cause__
        return self._driver

    def _stream(self, deltas: bool, stop_when: StopWhen | None) -> Stream:
        stream = Stream(self._open(), self._window, deltas, stop_when, owner=self)
        self._streams.add(stream)
        return stream

    def _requester(self, params: Params) -> Callable[[Prompt | Request], Request]:
        """What makes requests of prompts, in order, with their parameters."""
        numbers = itertools.count()
        each = iter(params) if isinstance(params, Iterable) else itertools.repeat(params or SamplingParams())

        def make(prompt: Prompt | Request) -> Request:
            number, own = next(numbers), next(each, None)
            if own is None:
                raise ValueError(
                    f"there are {number} sampling parameters and more prompts: give one for all, or one each"
                )
            if isinstance(prompt, Request):
                return prompt
            if self.reasoning and not own.reasoning and isinstance(prompt, Mapping) and "messages" in prompt:
                own = dataclasses.replace(own, reasoning=self.reasoning)
            if self.tool_format and isinstance(prompt, Mapping) and prompt.get("tools"):
                # A marker that is a special token has to be in the text.
                hidden = MARKERS[self.tool_format] in special_texts(self.tokenizer)
                own = dataclasses.replace(own, skip_special_tokens=own.skip_special_tokens and not hidden)
            return Request(number, self._token_ids(prompt), own)

        return make

    def _token_ids(self, prompt: Any) -> Any:
        """The ids of a prompt of any kind. Raises TypeError for what is none."""
        match prompt:
            case str(text) | {"prompt": str(text)}:
                return self.tokenizer(text)["input_ids"]
            case {"prompt_token_ids": ids}:
                return ids
            case {"messages": messages}:
                return self.tokenizer.apply_chat_template(
                    messages,
                    tools=prompt.get("tools") or None,
                    add_generation_prompt=True,
                    return_dict=False,
                    **(prompt.get("chat_template_kwargs") or {}),
                )
            case np.ndarray() | Sequence() if all(isinstance(token, (int, np.integer)) for token in prompt[:1]):
                return prompt
        raise TypeError(
            f"{prompt!r:.60} is not a prompt: it must be text, token ids, a Request, or a dict with prompt, "
            "prompt_token_ids or messages"
        )


def load_engine(
    checkpoint: Checkpoint,
    tokenizer: Any,
    config: EngineConfig,
    rows: int | None = None,
    pooler: Pooler | None = None,
) -> Engine | Encoder | EnginePool:
    """The engine of this process, or a pool of engine processes if that is faster for a job of `rows` rows.

    With a `pooler` it gives vectors of texts, without one it generates.

    Without `rows` a pool is made only if `engine.workers` says so: a process that starts others must be able to
    be imported again, which a script or notebook need not be. Raises what `load_single` does.
    """
    placements = place_workers(checkpoint, config, rows)
    if len(placements) > 1:
        return EnginePool(checkpoint, config, placements, pooler)
    return load_single(checkpoint, tokenizer, config, pooler=pooler)


def load_single(
    checkpoint: Checkpoint, tokenizer: Any, config: EngineConfig, sharers: int = 1, pooler: Pooler | None = None
) -> Engine | Encoder:
    """Load the weights, check that the engine serves them, and make room for the KV cache, if there is to be one.

    `sharers` processes divide the memory between them. Raises UnsupportedModel for a family that the check
    refuses, ConfigError for memory that is not there.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = choose_device(checkpoint.model.device)
    dtype = choose_dtype(checkpoint.model.dtype, checkpoint, device)
    if pooler is not None:
        encoder = load_encoder_model(checkpoint, pooler, device, dtype, pack=config.fused_layers)
        return Encoder(encoder, pooler.max_length, config.max_num_seqs, config.max_batched_tokens)
    quantized = checkpoint.model.quantization == "int8"
    if quantized:
        check_int8(device, config.fused_layers)
    backend = attention_backend(config.attention, device)
    paged = cache_backend(backend, config.kv_cache_dtype)
    model = load_model(checkpoint, device, dtype)
    name_products(model.module)
    kv_dtype = torch.int8 if config.kv_cache_dtype == "int8" else model.dtype
    check_model(model, backend)
    if config.fused_layers:
        fuse_model(model)
    if quantized:
        quantize_model(model)
    install(model, list(checkpoint.adapters.values()))
    max_model_len = checkpoint.max_model_len
    pool = make_pool(config, model.kv_layout, kv_dtype, max_model_len, device, sharers)
    model.backend = paged(model.layers, pool.num_blocks, config.block_size, model.dtype, device)
    eos_ids = eos_token_ids(checkpoint, tokenizer)
    return Engine(
        model,
        tokenizer,
        pool,
        eos_ids,
        max_model_len,
        config.max_num_seqs,
        config.max_batched_tokens,
        tuple(checkpoint.adapters),
    )


def _split_options(
    model: str, options: dict[str, Any], reading: type[EmbedConfig | RankConfig] | None
) -> tuple[ModelConfig, EngineConfig, EmbedConfig | RankConfig | None]:
    """The sections of the config that options are of; those of `reading` too, if that is given."""
    sections: list[type[Any]] = [ModelConfig, EngineConfig, *([reading] if reading else [])]
    names = [{f.name for f in dataclasses.fields(section)} for section in sections]
    known = set().union(*names)
    if unknown := set(options) - known:
        raise ConfigError(f"LLM() has no option {', '.join(sorted(unknown))}: there are {', '.join(sorted(known))}")
    chosen = [{key: value for key, value in options.items() if key in own} for own in names]
    chosen[0].setdefault("path", model)
    made = [section(**given) for section, given in zip(sections, chosen, strict=True)]
    return made[0], made[1], made[2] if reading else None


def _samples(request: Request) -> Iterator[Request]:
    """A request for each of the n samples; the first has the seed of the whole."""
    params = request.params
    for number, key in enumerate(_sample_keys(request.key, params.n)):
        seed = None if params.seed is None else sample_seed(params.seed, number)
        yield (
            request
            if params.n == 1
            else dataclasses.replace(request, key=key, params=dataclasses.replace(params, n=1, seed=seed))
        )


def _sample_keys(key: Hashable, n: int) -> list[Hashable]:
    return [key] if n == 1 else [(key, number) for number in range(n)]


def _text(prompt: Any) -> str | None:
    """The text of a prompt that is text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _many(prompts: Any) -> Any:
    """Several prompts, of one or several."""
    one = isinstance(prompts, (str, Mapping, Request)) or (
        isinstance(prompts, (Sequence, np.ndarray)) and len(prompts) and isinstance(prompts[0], (int, np.integer))
    )
    return [prompts] if one else prompts


def _identity_fields(section: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(section) if f.metadata["identity"]]


def _stand_in(*_: Any) -> LLM:
    """What a copy of an LLM is: one that can only say that it is a copy."""
    copy = LLM.__new__(LLM)
    copy._driver = None
    return copy

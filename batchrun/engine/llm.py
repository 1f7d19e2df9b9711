"""The library door: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, overload

import numpy as np

from batchrun.config.base import one_of
from batchrun.engine.checkpoint import generation_defaults, load_tokenizer, open_checkpoint
from batchrun.engine.driver import Driver
from batchrun.engine.encoder import WINDOW, Encoder
from batchrun.engine.engine import Engine
from batchrun.engine.loading import load_engine, load_single
from batchrun.engine.options import READING, identity, split_options
from batchrun.engine.params import Completion, Delta, Request, SamplingParams
from batchrun.engine.pool import EnginePool
from batchrun.engine.pooler import EmbeddingPooler
from batchrun.engine.prompts import Messages, Params, Prompt, Requester, keys_of, samples, several
from batchrun.engine.reasoning import Reasoning, known_markers
from batchrun.engine.scoring import Choice, Score, ask, choose, labels_after, texts_after
from batchrun.engine.stream import StopWhen, Stream
from batchrun.engine.texts import Text, Texts, stacked
from batchrun.errors import BatchrunError
from batchrun.tool_calls import ToolCall, known_format, read_calls

__all__ = ["LLM", "load_engine", "load_single"]


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
        model_config, engine_config, settings = split_options(model, options, READING.get(task))
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
        prompts: Prompt | Iterable[Prompt | Request],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop_when: StopWhen | None = None,
    ) -> list[Completion]:
        """Complete every prompt, in order. `params` is one for all or one each.

        A prompt whose parameters have n > 1 gives n completions, one after the other.

        A prompt that cannot run gives a completion with finish_reason "error"; the others are not touched.
        `stop_when` is as for `stream`.
        """
        many = list(several(prompts))
        if isinstance(params, Sequence) and len(params) != len(many):
            raise ValueError(
                f"{len(many)} prompts and {len(params)} sampling parameters: give one for all, or one each"
            )
        order = {key: place for place, key in enumerate(keys_of(many, params))}
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
        many: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [{"messages": each, "tools": tools, "chat_template_kwargs": chat_template_kwargs} for each in many]
        return self.generate(prompts, params, stop_when=stop_when)

    def tool_calls(self, completion: Completion) -> list[ToolCall]:
        """The tools that an answer of `chat` with tools calls; none if it calls none.

        Raises ValueError for calls that cannot be read, and for a model whose `tool_format` is not known.
        """
        return read_calls(completion.text, self.tool_format, completion.finish_reason)

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

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Sequence[str] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Score]:
        """How likely each text is, in order, or, with `continuations`, each of them after its prompt.

        `adapter` is one of the LLM's `adapters` by name, for all prompts, or a list with one or None for each. Raises
        ValueError for a text that cannot be scored, as one beyond the window.
        """
        self._open()
        asked = texts_after(self.tokenizer, several(prompts), continuations, adapter)
        return [Score.of(parts) for parts in ask(self.stream, asked)]

    def choose(
        self,
        prompts: Prompt | Sequence[Prompt],
        labels: Sequence[str] | Sequence[Sequence[str]],
        normalize: Literal["none", "tokens", "bytes"] = "none",
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Choice]:
        """The likeliest label after each prompt, in order; `labels` are for all prompts, or a list for each.

        Labels are compared whole, or per token or byte. `adapter` is as for `score`. Raises ValueError for what cannot
        be scored.
        """
        self._open()
        each, asked = labels_after(self.tokenizer, several(prompts), labels, adapter)
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
        requests = map(self._requester(params), several(prompts))
        return self._stream(deltas, stop_when).run(itertools.chain.from_iterable(map(samples, requests)))

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
        requests = self._requester(params).each_of(prompts)
        return self._stream(deltas, stop_when).run_async(requests)

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        """For hashes of functions that use an LLM, as `datasets` makes them to name its caches: equal for equal models.

        A copy cannot compute: the engine stays in its process.
        """
        texts = self._texts and (self._texts.pooler, self._texts.form)
        return _stand_in, (*identity(self.checkpoint), repr(texts))

    def _requester(self, params: Params) -> Requester:
        self._open()
        return Requester(self.tokenizer, params, self.reasoning, self.tool_format)

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


def _stand_in(*_: Any) -> LLM:
    """What a copy of an LLM is: one that can only say that it is a copy."""
    copy = LLM.__new__(LLM)
    copy._driver = None
    return copy

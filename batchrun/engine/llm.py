"""The library door: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Self

import torch

from batchrun.config import EngineConfig, ModelConfig
from batchrun.engine.acceptance import check_model
from batchrun.engine.attention.registry import attention_backend
from batchrun.engine.checkpoint import Checkpoint, eos_token_ids, load_tokenizer, open_checkpoint
from batchrun.engine.engine import Engine
from batchrun.engine.kv_cache import BlockPool
from batchrun.engine.layers import fuse_model
from batchrun.engine.memory import num_kv_blocks
from batchrun.engine.model import choose_device, choose_dtype, load_model
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.engine.pool import EnginePool
from batchrun.engine.worker import place_workers
from batchrun.errors import ConfigError

Prompt = str | Sequence[int]


class LLM:
    """A model with its engine.

    `options` are the settings of the model and engine sections of the config, by their own names:
    `LLM("folder", dtype="float32", max_num_seqs=64)`. Raises ConfigError for an unknown option, a
    model that cannot be found, or a family that the paged attention cannot serve.
    """

    def __init__(self, model: str, *, offline: bool = False, **options: Any) -> None:
        model_config, engine_config = _split_options(model, options)
        self.checkpoint = open_checkpoint(model_config, offline=offline)
        self.tokenizer = load_tokenizer(self.checkpoint, offline=offline)
        self.engine = load_engine(self.checkpoint, self.tokenizer, engine_config)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete every prompt, in order. A prompt is text or token ids; `params` is one for all or one each.

        A prompt that cannot run gives a completion with finish_reason "error"; the others are not touched.
        """
        many: Sequence[Any] = prompts
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
            many = [prompts]
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts and {len(each)} sampling parameters: give one for all, or one each")
        requests = (Request(i, self._token_ids(many[i]), each[i]) for i in range(len(many)))
        by_number = {completion.key: completion for completion in self.stream(requests)}
        return [by_number[i] for i in range(len(many))]

    def stream(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions as they finish. Takes requests as there is room, so an endless iterable is fine."""
        source, engine = iter(requests), self.engine
        flying: set[Hashable] = set()
        try:
            while True:
                for request in islice(source, engine.room):
                    flying.add(request.key)
                    engine.add(request)
                if not engine.has_work():
                    return
                finished = engine.step()
                engine.take_steps()  # nobody here reads them, and an endless stream must not keep them
                for completion in finished:
                    flying.discard(completion.key)
                    yield completion
        finally:
            for key in flying:  # of a caller that stops listening
                engine.abort(key)

    def close(self) -> None:
        """End the engine processes, if there are any. Also on leaving a `with` block."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def abort(self, key: Any) -> None:
        """Forget a request that is in the engine and free its memory."""
        self.engine.abort(key)

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt


def load_engine(
    checkpoint: Checkpoint, tokenizer: Any, config: EngineConfig, rows: int | None = None
) -> Engine | EnginePool:
    """The engine of this process, or a pool of engine processes if that is faster for a job of `rows` rows.

    Without `rows` a pool is made only if `engine.workers` says so: a process that starts others must be able to
    be imported again, which a script or notebook need not be. Raises what `load_single` does.
    """
    placements = place_workers(checkpoint, config, rows)
    if len(placements) > 1:
        return EnginePool(checkpoint, config, placements)
    return load_single(checkpoint, tokenizer, config)


def load_single(checkpoint: Checkpoint, tokenizer: Any, config: EngineConfig, sharers: int = 1) -> Engine:
    """Load the weights, check that the paged attention serves them, and make room for the KV cache.

    `sharers` processes divide the memory between them. Raises UnsupportedModel for a family that the check
    refuses, ConfigError for memory that is not there.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = choose_device(checkpoint.model.device)
    model = load_model(checkpoint, device, choose_dtype(checkpoint.model.dtype, checkpoint, device))
    backend = attention_backend(config.attention, device)
    check_model(model, backend)
    if config.fused_layers:
        fuse_model(model)
    max_model_len = checkpoint.max_model_len
    blocks = num_kv_blocks(config, model.bytes_per_token(), max_model_len, device, sharers)
    model.backend = backend(model.layers, blocks, config.block_size, model.dtype, device)
    pool = BlockPool(blocks, config.block_size, config.prefix_caching)
    eos_ids = eos_token_ids(checkpoint, tokenizer)
    return Engine(model, tokenizer, pool, eos_ids, max_model_len, config.max_num_seqs, config.max_batched_tokens)


def _split_options(model: str, options: dict[str, Any]) -> tuple[ModelConfig, EngineConfig]:
    names = {cls: {f.name for f in dataclasses.fields(cls)} for cls in (ModelConfig, EngineConfig)}
    unknown = set(options) - names[ModelConfig] - names[EngineConfig]
    if unknown:
        known = sorted(names[ModelConfig] | names[EngineConfig])
        raise ConfigError(f"LLM() has no option {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    chosen = [{k: v for k, v in options.items() if k in names[cls]} for cls in (ModelConfig, EngineConfig)]
    return ModelConfig(**{"path": model, **chosen[0]}), EngineConfig(**chosen[1])

"""Everything a job needs before the model loads, and everything that can be wrong with it by then."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchrun import __version__, config
from batchrun.config import Config, SamplingConfig
from batchrun.config.output import AUTO
from batchrun.config.sampling import resolve
from batchrun.data.chat import chat_template_text
from batchrun.data.plan import Chunk, Plan
from batchrun.data.prompts import PromptBuilder
from batchrun.data.sources import Source, open_source
from batchrun.engine.checkpoint import Checkpoint, generation_defaults, load_tokenizer, open_checkpoint
from batchrun.engine.model import choose_device, choose_dtype, dtype_name
from batchrun.engine.params import sampling_params
from batchrun.engine.reasoning import known_markers
from batchrun.engine.token_rules import RuleBook
from batchrun.errors import ConfigError
from batchrun.tasks.base import Task
from batchrun.tasks.registry import TASKS, make_task
from batchrun.tool_calls import known_format


@dataclass(slots=True)
class Job:
    """Checked and ready to run."""

    config: Config
    checkpoint: Checkpoint
    tokenizer: Any
    source: Source
    plan: Plan
    prompts: PromptBuilder
    task: Task

    def settings(self) -> dict[str, Any]:
        """What decides a completion, by key, with every `auto` and every file resolved."""
        settings = config.identity(self.config)
        device, encodes = choose_device(self.config.model.device), self.task.pooler is not None
        dtype = choose_dtype(self.config.model.dtype, self.checkpoint, device, self.config.engine, encodes=encodes)
        settings["model.dtype"] = dtype_name(self.config.model.dtype, dtype)
        settings["model.max_model_len"] = self.task.max_length
        settings["model.files"] = self.checkpoint.identity()
        settings["model.path"] = self.checkpoint.name
        settings |= self.checkpoint.adapter_identity()
        settings["model.tokenizer"] = tokenizer_identity(self.tokenizer)
        settings["output.columns"] = self.config.output.columns or self.source.schema.names
        # Of texts that may lie in files the content counts, not the place.
        for key in ("prompt.template_file", "prompt.chat_template", "prompt.tools"):
            settings.pop(key)
        return settings | self.prompts.identity() | self.task.identity()

    def output_folder(self) -> Path:
        """The output folder, which need not be there. Raises ConfigError."""
        if self.config.output.path is None:
            raise ConfigError("output.path is not set: name a folder, e.g. output.path=out/labels")
        folder = Path(self.config.output.path).expanduser()
        for place in (folder, *folder.parents):
            if place.exists() and not place.is_dir():
                raise ConfigError(f"output.path={folder}: {place} is a file: name a folder")
        # Parts among the input files would be input of the next run.
        for searched in (Path(path).expanduser() for path in self.config.input.path):
            if searched.is_dir() and folder.resolve().is_relative_to(searched.resolve()):
                raise ConfigError(
                    f"output.path={folder} lies in the input folder {searched}, where its parts would be read as "
                    "input: use a folder outside of it"
                )
        return folder

    def read(self, numbers: np.ndarray, columns: Sequence[str]) -> Iterator[tuple[Chunk, int, pa.RecordBatch]]:
        """(chunk, first row, record batch) for the rows of the chunks `numbers`, in one pass over each file."""
        files, starts, stops = self.plan.bounds(numbers)
        for mine in np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(files)) + 1):
            mine = mine[starts[mine] < stops[mine]]
            chunks = map(self.plan.chunk, numbers[mine].tolist())
            chunk = next(chunks, None)
            if chunk is None:
                continue
            ranges = _joined(starts[mine], stops[mine])
            for first, batch in self.source.read(self.source.files[chunk.file], ranges, columns):
                at = 0
                while at < batch.num_rows:
                    while first + at >= chunk.stop:
                        chunk = next(chunks)
                    rows = min(batch.num_rows - at, chunk.stop - first - at)
                    yield chunk, first + at, batch.slice(at, rows)
                    at += rows


def open_job(config: Config, *, weights: bool) -> Job:
    """Find the model's files and the input, and build the prompts' template: nothing is computed or written.

    With `weights` false the weights need not be there. Raises ConfigError, InputError.
    """
    source = open_source(config.input, offline=config.offline)
    purpose = TASKS[config.task].purpose
    checkpoint = open_checkpoint(config.model, weights=weights, offline=config.offline, purpose=purpose)
    tokenizer = load_tokenizer(checkpoint, offline=config.offline)
    config = replace(config, sampling=checked_sampling(config.sampling, checkpoint, tokenizer))
    folders = [Path(config.prompt.template_file).parent] if config.prompt.template_file else []
    template = chat_template_text(config.prompt, tokenizer, folders)
    reasoning = replace(config.reasoning)
    reasoning.resolve(known_markers(template))
    output = replace(config.output, tool_calls=tool_format(config, template))
    config = replace(config, reasoning=reasoning, output=output)
    task = make_task(config)
    task.prepare(checkpoint, tokenizer)
    prompts = task.prompts(tokenizer, source.schema, folders)
    plan = Plan(source.files, config.output.chunk_rows, config.sampling.n)
    return Job(config, checkpoint, tokenizer, source, plan, prompts, task)


def tool_format(config: Config, chat_template: str | None) -> str | None:
    """The format of calls of tools that a job's completions may have, None if their texts stay whole."""
    if config.output.tool_calls != AUTO:
        return config.output.tool_calls
    prompt = config.prompt
    shown = prompt.tools is not None or prompt.tools_column is not None
    return known_format(chat_template) if shown and not prompt.turns and config.task == "generate" else None


def checked_sampling(sampling: SamplingConfig, checkpoint: Checkpoint, tokenizer: Any) -> SamplingConfig:
    """The settings with those that are null as the model says, and their tokens known to be the model's.

    Raises ConfigError.
    """
    try:
        sampling = resolve(sampling, generation_defaults(checkpoint))
    except ConfigError as error:
        raise ConfigError(f"generation_config.json of {checkpoint.name}: {error}") from error
    vocab_size = getattr(checkpoint.text_config, "vocab_size", None) or len(tokenizer)
    try:
        RuleBook(tokenizer, vocab_size, np.empty(0, dtype=np.int64)).of(sampling_params(sampling, seed=0))
    except ValueError as error:
        raise ConfigError(f"sampling.{error}") from error
    return sampling


def _joined(starts: np.ndarray, stops: np.ndarray) -> list[tuple[int, int]]:
    """Row ranges, those that touch made one."""
    gaps = np.flatnonzero(starts[1:] != stops[:-1]) + 1
    first, last = np.concatenate([[0], gaps]), np.concatenate([gaps - 1, [len(starts) - 1]])
    return list(zip(starts[first].tolist(), stops[last].tolist(), strict=True))


def tokenizer_identity(tokenizer: Any) -> str:
    """sha256 over the vocabulary and what a probe text becomes."""
    digest = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode("utf-8", "surrogatepass"))
    digest.update(repr(tokenizer(" The quick brown fox: 12.5 €\n\n日本語")["input_ids"]).encode())
    return digest.hexdigest()


def versions() -> dict[str, str | None]:
    """Versions of what a completion may depend on; null for what is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"batchrun": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "llguidance", "triton", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found

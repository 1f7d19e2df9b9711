"""Everything a job needs before the model loads, and everything that can be wrong with it by then."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchrun import __version__, config
from batchrun.config import Config
from batchrun.data.outputs import OutputSchema
from batchrun.data.plan import Chunk, Plan, build_manifest, check_manifest, read_manifest, write_manifest
from batchrun.data.prompts import PromptBuilder
from batchrun.data.sources import Source, open_source
from batchrun.data.store import Store
from batchrun.engine.checkpoint import Checkpoint, load_tokenizer, open_checkpoint
from batchrun.engine.model import choose_device, choose_dtype
from batchrun.errors import ConfigError


@dataclass(slots=True)
class Job:
    """Checked and ready to run."""

    config: Config
    checkpoint: Checkpoint
    tokenizer: Any
    source: Source
    plan: Plan
    prompts: PromptBuilder

    def settings(self) -> dict[str, Any]:
        """What decides a completion, by key, with every `auto` and every file resolved."""
        settings = config.identity(self.config)
        dtype = choose_dtype(self.config.model.dtype, self.checkpoint, choose_device(self.config.model.device))
        settings["model.dtype"] = str(dtype).removeprefix("torch.")
        settings["model.max_model_len"] = self.checkpoint.max_model_len
        settings["model.files"] = self.checkpoint.identity()
        settings["model.path"] = self.checkpoint.name
        settings["model.tokenizer"] = tokenizer_identity(self.tokenizer)
        settings["output.columns"] = self.config.output.columns or self.source.schema.names
        # Of texts that may lie in files the content counts, not the place.
        for key in ("prompt.template_file", "prompt.chat_template"):
            settings.pop(key)
        return settings | self.prompts.identity()

    def open_store(self) -> tuple[Store, OutputSchema]:
        """The output folder, claimed for this job by its manifest.

        Raises FingerprintMismatch if it belongs to a job with other settings or input, touching nothing;
        InputError for output columns that cannot be.
        """
        output = self.config.output
        if output.path is None:
            raise ConfigError("output.path is not set: name a folder, e.g. output.path=out/labels")
        folder = Path(output.path).expanduser()
        self._check_apart(folder)
        manifest = build_manifest(self.settings(), self.source.files, batchrun=__version__, versions=_versions())
        schema = OutputSchema(output, self.source.schema, manifest["fingerprint"])
        old = read_manifest(folder)
        if old is not None:
            check_manifest(old, manifest)
        store = Store(folder, manifest["fingerprint"], output.compression)
        if not write_manifest(folder, manifest):
            check_manifest(read_manifest(folder) or {}, manifest)
        return store, schema

    def _check_apart(self, folder: Path) -> None:
        """Parts among the input files would be input of the next run."""
        for searched in (Path(path).expanduser() for path in self.config.input.path):
            if searched.is_dir() and folder.resolve().is_relative_to(searched.resolve()):
                raise ConfigError(
                    f"output.path={folder} lies in the input folder {searched}, where its parts would be read as "
                    "input: use a folder outside of it"
                )

    def own_chunks(self) -> Iterator[Chunk]:
        """This worker's share of the plan: chunk i goes to worker i mod count."""
        launch = self.config.launch
        return (chunk for i, chunk in enumerate(self.plan.chunks()) if i % launch.count == launch.index)

    def read(self, chunks: Sequence[Chunk], columns: Sequence[str]) -> Iterator[tuple[Chunk, int, pa.RecordBatch]]:
        """(chunk, first row, record batch) for the rows of `chunks`, in one pass over each file."""
        for file, of_file in groupby(chunks, key=lambda chunk: chunk.file):
            todo = list(of_file)
            ranges = iter(todo)
            chunk = next(ranges)
            for first, batch in self.source.read(self.source.files[file], [(c.start, c.stop) for c in todo], columns):
                while first >= chunk.stop:
                    chunk = next(ranges)
                yield chunk, first, batch


def open_job(config: Config, *, weights: bool) -> Job:
    """Find the model's files and the input, and build the prompts' template: nothing is computed or written.

    With `weights` false the weights need not be there. Raises ConfigError, InputError.
    """
    source = open_source(config.input)
    checkpoint = open_checkpoint(config.model, weights=weights, offline=config.offline)
    tokenizer = load_tokenizer(checkpoint, offline=config.offline)
    folders = [Path(config.prompt.template_file).parent] if config.prompt.template_file else []
    prompts = PromptBuilder(config.prompt, tokenizer, source.schema, checkpoint.max_model_len, folders)
    return Job(config, checkpoint, tokenizer, source, Plan(source.files, config.output.chunk_rows), prompts)


def tokenizer_identity(tokenizer: Any) -> str:
    """sha256 over the vocabulary and what a probe text becomes."""
    digest = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode("utf-8", "surrogatepass"))
    digest.update(repr(tokenizer(" The quick brown fox: 12.5 €\n\n日本語")["input_ids"]).encode())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "pyarrow")}

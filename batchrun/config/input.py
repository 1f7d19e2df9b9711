"""Where rows come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchrun.config.base import in_range, one_of, setting, strings
from batchrun.errors import ConfigError

INPUT_FORMATS = ("auto", "parquet", "jsonl", "csv", "arrow", "hf", "openai")
SCHEMA_MODES = ("strict", "intersect", "union")


@dataclass
class InputConfig:
    """Where rows come from."""

    format: str = setting(
        "auto", "auto (by the files' endings), parquet, jsonl, csv, arrow, hf or openai", identity=False
    )
    path: Any = setting(
        None, "file, folder (searched to any depth), glob, URL, or list of them; a data set for hf", identity=False
    )
    columns: Any = setting(None, "columns to read; default: all", identity=False)
    filter: str | None = setting(
        None, "condition on a row's columns, as in: rating >= 4 and lang == 'en'", identity=True
    )
    sample: float | None = setting(
        None, "below 1: this share of the rows; from 1 on: this many rows; the same ones for a seed", identity=True
    )
    sample_seed: int = setting(0, "another seed is another sample", identity=True)
    limit: int | None = setting(None, "read this many rows at most, in input order", identity=True)
    schema: str = setting(
        "strict", "files whose columns differ: strict (refuse), intersect or union of their columns", identity=True
    )
    types: dict[str, str] = setting(
        {}, "jsonl and csv: types of columns, as in input.types.id=string; json is the value's JSON text", identity=True
    )
    delimiter: str | None = setting(None, "csv: between fields; default: a tab for .tsv, else a comma", identity=True)
    quote: str | None = setting('"', "csv: around fields that hold a delimiter; null: quotes are text", identity=True)
    name: str | None = setting(None, "hf: configuration of the data set", identity=False)
    split: str | None = setting(None, "hf: split; default: the only one", identity=False)
    revision: str | None = setting(None, "hf: branch, tag or commit of the data set", identity=False)
    streaming: bool = setting(
        False, "hf: read from where the data set lies, without a copy in the cache", identity=False
    )
    storage_options: dict[str, Any] = setting(
        {},
        "for URLs: options of the fsspec file system, such as endpoint_url; keep secrets in the environment",
        identity=False,
    )

    def __post_init__(self) -> None:
        one_of("input.format", self.format, INPUT_FORMATS)
        one_of("input.schema", self.schema, SCHEMA_MODES)
        in_range("input.limit", self.limit, 1)
        in_range("input.sample_seed", self.sample_seed, 0)
        if self.sample is not None and not 0 < self.sample < 1 and not (self.sample >= 1 and self.sample % 1 == 0):
            raise ConfigError(
                f"input.sample={self.sample} is neither a share above 0 and below 1 nor a whole number of rows"
            )
        for key in ("delimiter", "quote"):
            value = getattr(self, key)
            if value is not None and (len(value) != 1 or value in "\r\n"):
                raise ConfigError(f"input.{key}={value!r} must be one character, and not the end of a line")
        self.path = strings("input.path", self.path)
        self.columns = strings("input.columns", self.columns) or None

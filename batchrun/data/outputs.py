"""The declared output: input columns as they came, then what batchrun adds, a row for each input row and sample."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from batchrun import __version__
from batchrun.config import OutputConfig
from batchrun.data.derived import DERIVED_ERROR
from batchrun.data.formats.base import ROW_NUMBER
from batchrun.data.parsing import PARSE_ERROR, PARSED, Parser
from batchrun.data.plan import Chunk
from batchrun.data.schemas import column_list, conform, storable
from batchrun.data.values import clean_text
from batchrun.errors import ErrorType, InputError

COMPLETION = "completion"
SOURCE_FILE = "source_file"
SOURCE_ROW = "source_row"
SAMPLE = "sample"
PARSING = b"batchrun.parsing"  # in a part's footer: the settings of its parser
COUNTS = b"batchrun.counts"  # in a part's footer: its failed rows by error_type
ATTEMPTS = "attempts"
RESULT_TYPES: dict[str, pa.DataType] = {
    COMPLETION: pa.string(),
    "finish_reason": pa.string(),
    "status": pa.string(),
    "error_type": pa.string(),
    "error": pa.string(),
    "prompt_tokens": pa.int32(),
    "truncated_tokens": pa.int32(),
    "cached_tokens": pa.int32(),
    "completion_tokens": pa.int32(),
    "max_tokens": pa.int32(),
    ATTEMPTS: pa.int32(),
    SOURCE_FILE: pa.string(),
    SOURCE_ROW: pa.int64(),
    SAMPLE: pa.int32(),
    "queue_s": pa.float32(),
    "first_token_s": pa.float32(),
    "total_s": pa.float32(),
    "deduplicated": pa.bool_(),
    "run": pa.string(),
}
OF_COMPLETIONS = (
    COMPLETION,
    "completion_tokens",
    "max_tokens",
    "first_token_s",
    ATTEMPTS,
)  # no columns where no text is made


@dataclass(slots=True)
class RowResult:
    """What became of one sample of an input row. Times are in seconds; `text` is None for a row that was not completed.

    `run` names the run that made the row: its settings are in the record of that run.
    """

    text: str | None = None
    finish_reason: str | None = None  # stop | length | repetition | error | skipped
    status: str = "ok"  # ok | error | skipped
    error_type: ErrorType | None = None  # of a skipped row: why
    error: str | None = None
    prompt_tokens: int = 0
    truncated_tokens: int = 0  # that the prompt had before it was cut to fit
    cached_tokens: int = 0
    completion_tokens: int = 0
    max_tokens: int | None = None  # that the completion could have had, in what the prompt leaves of the window
    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    deduplicated: bool = False  # the result is that of a row with the same prompt
    run: str | None = None
    # Of the columns that a task has in place of a completion: what JSON can hold, or arrays of float32; None: all null.
    values: dict[str, Any] | None = None
    sample: int = 0
    attempts: int = 1  # times that the row was asked; the result is the last one's


class OutputSchema:
    """The schema of every part, known before the model loads, and the tables that have it.

    `types` are the added columns, by key, in their order, and `names` what they are called. `input_schema` holds the
    columns that are read; `kept` are those that go to the output, `schema` is the whole. `carried` are the columns that
    batches bring to `table`: with `numbered`, their rows have numbers of their own. `task_types` are the columns of a
    task that completes no text, None for one that does, which may have `more_types` beside its completion. With
    `samples` above 1, each input row makes so many of the output, told apart by a column.

    Raises InputError for a kept column that is missing, collides with an added one, or has a type that Parquet cannot
    hold, and for a JSON Schema that is none.
    """

    def __init__(
        self,
        config: OutputConfig,
        input_schema: pa.Schema,
        fingerprint: str,
        numbered: bool = False,
        task_types: dict[str, pa.DataType] | None = None,
        samples: int = 1,
        more_types: dict[str, pa.DataType] | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.prefix = config.prefix
        self.kept = _kept_columns(config, input_schema)
        self.carried = [*self.kept, ROW_NUMBER] if numbered else self.kept
        self.parser = Parser(config)
        self.task_types = task_types
        self.derived = self.parser.derived.types if task_types is None else {}
        if task_types is None:
            # Beside the completion comes what it is parsed to.
            self.own = more_types or {}
            self.types = {COMPLETION: RESULT_TYPES[COMPLETION]} | self.parser.types | self.own | RESULT_TYPES
            if taken := sorted(self.derived.keys() & self.types.keys()):
                raise InputError(f"output.derived.{taken[0]} is the name of another added column: choose another")
            self.types |= self.derived
        else:
            self.own = task_types
            self.types = task_types | {key: type for key, type in RESULT_TYPES.items() if key not in OF_COMPLETIONS}
        if samples == 1:
            del self.types[SAMPLE]
        if not config.retry_invalid:
            self.types.pop(ATTEMPTS, None)
        given = {COMPLETION: config.completion, PARSED: config.parsed}
        self.names = {key: config.prefix + given.get(key, key) for key in self.types}
        _check_names(config, list(self.names.values()), self.kept)
        self.parser.derived.templates([*self.kept, *(self.names[key] for key in self.types if key not in self.derived)])
        fields = [storable(input_schema.field(name)) for name in self.kept]
        added = [pa.field(self.names[key], type) for key, type in self.types.items()]
        metadata = with_features(input_schema.metadata or {}, self.kept, added)
        self.schema = pa.schema([*fields, *added], metadata)

    def table(
        self,
        batches: pa.Table | Sequence[pa.RecordBatch],
        chunk: Chunk,
        source_name: str,
        results: Sequence[RowResult],
    ) -> pa.Table:
        """The part of one chunk: its input rows, in order and with at least the kept columns, beside their results.

        Raises ValueError unless there are exactly `chunk.rows` and `chunk.results` of them.
        """
        kept = [self.schema.field(name) for name in self.kept]
        carried = _carried(batches, pa.schema(kept), chunk.samples)
        rows = batches.num_rows if isinstance(batches, pa.Table) else sum(batch.num_rows for batch in batches)
        if rows != chunk.rows or len(results) != chunk.results:
            raise ValueError(f"{chunk} has {chunk.rows} rows, but got {rows} input rows and {len(results)} results")
        values = _result_values(results)
        values[SOURCE_FILE] = [source_name] * len(results)
        values[SOURCE_ROW] = np.repeat(_row_numbers(batches, chunk), chunk.samples)
        if self.task_types is None:
            values |= self.parser.columns(values[COMPLETION], values["finish_reason"])
        for key in self.own:
            values[key] = [(result.values or {}).get(key) for result in results]
            if "string" in str(self.types[key]):
                values[key] = _clean(values[key])
        fixed = [key for key in self.types if key not in self.derived]
        added = [pa.array(values[key], self.types[key]) for key in fixed]
        if self.derived:
            names = [*self.kept, *(self.names[key] for key in fixed)]
            part = pa.Table.from_arrays([*carried.columns, *added], names)
            added += self.parser.derived.columns(part, self.names[COMPLETION], self.prefix).values()
        errors = Counter(result.error_type or "error" for result in results if result.status == "error")
        schema = self.schema.with_metadata(
            {
                **(self.schema.metadata or {}),
                **footer(self.fingerprint, chunk, source_name),
                PARSING: self.parser.record,
                COUNTS: json.dumps(errors, sort_keys=True).encode(),
            }
        )
        return pa.Table.from_arrays([*carried.columns, *added], schema=schema)

    def parse_errors(self, part: pa.Table) -> int:
        """Completions of a part that could not be parsed."""
        name = self.names.get(PARSE_ERROR)
        return 0 if name is None else len(part) - part[name].null_count

    def tally(self, part: pa.Table) -> dict[str, Counter[str]]:
        """How often each value comes in the derived columns of a part, by column; nulls are left out."""
        names = [self.names[key] for key, type in self.derived.items() if type == pa.string() and key != DERIVED_ERROR]
        return {name: Counter(value for value in part[name].to_pylist() if value is not None) for name in names}

    def results(self, part: pa.Table) -> list[RowResult]:
        """What `table` was given for a part, from the part, in row order."""
        fields = {
            field.name: COMPLETION if field.name == "text" else field.name for field in dataclasses.fields(RowResult)
        }
        found = {name: part[self.names[key]].to_pylist() for name, key in fields.items() if key in self.names}
        if self.own:
            own = [part[self.names[key]].to_pylist() for key in self.own]
            found["values"] = [dict(zip(self.own, values, strict=True)) for values in zip(*own, strict=True)]
        return [RowResult(**dict(zip(found, values, strict=True))) for values in zip(*found.values(), strict=True)]


def _row_numbers(batches: pa.Table | Sequence[pa.RecordBatch], chunk: Chunk) -> np.ndarray:
    """Each row's number in its file: the one it brings, else its place in the chunk's range."""
    parts = [batches] if isinstance(batches, pa.Table) else batches
    if parts and all(ROW_NUMBER in part.schema.names for part in parts):
        return np.concatenate([part.column(ROW_NUMBER).to_numpy() for part in parts])
    return np.arange(chunk.start, chunk.stop)


def footer(fingerprint: str, chunk: Chunk, source_name: str) -> dict[bytes, bytes]:
    """Metadata in a part's footer: who made it, under which settings, from which rows."""
    rows = {"file": chunk.file, "index": chunk.index, "start": chunk.start, "stop": chunk.stop}
    return {
        b"batchrun.version": __version__.encode(),
        b"batchrun.fingerprint": fingerprint.encode(),
        b"batchrun.chunk": json.dumps(rows).encode(),
        b"batchrun.source": source_name.encode(),
    }


def _carried(batches: pa.Table | Sequence[pa.RecordBatch], schema: pa.Schema, samples: int) -> pa.Table:
    """The columns of `schema`, each row `samples` times."""
    if isinstance(batches, pa.Table):
        batches = batches.select(schema.names).cast(schema).to_batches()
    parts = [conform(batch, schema) for batch in batches]
    if samples > 1:
        # Batch by batch: a whole chunk of long texts may pass what the offsets of one array can count.
        parts = [part.take(pa.array(np.repeat(np.arange(part.num_rows), samples))) for part in parts]
    return pa.Table.from_batches(parts, schema=schema)


def _result_values(results: Sequence[RowResult]) -> dict[str, Any]:
    """Columns of the results, by their key in RESULT_TYPES."""
    values: dict[str, Any] = {
        key: [getattr(result, key) for result in results]
        for key in RESULT_TYPES
        if key not in (COMPLETION, SOURCE_FILE, SOURCE_ROW)
    }
    values[COMPLETION] = [result.text for result in results]
    for key in (COMPLETION, "error"):
        values[key] = [None if text is None else clean_text(text) for text in values[key]]
    return values


def _clean(value: Any) -> Any:
    """The value with every text in it as UTF-8 can hold it."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return {key: _clean(item) for key, item in value.items()} if isinstance(value, dict) else value


def _kept_columns(config: OutputConfig, schema: pa.Schema) -> list[str]:
    if config.columns is None:
        return list(schema.names)
    missing = [name for name in config.columns if name not in schema.names]
    if missing:
        raise InputError(
            f"output.columns names {', '.join(missing)}, which is not read from the input; "
            f"the columns are {column_list(schema.names)}"
        )
    return list(dict.fromkeys(config.columns))


def _check_names(config: OutputConfig, added: list[str], kept: list[str]) -> None:
    doubled = [name for name in dict.fromkeys(added) if added.count(name) > 1]
    if doubled:
        raise InputError(
            f"output.completion={config.completion}"
            + (f" or output.parsed={config.parsed}" if config.parse != "none" else "")
            + " is the name of another added column: choose another"
        )
    taken = [name for name in added if name in kept]
    if taken:
        raise InputError(
            f"the input has columns that batchrun adds to the output: {', '.join(taken)}. Set output.prefix "
            f"(as in output.prefix=llm_){' or output.completion' if added[0] in taken else ''}, "
            "or leave them out with output.columns"
        )


def with_features(metadata: dict[bytes, bytes], kept: list[str], added: list[pa.Field]) -> dict[bytes, bytes]:
    """The input's metadata, with its Hugging Face features, if any, made those of the output.

    Features that cannot be read are dropped: `datasets` then takes the types from Arrow.
    """
    metadata = {key: value for key, value in metadata.items() if not key.startswith(b"batchrun.")}
    raw = metadata.pop(b"huggingface", None)
    if raw is None:
        return metadata
    try:
        described = json.loads(raw)
        old = described["info"]["features"]
        features = {name: old[name] for name in kept}
    except (ValueError, KeyError, TypeError):
        return metadata
    features |= {field.name: _feature(field.type) for field in added}
    described["info"]["features"] = features
    described.pop("fingerprint", None)
    return metadata | {b"huggingface": json.dumps(described).encode()}


def _feature(type: pa.DataType) -> dict[str, Any]:
    if pa.types.is_struct(type):
        return {field.name: _feature(field.type) for field in type}
    if pa.types.is_list(type):
        return {"feature": _feature(type.value_type), "_type": "List"}
    if pa.types.is_fixed_size_list(type):
        return {"feature": _feature(type.value_type), "length": type.list_size, "_type": "List"}
    # Arrow calls these two float and double.
    return {"dtype": {pa.float32(): "float32", pa.float64(): "float64"}.get(type, str(type)), "_type": "Value"}

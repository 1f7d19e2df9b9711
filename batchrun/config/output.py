"""Where completions go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchrun.config.base import LONGEST_S, in_range, one_of, setting, strings
from batchrun.errors import ConfigError
from batchrun.tool_calls import FORMATS

PARSES = ("none", "json")
AUTO = "auto"
COMPRESSION = ("zstd", "snappy", "gzip", "lz4", "none")


@dataclass
class OutputConfig:
    """Where completions go, and how parts look."""

    path: str | None = setting(None, "output folder", identity=False)
    chunk_rows: int = setting(1000, "input rows in one part: the unit of work and of commit", identity=True)
    completion: str = setting("completion", "name of the column with the generated text", identity=True)
    prefix: str = setting("", "put before the name of each column that batchrun adds", identity=True)
    columns: Any = setting(None, "input columns to keep; default: all that were read", identity=True)
    parse: str = setting("none", "json: a column with the completion as a JSON value, beside its text", identity=False)
    schema: Any = setting(
        None,
        "JSON Schema that the completion must follow, which gives that column its type: a file, or inline",
        identity=False,
    )
    parsed: str = setting("parsed", "name of that column", identity=False)
    retry_invalid: int = setting(
        0, "ask up to so many times again, with other seeds, where a completion does not parse", identity=True
    )
    tool_calls: str | None = setting(
        AUTO,
        "format of calls of tools, for a column of them: hermes, llama3_json or mistral; auto: the one that the chat "
        "template speaks of, if the prompt has tools; null: texts stay whole",
        identity=True,
    )
    derived: dict[str, str] = setting(
        {},
        "columns of text, by name: templates over the columns of an output row, for verdicts, votes and the like",
        identity=False,
    )
    duplicates: bool = setting(
        False, "a column that points from a completion to an equal one before it in the part", identity=False
    )
    compression: str = setting("zstd", "zstd, snappy, gzip, lz4 or none", identity=False)
    journal_seconds: float = setting(
        5.0, "seconds between writes of finished rows whose part is not complete yet", identity=False
    )

    merge_path: str | None = setting(None, "mode=merge: new folder for the merged files", identity=False)
    merge_mib: int = setting(512, "mode=merge: size of a merged file in MiB, at least", identity=False)
    merge_unique: bool = setting(
        False, "mode=merge: leave out rows whose completion equals that of one before them", identity=False
    )
    overwrite: bool = setting(False, "replace the output of a job with other settings or input", identity=False)

    def __post_init__(self) -> None:
        in_range("output.chunk_rows", self.chunk_rows, 1)
        one_of("output.compression", self.compression, COMPRESSION)
        one_of("output.parse", self.parse, PARSES)
        if self.schema is not None and self.parse == "none":
            raise ConfigError("output.schema describes JSON: set output.parse=json too, or output.schema=null")
        if self.schema is not None and not isinstance(self.schema, (str, dict)):
            raise ConfigError(f"output.schema={self.schema!r} must be a JSON Schema, or a file with one")
        in_range("output.retry_invalid", self.retry_invalid, 0)
        if self.tool_calls is not None:
            one_of("output.tool_calls", self.tool_calls, (AUTO, *FORMATS))
        if self.retry_invalid and self.parse == "none":
            raise ConfigError("output.retry_invalid asks again for what does not parse: set output.parse=json too")
        if not self.parsed:
            raise ConfigError("output.parsed is empty: name the column for the parsed completion")
        in_range("output.journal_seconds", self.journal_seconds, 0.01, LONGEST_S)
        in_range("output.merge_mib", self.merge_mib, 1)
        if not self.completion:
            raise ConfigError("output.completion is empty: name the column for the generated text")
        self.columns = None if self.columns is None else strings("output.columns", self.columns)

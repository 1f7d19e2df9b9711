"""Parsing the completions of finished parts anew: neither model nor input is needed, and the texts stay as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.config import OutputConfig
from batchrun.data.claim import Claim
from batchrun.data.derived import DERIVED_ERROR, DUPLICATE_OF
from batchrun.data.disk import explained, read_json, replace_json
from batchrun.data.manifest import changed_settings, plan_of, read_manifest
from batchrun.data.outputs import PARSING, with_features
from batchrun.data.parsing import NO_PARSING, PARSE_ERROR, PARSED, Parser, Settings
from batchrun.data.plan import STATE_FOLDER, Chunk
from batchrun.data.runs import new_run_id
from batchrun.data.store import Store, check_parts
from batchrun.errors import ConfigError, FingerprintMismatch, InputError
from batchrun.faults import fault

RECORD = "parsing.json"  # in the state folder: how parts are parsed, if not as the manifest says


@dataclass(slots=True)
class Reparsed:
    """What a reparse came to. `made` parts were made anew; the others of `parts` had the columns already."""

    parts: int = 0
    made: int = 0
    rows: int = 0  # of the parts made
    errors: int = 0  # completions among them that do not parse


def check_parsing(folder: Path, manifest: Mapping[str, Any], parser: Parser) -> None:
    """Raise FingerprintMismatch unless the parts of an output are parsed as `parser` does it."""
    record = read_json(folder / STATE_FOLDER / RECORD) or {"settings": manifest.get("parsing"), "whole": True}
    if not record["whole"]:
        raise FingerprintMismatch(
            f"mode=reparse was interrupted in {folder}, and some parts are parsed in one way and some in another: "
            "run it again"
        )
    settings = record["settings"] or NO_PARSING
    if settings != parser.settings:
        raise FingerprintMismatch(
            f"completions in {folder} are parsed in another way:\n  "
            + "\n  ".join(changed_settings(settings, parser.settings))
            + "\nthe same command with mode=reparse changes that without the model; or go back to the old settings"
        )


def reparse_parts(folder: Path, config: OutputConfig) -> Reparsed:
    """Give every finished part the columns that `config` asks for, each part whole or not at all.

    One that was cut short is taken up again by the next. Parts that are not there yet will be made with these columns.
    Raises ConfigError for a folder that is no output or columns that cannot be, touching nothing; OutputInUse while a
    process works on the output; BatchrunError if the disk refuses.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder} is not the output of a job: it has no manifest")
    parser = Parser(config)
    # A fingerprint that no job has keeps every worker away.
    claim = Claim(folder / STATE_FOLDER, 0, 1, "reparse", new_run_id())
    with claim.held():
        store = Store(folder, manifest["fingerprint"], config.compression)
        chunks = _finished(folder, manifest)
        check_parts((folder / chunk.part for chunk in chunks), manifest["fingerprint"])
        if chunks:
            _reparsed(pq.read_schema(folder / chunks[0].part).empty_table(), parser, manifest["settings"])
        _record(folder, parser.settings, whole=False)
        fault("reparse_begun")
        done = Reparsed(parts=len(chunks))
        for chunk in chunks:
            _reparse(store, chunk, parser, manifest["settings"], done)
        _record(folder, parser.settings, whole=True)
    return done


def _reparse(store: Store, chunk: Chunk, parser: Parser, settings: Settings, done: Reparsed) -> None:
    path = store.folder / chunk.part
    if _parsing(pq.read_schema(path)) == parser.settings:
        return
    table = _reparsed(pq.read_table(path), parser, settings)
    store.commit(chunk, table)
    fault("reparse_part")
    done.made += 1
    done.rows += len(table)
    if parser.types:
        done.errors += len(table) - table[_names(settings, parser.settings)[PARSE_ERROR]].null_count


def _finished(folder: Path, manifest: Mapping[str, Any]) -> list[Chunk]:
    """The chunks that have a part, in input order."""
    plan = plan_of(manifest)
    with explained(folder):
        return [plan.chunk(number) for number in plan.present(folder).tolist()]


def _reparsed(table: pa.Table, parser: Parser, settings: Settings) -> pa.Table:
    """The rows of a part with other columns beside the completion. Raises InputError if their names are taken."""
    metadata = dict(table.schema.metadata or {})
    old = _names(settings, _parsing(table.schema))
    table = table.drop_columns([name for name in old.values() if name in table.column_names])
    names = _names(settings, parser.settings)
    if taken := [name for name in names.values() if name in table.column_names]:
        raise InputError(f"{', '.join(taken)} is a column of the output already: set another output.parsed")
    kept, prefix = table.column_names, settings["output.prefix"]
    completion = prefix + settings["output.completion"]
    texts, reasons = table[completion].to_pylist(), table[f"{prefix}finish_reason"].to_pylist()
    place, added = kept.index(completion) + 1, []
    for key, values in parser.columns(texts, reasons).items():
        added.append(pa.field(names[key], parser.types[key]))
        table = table.add_column(place + len(added) - 1, added[-1], pa.array(values, parser.types[key]))
    derived = parser.derived.columns(table, completion, prefix)
    for key, column in derived.items():
        added.append(pa.field(names[key], column.type))
        table = table.append_column(added[-1], column)
    footers = {key: value for key, value in metadata.items() if key.startswith(b"batchrun.")}
    return table.replace_schema_metadata(with_features(metadata, kept, added) | footers | {PARSING: parser.record})


def _names(settings: Settings, parsing: Settings) -> dict[str, str]:
    """What the columns of a parser are called."""
    prefix = settings["output.prefix"]
    keys = [*parsing["output.derived"], DERIVED_ERROR] if parsing["output.derived"] else []
    keys += [DUPLICATE_OF] if parsing["output.duplicates"] else []
    names = {key: prefix + key for key in keys}
    if parsing["output.parse"] != "none":
        names |= {PARSED: prefix + parsing["output.parsed"], PARSE_ERROR: prefix + PARSE_ERROR}
    return names


def _parsing(schema: pa.Schema) -> Settings:
    """How a part is parsed."""
    settings: Settings = json.loads((schema.metadata or {}).get(PARSING, b"null")) or NO_PARSING
    return settings


def _record(folder: Path, settings: Settings, *, whole: bool) -> None:
    path = folder / STATE_FOLDER / RECORD
    with explained(path):
        replace_json(path, {"settings": settings, "whole": whole})

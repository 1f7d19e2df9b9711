"""The form that a job's completions must have, with its files read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchrun.config import Config
from batchrun.config.structure import SAME_SCHEMA, StructureConfig
from batchrun.data.parsing import read_schema
from batchrun.data.templates import read_text
from batchrun.engine.structure import StructuredOutputs
from batchrun.errors import InputError


def job_form(config: Config) -> StructuredOutputs | None:
    """What section `structure` asks for; None if nothing.

    Raises InputError, naming the setting, for a file that cannot be read or a form that llguidance cannot use.
    """
    structure = config.structure
    if not structure.given:
        return None
    (name,) = structure.given
    given = {name: _read(config, name)}
    try:
        form = _form(structure, given)
        form.compiled()
    except ValueError as error:
        raise InputError(f"structure.{error}") from error
    return form


def row_form(structure: StructureConfig, own: Mapping[str, Any]) -> StructuredOutputs | None:
    """What a row's own parameters, as `parse_params` returns them, ask for; None if nothing."""
    given = own.get("structured_outputs")
    return _form(structure, given) if given else None


def _form(structure: StructureConfig, given: Mapping[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(**given, any_whitespace=structure.any_whitespace, fast_forward=structure.fast_forward)


def _read(config: Config, name: str) -> Any:
    value = getattr(config.structure, name)
    if name == "json":
        if value != SAME_SCHEMA:
            return read_schema(value, "structure.json")
        if config.output.schema is None:
            raise InputError("structure.json=output.schema: there is no output.schema; set it, or name a schema here")
        return read_schema(config.output.schema)
    # Every rule of a grammar has a colon.
    if name == "grammar" and ":" not in value:
        return read_text("structure.grammar", value, [Path.cwd()])
    return value

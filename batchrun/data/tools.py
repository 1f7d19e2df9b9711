"""Schemas of the functions that a model is told of, for its chat template to show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchrun.data.messages import is_list, is_text, storage_type
from batchrun.data.templates import read_text
from batchrun.data.values import is_blank, without_nulls
from batchrun.errors import InputError

Tools = list[dict[str, Any]]


def job_tools(given: Any, folders: Sequence[Path]) -> Tools | None:
    """The tools of `prompt.tools`: a list, JSON text of one, or a file with one. Raises InputError."""
    if given is None:
        return None
    if isinstance(given, str) and not given.lstrip().startswith("["):
        given = read_text("prompt.tools", given, folders)
    try:
        return parse_tools(given)
    except ValueError as error:
        raise InputError(f"prompt.tools: {error}") from error


def is_tools_type(type: pa.DataType) -> bool:
    """Whether a column can hold tools: JSON text of a list, a list of such texts, or a list of structs."""
    type = storage_type(type)
    if not is_list(type):
        return is_text(type)
    inner = storage_type(type.value_type)
    return is_text(inner) or pa.types.is_struct(inner)


def parse_tools(value: Any) -> Tools | None:
    """The tools of one row, None if it has none. Raises ValueError saying what is wrong."""
    value = _from_json(value)
    if is_blank(value):
        return None
    if not isinstance(value, list):
        raise ValueError(f"not a list of tools but {type(value).__name__}")
    tools = [without_nulls(_from_json(tool)) for tool in value]
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ValueError(f"tool {number} is not an object with the schema of a function but {type(tool).__name__}")
    return tools


def _from_json(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error

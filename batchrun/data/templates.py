"""Jinja2 templates over the columns of a row, checked against the schema before a model is loaded."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes

from batchrun.data.schemas import column_list
from batchrun.errors import InputError

WHOLE_ROW = "row"


def _finalize(value: Any) -> Any:
    """What `{{ value }}` shows: nothing for null, ISO 8601 for dates and times."""
    if value is None:
        return ""
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return value


def _json_default(value: Any) -> str:
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON for a prompt, not for a web page: characters stay as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_json_default)


def _find(value: Any, pattern: str) -> str:
    """The first match of a regular expression, or of its first group; nothing if there is none."""
    match = re.search(pattern, str(_finalize(value)))
    return "" if match is None else (match[1] if match.re.groups else match[0]) or ""


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, finalize=_finalize, keep_trailing_newline=False, autoescape=False
    )
    environment.filters["tojson"] = _tojson
    environment.filters["find"] = _find
    return environment


ENVIRONMENT = _environment()


class Template:
    """A compiled template of one setting.

    Variables are columns, and those of `variables` of which no column has the name; `row` is the whole row, for names
    that are no identifiers: `{{ row["review text"] }}`. `columns` are those it needs, in schema order, and `used` the
    variables. Raises InputError, naming the setting, for a syntax error, a name that is not a column, and includes or
    imports (whose text would be outside the fingerprint).
    """

    def __init__(
        self, key: str, text: str, names: Sequence[str], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.key = key
        self.text = text
        try:
            tree = ENVIRONMENT.parse(text)
            self._template = ENVIRONMENT.from_string(text)
            # Jinja copies the globals for each row, and a ChainMap, which they are, takes longer than all the rest.
            self._template.globals = dict(self._template.globals) | dict(variables)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"{key}, line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError, MemoryError) as error:  # of the Python that Jinja makes of it
            raise InputError(f"{key} is nested too deeply: {getattr(error, 'msg', error)}") from error
        if any(True for _ in jinja2.meta.find_referenced_templates(tree)):
            raise InputError(f"{key} includes or imports another template: put the whole text in one template")
        self.whole_row = False
        self.used = (jinja2.meta.find_undeclared_variables(tree) & set(variables)) - set(names)
        self.columns = self._needed(tree, names)

    def _needed(self, tree: nodes.Template, names: Sequence[str]) -> list[str]:
        variables = jinja2.meta.find_undeclared_variables(tree) - self.used
        if WHOLE_ROW in variables and WHOLE_ROW not in names:
            self.whole_row = True
            variables.remove(WHOLE_ROW)
            variables |= _row_items(tree, names)
        unknown = sorted(variables - set(names))
        if unknown:
            raise InputError(f"{self.key} uses {', '.join(unknown)}, and there is no such column: {column_list(names)}")
        return [name for name in names if name in variables]

    def render(self, row: Mapping[str, Any]) -> str:
        """Raises whatever the template raises for this row."""
        return self._template.render(row, row=row) if self.whole_row else self._template.render(row)


def _row_items(tree: nodes.Template, names: Sequence[str]) -> set[str]:
    """Columns that the template takes from `row`: the named ones, and all if `row` is used in any other way."""
    items: set[str] = set()
    named = 0
    taken: list[Any] = [node.attr for node in tree.find_all(nodes.Getattr) if _is_row(node.node)]
    taken += [getattr(node.arg, "value", None) for node in tree.find_all(nodes.Getitem) if _is_row(node.node)]
    for name in taken:
        if isinstance(name, str) and (name in names or not hasattr(dict, name)):
            items.add(name)
            named += 1
    mentions = sum(_is_row(node) for node in tree.find_all(nodes.Name))
    return items if mentions == named else items | set(names)


def _is_row(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == WHOLE_ROW


def read_text(key: str, path: str, folders: Sequence[Path]) -> str:
    """Text of a file that a setting names: looked up in `folders`, then as a path. Raises InputError."""
    tried = [folder / path for folder in folders] + [Path(path).expanduser()]
    for candidate in tried:
        if candidate.is_file():
            try:
                return candidate.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{key}={path}: cannot read {candidate} as UTF-8 text: {error}") from error
    where = ", ".join(str(candidate.absolute()) for candidate in tried)
    raise InputError(f"{key}={path} is not a file; looked for {where}")

"""Columns that are made of an output row's other columns: texts by template, and marks on equal completions."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from batchrun.config import OutputConfig
from batchrun.data.chat import reason
from batchrun.data.templates import Template
from batchrun.data.values import clean_text, to_python

DERIVED_ERROR = "derived_error"
DUPLICATE_OF = "duplicate_of"
SOURCE_ROW, SAMPLE = "source_row", "sample"
MOST_CHARS = 300  # of a reason

Settings = dict[str, Any]
NOTHING_DERIVED: Settings = {"output.derived": {}, "output.duplicates": False}


class Derived:
    """What `output.derived` and `output.duplicates` add to the rows of a part.

    `types` are the columns, by key, in their order: none where nothing is asked for. `settings` are what they follow
    from.
    """

    def __init__(self, config: OutputConfig) -> None:
        self.settings: Settings = {"output.derived": dict(config.derived), "output.duplicates": config.duplicates}
        self.types: dict[str, pa.DataType] = {}
        if config.derived:
            self.types |= dict.fromkeys([*config.derived, DERIVED_ERROR], pa.string())
        if config.duplicates:
            self.types[DUPLICATE_OF] = pa.struct({SOURCE_ROW: pa.int64(), SAMPLE: pa.int32()})

    def templates(self, names: Sequence[str]) -> dict[str, Template]:
        """By column, what makes its texts of columns called `names`. Raises InputError for one that cannot."""
        given: dict[str, str] = self.settings["output.derived"]
        return {name: Template(f"output.derived.{name}", text, names) for name, text in given.items()}

    def columns(self, part: pa.Table, completion: str, prefix: str) -> dict[str, pa.Array]:
        """The columns, by key, for a part without them whose completions are in column `completion`."""
        texts = part[completion].to_pylist()
        values: dict[str, list[Any]] = {}
        if templates := self.templates(part.column_names):
            needed = {name for template in templates.values() for name in template.columns}
            columns = {name: to_python(part[name].combine_chunks()) for name in needed}
            rows = [{name: column[at] for name, column in columns.items()} for at in range(len(part))]
            made = [_texts(templates, row) if text is not None else {} for row, text in zip(rows, texts, strict=True)]
            values = {key: [row.get(key) for row in made] for key in (*templates, DERIVED_ERROR)}
        if DUPLICATE_OF in self.types:
            numbers = part[prefix + SOURCE_ROW].to_pylist()
            sampled = prefix + SAMPLE in part.column_names
            samples = part[prefix + SAMPLE].to_pylist() if sampled else [0] * len(part)
            values[DUPLICATE_OF] = _duplicates(texts, numbers, samples)
        return {key: pa.array(values[key], type) for key, type in self.types.items()}


def normalised(text: str) -> str:
    """What texts have in common that count as equal: letters and digits, in lower case, one space between words."""
    letters = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(c if c.isalnum() else " " for c in letters).split())


def _texts(templates: dict[str, Template], row: dict[str, Any]) -> dict[str, str | None]:
    """A row's texts, null for those that are blank, and why the first that could not be made is none."""
    made: dict[str, str | None] = {}
    for name, template in templates.items():
        try:
            made[name] = clean_text(template.render(row)).strip() or None
        except Exception as error:
            made.setdefault(DERIVED_ERROR, clean_text(f"{name}: {reason(error)}")[:MOST_CHARS])
    return made


def _duplicates(
    texts: Sequence[str | None], numbers: Sequence[int], samples: Sequence[int]
) -> list[dict[str, int] | None]:
    """For each text the place of the first one before it that is equal to it, if there is one."""
    first: dict[str, dict[str, int]] = {}
    found: list[dict[str, int] | None] = []
    for text, number, sample in zip(texts, numbers, samples, strict=True):
        here = {SOURCE_ROW: number, SAMPLE: sample}
        before = here if text is None else first.setdefault(normalised(text), here)
        found.append(None if before is here else before)
    return found

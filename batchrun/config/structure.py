"""The form that completions must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchrun.config.base import setting, strings
from batchrun.errors import ConfigError

FORMS = ("json", "regex", "choice", "grammar", "json_object")
SAME_SCHEMA = "output.schema"  # as the value of structure.json: one schema for what is generated and for its columns


@dataclass
class StructureConfig:
    """The form of completions, at most one of json, regex, choice, grammar and json_object: see docs/structure.md."""

    json: Any = setting(
        None, "a JSON Schema that completions follow: a file, inline, or output.schema for that one", identity=True
    )
    regex: str | None = setting(None, "a regular expression that the whole completion matches", identity=True)
    choice: Any = setting(None, "a list of texts, one of which is the completion", identity=True)
    grammar: str | None = setting(None, "a grammar in Lark or GBNF: its text, or a file", identity=True)
    json_object: bool = setting(False, "completions are JSON objects of any kind", identity=True)
    any_whitespace: bool = setting(
        False, "JSON may have whitespace wherever it is allowed, not just one space after , and :", identity=True
    )
    fast_forward: bool = setting(
        True, "take tokens that the form leaves no choice about without asking the model", identity=True
    )

    def __post_init__(self) -> None:
        if self.json is not None and not (isinstance(self.json, Mapping) or (isinstance(self.json, str) and self.json)):
            raise ConfigError(f"structure.json={self.json!r} must be a JSON Schema, or a file with one")
        if self.choice is not None:
            self.choice = strings("structure.choice", self.choice)
            if not self.choice:
                raise ConfigError("structure.choice=[] leaves nothing to choose: name texts, or set it to null")
        if len(given := self.given) > 1:
            raise ConfigError(f"structure takes one form, and {' and '.join(given)} are set: set the others to null")

    @property
    def given(self) -> list[str]:
        """The forms that are set: one or none."""
        return [name for name in FORMS if getattr(self, name) not in (None, False)]

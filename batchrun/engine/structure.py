"""What the text of a completion must be: a JSON value, a regular expression, one of some choices, a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer, grammar_from

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# JSON on one line as Python writes it, and most texts that models have read.
SPACED: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_WHITESPACE: JsonCompileOptions = {"whitespace_flexible": True}


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one form that a completion has. Names follow vLLM.

    Raises ValueError for none or several of them, and for a schema or choices that are none.
    """

    json: str | Mapping[str, Any] | None = None  # a JSON Schema, or its text; kept as text
    regex: str | None = None  # in the syntax of Rust's crate regex, for the whole text
    choice: Sequence[str] | None = None  # kept as a tuple
    grammar: str | None = None  # Lark as llguidance reads it, or GBNF
    json_object: bool = False  # any JSON object
    any_whitespace: bool = False  # JSON may have whitespace wherever it is allowed; else one space after , and :
    fast_forward: bool = True  # take tokens that the form leaves no choice about without asking the model

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}: {', '.join(given) or 'none'}"
            )
        for kind in ("regex", "grammar"):
            if not isinstance(getattr(self, kind), str | None):
                raise ValueError(f"{kind}={getattr(self, kind)!r} is not text")
        for flag in ("json_object", "any_whitespace", "fast_forward"):
            if not isinstance(getattr(self, flag), bool):
                raise ValueError(f"{flag}={getattr(self, flag)!r} is not True or False")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    def compiled(self) -> str:
        """The form as a grammar of llguidance. Raises ValueError with llguidance's message and the place it means."""
        grammar = self._grammar()
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        if failed:
            where = _place(json.loads(str(self.json)), messages[0]) if self.json is not None else None
            raise ValueError(f"{self.kind} cannot be used: {messages[0].strip()}{f' (at {where})' if where else ''}")
        # Some grammars are well formed and stand for no text: that shows where the first character is asked for.
        matcher = LLMatcher(_characters(), grammar, log_level=0)
        matcher.compute_logit_bias()
        if matcher.is_error():
            raise ValueError(f"{self.kind} cannot be used: {plain_error(matcher.get_error())}")
        return grammar

    def _grammar(self) -> str:
        if self.json is not None or self.json_object:
            schema = str(self.json or '{"type": "object"}')
            # Not as defaults: a schema from elsewhere has no say in it.
            return LLMatcher.grammar_from_json_schema(
                schema, overrides=ANY_WHITESPACE if self.any_whitespace else SPACED
            )
        if self.choice is not None:
            quoted = [json.dumps(text, ensure_ascii=False) for text in self.choice]
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(quoted)}")
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        return grammar_from("grammar", str(self.grammar))


def plain_error(message: str) -> str:
    """An error of llguidance without the state of its parser, which has times in it and differs from run to run."""
    message = message.partition("\n<state>")[0].strip()
    return "there is no text of this form" if message == "NoExtensionBias" else message


@cache
def _characters() -> LLTokenizer:
    return LLTokenizer("byte")


def _schema_text(schema: Any) -> str:
    """JSON text in one line. Properties stay in their order, which is the order they are generated in."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"json is not a JSON Schema but text that is not JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise ValueError(f"json is not a JSON Schema: {str(schema)[:60]}")
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _choices(choice: Any) -> tuple[str, ...]:
    texts = () if isinstance(choice, str) or not isinstance(choice, Iterable) else tuple(choice)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"choice={choice!r} must be a list of one or more non-empty strings")
    return tuple(dict.fromkeys(texts))


def _place(schema: Any, message: str) -> str | None:
    """The JSON path of the first part of a schema that a message of llguidance is about, if it can be told."""
    keys = re.findall(r'"([^"]+)"', message) if message.startswith("Unimplemented keys") else []
    for path, part in _parts(schema, "$"):
        if not isinstance(part, Mapping):
            continue
        values = [str(part.get(key, "")).removeprefix("#") for key in ("type", "format", "pattern", "$ref")]
        if keys and all(key in part for key in keys):
            return path
        if not keys and any(value and value in message for value in values):
            return path
    return None


def _parts(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, schema
    if isinstance(schema, (Mapping, list)):
        pairs = schema.items() if isinstance(schema, Mapping) else enumerate(schema)
        for key, part in pairs:
            yield from _parts(part, f"{path}[{key}]" if isinstance(schema, list) else f"{path}.{key}")

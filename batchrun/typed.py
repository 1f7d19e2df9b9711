"""One value as it was typed on the command line, as Hydra's grammar must see it: by the type of its setting.

Everything is a function of its arguments: nothing is read and nothing is imported from Hydra.
"""

from __future__ import annotations

import os
import re
import typing
from typing import Any

from batchrun.errors import ConfigError

# A setting with names of its own stands here for the values of these.
PATH_KEYS = frozenset(
    {
        "model.path",
        "model.tokenizer",
        "model.adapter",
        "model.adapters",
        "input.path",
        "output.path",
        "output.merge_path",
        "output.schema",
        "prompt.template_file",
        "prompt.tools",
        "structure.json",
        "structure.grammar",
        "bench.python",
        "bench.models",
    }
)
TEXT_KEYS = frozenset(
    {
        "prompt.template",
        "prompt.prompts",
        "prompt.turns",
        "prompt.variables",
        "prompt.system",
        "prompt.prefill",
        "prompt.chat_template",
        "score.continuation",
        "rank.query",
        "rank.text",
        "choose.delimiter",
        "output.derived",
        "sampling.stop",
        "sampling.bad_words",
        "input.delimiter",
    }
)
# Text too, but a backslash is its own, or has no meaning there.
PATTERN_KEYS = frozenset({"structure.regex", "structure.choice", "choose.labels", "input.filter"})
QUOTED = re.compile(r"""(['"])((?:\\.|(?!\1).)*)\1""", re.DOTALL)
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
SWITCHES = dict.fromkeys(("true", "yes", "on", "1"), "true") | dict.fromkeys(("false", "no", "off", "0"), "false")


def quote(key: str, value: str, hint: Any, *, optional: bool) -> str:
    """The value of a setting of type `hint`, which may be null if it is `optional`. Raises ConfigError."""
    kind = typing.get_origin(hint) or hint
    if value == "null":
        if not optional:
            empty = {list: "; [] empties it", dict: "; {} empties it"}.get(kind, ", and null is none")
            raise ConfigError(f"{key}=null: this setting always has a value{empty}")
        return value
    if hint is str:
        return encode(_text(key, value))
    if hint is Any:
        return _quote_list(key, value) if _is_list(value) else encode(_text(key, value))
    if value.startswith("${"):
        return value
    if kind is list:
        return _list(key, value, typing.get_args(hint)[0])
    return {int: _whole_number, float: _number, bool: _switch, dict: _mapping}[kind](key, value)


def quote_named(parent: str, key: str, value: str, hint: Any) -> str:
    """The value, of type `hint`, of a name `key` in the setting `parent`. Raises ConfigError."""
    if hint is float:
        return _number(key, value)
    structure = value.startswith("[") or (value.startswith("{") and not value.startswith(("{{", "{%", "{#")))
    if hint is Any and (structure or value in ("null", "true", "false") or NUMBER.fullmatch(value)):
        return value
    return encode(_text(parent, value))


def _list(key: str, value: str, item: Any) -> str:
    if item is str:
        return _quote_list(key, value if _is_list(value) else f"[{encode(decode(value))}]")
    if item is int:
        items = split_list(value) if _is_list(value) else value.split(",")
        return f"[{','.join(_whole_number(key, item.strip()) for item in items)}]"
    if not _is_list(value):
        raise ConfigError(f"{key}={value} is not a list: write [{{a: 1, b: 2}}, ...]")
    return value


def _whole_number(key: str, value: str) -> str:
    plain = value.replace("_", "")
    try:
        if re.fullmatch(r"[+-]?\d+", plain):
            return str(int(plain))
        if (number := float(plain)).is_integer():
            return str(int(number))
    except (ValueError, OverflowError):
        pass
    raise ConfigError(f"{key}={value:.60} is not a whole number: write it as 1000000, 1_000_000 or 1e6")


def _number(key: str, value: str) -> str:
    try:
        return repr(float(value))
    except ValueError:
        raise ConfigError(f"{key}={value} is not a number") from None


def _switch(key: str, value: str) -> str:
    if value.lower() not in SWITCHES:
        raise ConfigError(f"{key}={value} is neither true nor false")
    return SWITCHES[value.lower()]


def _mapping(key: str, value: str) -> str:
    if not value.startswith("{"):
        raise ConfigError(f"{key}={value} is not a mapping: write {key}.NAME=VALUE, or {key}={{NAME: VALUE}}")
    return value


def _is_list(value: str) -> bool:
    return value.startswith("[") and value.endswith("]")


def _quote_list(key: str, value: str) -> str:
    return f"[{','.join(encode(_text(key, item)) for item in split_list(value))}]"


def split_list(value: str) -> list[str]:
    """The elements of `[a, b]`, split at commas outside quotes and outside braces or brackets of a glob."""
    inner = value[1:-1]
    items, depth, start, i = [], 0, 0, 0
    while i < len(inner):
        quoted = QUOTED.match(inner, i) if inner[i] in "'\"" and not inner[start:i].strip() else None
        if quoted is None and inner[i] == "," and depth == 0:
            items.append(inner[start:i])
            start = i + 1
        depth += (inner[i] in "[{") - (inner[i] in "]}")
        i = quoted.end() if quoted else i + 1
    items = [item.strip() for item in [*items, inner[start:]]]
    return [] if items == [""] else items


def _text(key: str, value: str) -> str:
    """What the string means: quotes of Hydra's kind taken off, ~ or escapes expanded, by the key."""
    text = decode(value)
    if key in PATH_KEYS:
        return os.path.expanduser(text)
    if key in TEXT_KEYS:
        text = unescape(text)
    return literal(text) if key in TEXT_KEYS | PATTERN_KEYS else text


def decode(value: str) -> str:
    """A value in quotes without them; any other value as it is."""
    match = QUOTED.fullmatch(value)
    if match is None:
        return value
    quote, inner = match[1], match[2]
    return re.sub(rf"(\\+)(?={quote}|\Z)", lambda run: "\\" * (len(run[1]) // 2), inner)


def encode(text: str) -> str:
    """The text in single quotes, as Hydra's grammar reads it back: a backslash counts before a quote only."""
    doubled = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{doubled}'"


def unescape(text: str) -> str:
    r"""The text with \n, \t, \r and \\ replaced by the characters they stand for."""
    characters = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda m: characters[m[1]], text)


def literal(text: str) -> str:
    """The text with `${` escaped, so that OmegaConf does not take it for an interpolation."""
    return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + "\\${", text)

"""The command line's `key=value` pairs, rewritten so that Hydra's grammar reads them as they were meant.

Hydra gives meaning to `=`, `,`, `{}`, `[]`, `#`, quotes and more inside a value, so a glob, a Hive path or a
template cannot be typed plainly. The schema says which keys hold strings: their values are quoted, unless they
already are. Everything is a function of its arguments: nothing is read and nothing is imported from Hydra.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from batchrun.config import Config
from batchrun.errors import ConfigError
from batchrun.typed import quote, quote_named

GROUPS = ("model", "engine", "sampling", "prompt", "input", "output", "launch", "bench")
PROMPT_SOURCES = ("prompt.template", "prompt.template_file", "prompt.messages", "prompt.prompt_ids")
SEVERAL_PROMPTS = "prompt.prompts"  # another source, a setting for each of its names
GROUP_KEYS = {"input": "input.path", "output": "output.path"}

# Names used elsewhere for what has another name here.
OTHER_NAMES = {
    "max_rows": "input.limit",
    "max_samples": "input.limit",
    "num_rows": "input.limit",
    "max_new_tokens": "sampling.max_tokens",
    "max_length": "model.max_model_len",
    "batch_size": "engine.max_num_seqs",
    "max_batch_size": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_batched_tokens",
    "enable_prefix_caching": "engine.prefix_caching",
    "stop_strings": "sampling.stop",
    "model_name": "model.path",
    "system_prompt": "prompt.system",
    "dataset": "input.path",
}


class Override(NamedTuple):
    """One `key=value` as typed, without Hydra's leading + or ++."""

    key: str
    value: str


def leaf_types(schema: type = Config, prefix: str = "") -> dict[str, Any]:
    """The type of every setting by its dotted key."""
    hints = typing.get_type_hints(schema)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        hint, key = hints[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            found |= leaf_types(typing.cast(type, hint), f"{key}.")
            continue
        found[key] = hint
    return found


def _value_type(hint: Any) -> Any:
    """X of `X | None`; any other type as it is."""
    return next(arm for arm in typing.get_args(hint) if arm is not type(None)) if _is_optional(hint) else hint


def _is_optional(hint: Any) -> bool:
    return isinstance(hint, types.UnionType)


_TYPES = leaf_types()
LEAVES = {key: _value_type(hint) for key, hint in _TYPES.items()}
OPTIONAL = {key for key, hint in _TYPES.items() if hint is Any or _is_optional(hint)}


def translate(arguments: Iterable[str], options: Mapping[str, Sequence[str]]) -> list[str]:
    """Overrides for Hydra's compose, from the words of the command line.

    `options` maps `job` and each group to the names it may have. A source of the prompt replaces the job's
    own source, so `job=annotate prompt.template=...` needs no `prompt.template_file=null` beside it; so do the
    messages of an OpenAI batch file.
    Raises ConfigError for what is not `key=value`, an unknown key or job, and a value of the wrong kind.
    """
    pairs = [_split(argument, options) for argument in arguments]
    found = [_translate(pair, options) for pair in pairs]
    given = {pair.key: pair.value for pair in pairs if _is_source(pair)}
    if not given and any(pair in (Override("input", "openai"), Override("input.format", "openai")) for pair in pairs):
        given["prompt.messages"] = "messages"
        found.append("prompt.messages=messages")
    if any(value != "null" for value in given.values()):
        found += [f"{key}=null" for key in PROMPT_SOURCES if key not in given]
    return found


def emptied(arguments: Iterable[str]) -> dict[str, set[str]]:
    """Settings with names of their own that are to lose those which files have, and the names that were typed.

    They are those that are typed as `{}`, and the several prompts if another source of the prompt is typed.
    """
    pairs = [Override(key.lstrip("+").strip(), value) for key, _, value in (word.partition("=") for word in arguments)]
    keys = {key for key, value in pairs if value.strip() == "{}" and typing.get_origin(LEAVES.get(key)) is dict}
    sources = {key for key, value in pairs if key in PROMPT_SOURCES and value != "null"}
    if sources or Override("input", "openai") in pairs or Override("input.format", "openai") in pairs:
        keys.add(SEVERAL_PROMPTS)
    return {
        parent: {key.removeprefix(f"{parent}.") for key, _ in pairs if key.startswith(f"{parent}.")} for parent in keys
    }


def _is_source(pair: Override) -> bool:
    several = pair.key == SEVERAL_PROMPTS and pair.value.strip() != "{}"
    return pair.key in PROMPT_SOURCES or several or pair.key.startswith(f"{SEVERAL_PROMPTS}.")


def _split(argument: str, options: Mapping[str, Sequence[str]]) -> Override:
    match = re.fullmatch(r"(?:\+\+?)?([^=~+]+)=(.*)", argument, re.DOTALL)
    if match is None:
        hint = f": did you mean job={argument}?" if argument in options.get("job", ()) else ", e.g. input.limit=100"
        if argument.startswith("~"):
            hint = ": a setting cannot be removed; set it to null or to another value"
        raise ConfigError(f"{argument!r} is not KEY=VALUE{hint}")
    return Override(match[1].strip(), match[2])


def _translate(pair: Override, options: Mapping[str, Sequence[str]]) -> str:
    key, value = pair
    if key == "job" or key in GROUPS:
        return _choose(key, value, options.get(key, ()))
    if key in LEAVES:
        added = "++" if typing.get_origin(LEAVES[key]) is dict else ""
        return f"{added}{key}={quote(key, value, LEAVES[key], optional=key in OPTIONAL)}"
    for parent, hint in LEAVES.items():
        if typing.get_origin(hint) is dict and key.startswith(f"{parent}."):
            return f"++{key}={quote_named(parent, key, value, typing.get_args(hint)[1])}"
    raise ConfigError(f"there is no setting {key!r}{suggest(key) or '; `batchrun --keys` lists all of them'}")


def _choose(group: str, value: str, options: Sequence[str]) -> str:
    """One option of a group; `model=` takes a folder or hub id as well."""
    if value in options:
        return f"{group}={value}"
    if group == "model" and value:
        return f"model.path={quote('model.path', value, str, optional=True)}"
    nearest = difflib.get_close_matches(value, options, 1)
    hint = f"; did you mean {group}={nearest[0]}?" if nearest else ""
    if group in GROUP_KEYS:
        hint = f"; a file or folder is given as {GROUP_KEYS[group]}={value}"
    elif group == "job" and ("/" in value or value.endswith((".yaml", ".yml"))):
        hint = "; a job of your own in DIR/job/NAME.yaml is run with --config-dir DIR job=NAME"
    raise ConfigError(f"{group}={value} is not one of {', '.join(sorted(options))}{hint}")


def suggest(key: str) -> str:
    """`: did you mean ...?` with the nearest key of the schema, or nothing."""
    known = [*LEAVES, "job", *GROUPS]
    name = key.rpartition(".")[2]
    by_name = {leaf.rpartition(".")[2]: leaf for leaf in reversed(known)}
    guess = OTHER_NAMES.get(name) or by_name.get(name)
    if guess is None and (near := difflib.get_close_matches(key, known, 1, 0.75)):
        guess = near[0]
    if guess is None and (near := difflib.get_close_matches(name, by_name, 1, 0.7)):
        guess = by_name[near[0]]
    return f": did you mean {guess}?" if guess and guess != key else ""

"""Calls of tools, told from the rest of a completion by the format in which the model's family writes them.

- `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call: Hermes, Qwen 2.5 and 3,
  SmolLM 3, Granite 4 and others.
- `llama3_json`: nothing but `{"name": ..., "parameters": {...}}`, which `<|python_tag|>` may open and `;` parts from
  another: Llama 3.1 to 3.3.
- `mistral`: `[TOOL_CALLS]` with a list of `{"name": ..., "arguments": {...}}`, or, as newer tokenizers have it, before
  each call of `name{...}`, `name[ARGS]{...}` or `name[CALL_ID]id[ARGS]{...}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

# The marker of each format, and which text of a chat template says that a model has it.
MARKERS = {"hermes": "<tool_call>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
KNOWN = {
    "mistral": "[TOOL_CALLS]",
    "hermes": "<tool_call>",
    "llama3_json": '"parameters": dictionary of argument name',
}
OTHERS = ("<function=", "<arg_key>")  # formats of other families inside the marker of hermes
FORMATS = tuple(MARKERS)
CLOSING = "</tool_call>"
MOST_CHARS = 300  # of a reason
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?")
_LOOKS_CALLED = re.compile(r'\{\s*"name"\s*:')


class ToolCall(NamedTuple):
    """A function that the model wants called."""

    name: str
    arguments: str  # JSON text of an object


class Answer(NamedTuple):
    """What a completion says beside its calls, and these; the whole text and the reason where they cannot be read."""

    text: str
    calls: list[ToolCall] | None  # None: they cannot be read
    error: str | None = None


def known_format(chat_template: Any) -> str | None:
    """The format that a chat template speaks of, if it is text that speaks of a known one."""
    text = chat_template if isinstance(chat_template, str) else ""
    found = next((name for name, marker in KNOWN.items() if marker in text), None)
    return None if found == "hermes" and any(marker in text for marker in OTHERS) else found


def special_texts(tokenizer: Any) -> list[str]:
    """Texts of the tokens that a transformers tokenizer leaves out with skip_special_tokens."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def split_calls(text: str, format: str, finish_reason: str | None = "stop") -> Answer:
    """The calls in a completion with its special tokens. Nothing is repaired: one that is broken leaves none."""
    try:
        rest, calls = _READERS[format](text)
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else "nested too deeply"
        cut = "" if finish_reason in ("stop", None) else f"the completion ended by {finish_reason}: "
        return Answer(text, None, f"{cut}{why}"[:MOST_CHARS])
    return Answer(rest.strip() if calls else text, calls)


def read_calls(text: str, format: str | None, finish_reason: str | None = "stop") -> list[ToolCall]:
    """The calls alone. Raises ValueError for those that cannot be read, and without a format."""
    if format is None:
        raise ValueError(f"how this model calls tools is not known: set tool_format to one of {', '.join(FORMATS)}")
    answer = split_calls(text, format, finish_reason)
    if answer.calls is None:
        raise ValueError(answer.error)
    return answer.calls


def _hermes(text: str) -> tuple[str, list[ToolCall]]:
    marker, calls, rest, at = MARKERS["hermes"], list[ToolCall](), "", 0
    while (begin := text.find(marker, at)) >= 0:
        rest += text[at:begin]
        value, at = _value(text, begin + len(marker))
        calls.append(_call(value, "arguments"))
        if text.startswith(CLOSING, at):
            at += len(CLOSING)
        elif at < len(text) and not text.startswith(marker, at):
            raise ValueError(f"{text[at : at + 20]!r} follows a call in place of {CLOSING}")
    return rest + text[at:], calls


def _llama(text: str) -> tuple[str, list[ToolCall]]:
    rest, marker, body = text.rpartition(MARKERS["llama3_json"])
    if not marker and not _LOOKS_CALLED.match(body.lstrip()):
        return text, []
    calls, at = list[ToolCall](), 0
    while True:
        value, at = _value(body, at)
        if not marker and not calls and not {"parameters", "arguments"} & value.keys():
            return text, []  # an answer that is JSON
        calls.append(_call(value, "parameters" if "parameters" in value else "arguments"))
        if not body.startswith(";", at):
            return rest + body[at:], calls
        at += 1


def _mistral(text: str) -> tuple[str, list[ToolCall]]:
    marker = MARKERS["mistral"]
    rest, found, body = text.partition(marker)
    if not found:
        return text, []
    if body.lstrip().startswith("["):
        value, at = _value(body, 0, list)
        return rest + body[at:], [_call(each, "arguments") for each in value]
    calls, at = list[ToolCall](), 0
    while True:
        name = _NAMED.match(body, at)
        if name is None:
            raise ValueError(f"{body[at : at + 20]!r} is not the name of a tool")
        value, at = _value(body, name.end())
        calls.append(ToolCall(name[1], _text(value)))
        if not body.startswith(marker, at):
            return rest + body[at:], calls
        at += len(marker)


_READERS: dict[str, Callable[[str], tuple[str, list[ToolCall]]]] = {
    "hermes": _hermes,
    "llama3_json": _llama,
    "mistral": _mistral,
}


def _value(text: str, at: int, kind: type = dict) -> tuple[Any, int]:
    """The JSON object, or list, at this place behind space, and where what is no space goes on after it."""
    at = _past_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise ValueError(f"a call is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"a call is {text[at:end][:40]}, which is no JSON {'object' if kind is dict else 'list'}")
    return value, _past_space(text, end)


def _past_space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip()) if at < len(text) else at


def _call(value: Any, key: str) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"a call has no name: {_text(value)[:60]}")
    if not isinstance(value.get(key), dict):
        raise ValueError(f"the {key} of the call of {name[:40]} are no JSON object")
    return ToolCall(name, _text(value[key]))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> Any:
    raise ValueError(f"a call is not JSON: {name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)

"""Chat messages that come with the rows, in a column: its Arrow type, and the check of each value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from batchrun.data.values import is_blank, without_nulls

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SYSTEM_ROLES = ("system", "developer")

Message = dict[str, Any]


class NoMessages(ValueError):
    """There is not one."""


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def is_messages_type(type: pa.DataType) -> bool:
    """Whether a column can hold messages: a list of structs with role and content, or JSON text of such a list."""
    type = storage_type(type)
    if is_text(type):
        return True
    if not is_list(type):
        return False
    value = storage_type(type.value_type)
    return pa.types.is_struct(value) and {"role", "content"} <= {field.name for field in value}


def storage_type(type: pa.DataType) -> pa.DataType:
    """The type below an extension or a dictionary."""
    if isinstance(type, pa.BaseExtensionType):
        return storage_type(type.storage_type)
    return type.value_type if isinstance(type, pa.DictionaryType) else type


def is_text(type: pa.DataType) -> bool:
    return pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type)


def is_list(type: pa.DataType) -> bool:
    return pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type)


def parse_messages(value: Any) -> list[Message]:
    """The messages of one row: at least one, each with a known role and content, keys without value left out.

    Raises ValueError saying what is wrong, NoMessages where nothing is but that there is none.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
    if is_blank(value):
        raise NoMessages("null" if value is None else "no messages")
    if not isinstance(value, list):
        raise ValueError(f"not a list of messages but {type(value).__name__}")
    return [_parse_message(number, message) for number, message in enumerate(value)]


def is_empty(message: Message) -> bool:
    """Whether a message says nothing. What the system says is nothing by itself."""
    return message["role"] in SYSTEM_ROLES or (is_blank(message.get("content")) and not message.get("tool_calls"))


def longest_turn(messages: Sequence[Message]) -> Message | None:
    """Which message to cut when a conversation is too long: the user's longest that is text, the last of equals."""
    turns = [m for m in messages if m["role"] == "user" and isinstance(m.get("content"), str)]
    return max(reversed(turns), key=lambda turn: len(turn["content"]), default=None)


def _parse_message(number: int, message: Any) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is not an object with role and content")
    present = {key: item for key, item in message.items() if item is not None}
    if present.get("tool_calls"):
        present["tool_calls"] = _parse_calls(number, present["tool_calls"])
        if "content" in message:
            present.setdefault("content", None)  # templates tell it from no content
    role = present.get("role")
    if role not in ROLES:
        raise ValueError(f"message {number} has role {role!r}; it must be one of {', '.join(ROLES)}")
    if "content" not in present and not present.get("tool_calls"):
        raise ValueError(f"message {number} ({role}) has no content")
    if not isinstance(present.get("content"), (str, list, type(None))):
        raise ValueError(f"message {number} ({role}) has content that is neither text nor a list of parts")
    return present


def _parse_calls(number: int, calls: Any) -> list[Any]:
    """The tool calls of a message. Templates want the arguments as an object, where OpenAI has JSON text of one."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"message {number} has tool_calls that are not a list of objects")
    parsed = []
    for call in without_nulls(calls):
        function = call.get("function")
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            try:
                call = {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
            except (ValueError, RecursionError) as error:
                raise ValueError(f"message {number} calls a tool with arguments that are not JSON: {error}") from error
        parsed.append(call)
    return parsed

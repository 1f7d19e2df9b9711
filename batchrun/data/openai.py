"""A line of OpenAI's batch request file as columns of a row.

The format: https://platform.openai.com/docs/api-reference/batch (the request input object).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from batchrun.data.row_params import PARAMS, STRUCTURED, TYPES, parse_params
from batchrun.data.values import clean_text

CHAT_URL = "/v1/chat/completions"
SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("method", pa.string()),
        ("url", pa.string()),
        ("model", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("params", PARAMS),
    ]
)
NO_PARAMS = ("messages", "tools", "model")
LOGPROBS = ("logprobs", "top_logprobs")
OTHER_NAMES = {"max_completion_tokens": "max_tokens"}
# What changes nothing here, whatever its value; what changes nothing with these values.
WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "n": (1,),
    "response_format": ({"type": "text"},),  # others are structured outputs
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "modalities": (["text"],),
}


def parse_request(request: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """A request as values of SCHEMA's columns, and what makes it one that cannot be answered, if anything does."""
    body = request.get("body")
    row: dict[str, Any] = {key: _text(request.get(key)) for key in ("custom_id", "method", "url")}
    if isinstance(body, dict):
        row["model"] = _text(body.get("model"))
        if body.get("messages") is not None:
            row["messages"] = clean_text(json.dumps(body["messages"], ensure_ascii=False))
        if body.get("tools") and body.get("tool_choice") != "none":
            row["tools"] = clean_text(json.dumps(body["tools"], ensure_ascii=False))
    try:
        _check_request(request)
        row["params"] = _params(request["body"])
    except ValueError as error:
        return row, clean_text(str(error))
    return row, None


def _text(value: Any) -> str | None:
    return clean_text(value) if isinstance(value, str) else None


def _check_request(request: Mapping[str, Any]) -> None:
    if not isinstance(request.get("custom_id"), str) or not request["custom_id"]:
        raise ValueError("custom_id is missing: it must be a text that no other line has")
    if request.get("method", "POST") != "POST":
        raise ValueError(f"method {request['method']!r} is not POST")
    if request.get("url") != CHAT_URL:
        raise ValueError(f"url {request.get('url')!r} is not supported: only {CHAT_URL} is")
    if not isinstance(request.get("body"), dict):
        raise ValueError("body is missing: it must be an object with messages")
    if not isinstance(request["body"].get("messages"), list):
        raise ValueError("body.messages is missing: it must be a list of objects with role and content")


def _params(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a body. Raises ValueError for those that cannot be honoured."""
    params: dict[str, Any] = {}
    for key, value in body.items():
        name = OTHER_NAMES.get(key, key)
        if key in (*NO_PARAMS, *LOGPROBS) or key in WITHOUT_EFFECT or value is None:
            continue
        if name == STRUCTURED or (name in TYPES and key not in NEUTRAL):
            params[name] = value
        elif key == "response_format" and value != {"type": "text"}:
            params[STRUCTURED] = _form(value)
        elif not any(value == neutral for neutral in NEUTRAL.get(key, ())):
            shown = json.dumps(value, ensure_ascii=False)
            raise ValueError(f"body.{key}={shown if len(shown) <= 60 else shown[:60] + '…'} is not supported")
    parsed = parse_params(params | _logprobs(*(body.get(key) for key in LOGPROBS)))
    if isinstance(parsed.get("stop"), str):
        parsed["stop"] = [parsed["stop"]]
    return parsed


def _logprobs(asked: Any, top: Any) -> dict[str, Any]:
    """Both of LOGPROBS as the row's parameter. Raises ValueError for what the API does not take."""
    if asked is not None and not isinstance(asked, bool):
        raise ValueError(f"body.logprobs={json.dumps(asked)[:60]} must be true or false; top_logprobs has the number")
    if top and not asked:
        raise ValueError(f"body.top_logprobs={json.dumps(top)[:60]} needs body.logprobs=true beside it")
    return {"logprobs": top or 0} if asked else {}


def _form(response_format: Any) -> dict[str, Any]:
    """`response_format` as the row's structured outputs. Raises ValueError for another type of it."""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "json_object":
        return {"json_object": True}
    described = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(described, Mapping) or not isinstance(described.get("schema"), Mapping):
        shown = json.dumps(response_format, ensure_ascii=False)[:60]
        raise ValueError(
            f"body.response_format={shown} is not supported: text, json_object, or json_schema with a schema"
        )
    return {"json": described["schema"]}

"""OpenAI's batch files: a line of a request file as columns, and the response file of a finished job.

The format: https://platform.openai.com/docs/api-reference/batch (request input and request output objects).
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.row_params import PARAMS, TYPES, parse_params
from batchrun.data.values import clean_text
from batchrun.errors import BatchrunError

CHAT_URL = "/v1/chat/completions"
SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("method", pa.string()),
        ("url", pa.string()),
        ("model", pa.string()),
        ("messages", pa.string()),
        ("params", PARAMS),
    ]
)
OTHER_NAMES = {"max_completion_tokens": "max_tokens"}
# What changes nothing here, whatever its value; what changes nothing with these values.
WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "modalities": (["text"],),
}
BATCH_OUTPUT = "batch_output.jsonl"
READ_ROWS = 4096


def parse_request(request: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """A request as values of SCHEMA's columns, and what makes it one that cannot be answered, if anything does."""
    body = request.get("body")
    row: dict[str, Any] = {key: _text(request.get(key)) for key in ("custom_id", "method", "url")}
    if isinstance(body, dict):
        row["model"] = _text(body.get("model"))
        if body.get("messages") is not None:
            row["messages"] = clean_text(json.dumps(body["messages"], ensure_ascii=False))
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
        if key in ("messages", "model") or key in WITHOUT_EFFECT or value is None:
            continue
        if name in TYPES:
            params[name] = value
        elif not any(value == neutral for neutral in NEUTRAL.get(key, ())):
            shown = json.dumps(value, ensure_ascii=False)
            raise ValueError(f"body.{key}={shown if len(shown) <= 60 else shown[:60] + '…'} is not supported")
    parsed = parse_params(params)
    if isinstance(parsed.get("stop"), str):
        parsed["stop"] = [parsed["stop"]]
    return parsed


def write_batch_output(
    target: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]],
    model: str,
    created: int,
    names: Mapping[str, str] | None = None,
) -> None:
    """Write the response file of a finished job: a line for each row of `parts`, in their order.

    `names` maps what a line is made of to the output's columns, where those have other names (`OutputSchema.names`);
    `created` is in seconds since 1970. The file appears whole or not at all, and is the same for the same parts.
    Raises BatchrunError if it cannot be written.
    """
    target = Path(target)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            for row in _rows(parts, names or {}):
                json.dump(_response(row, model, created), file, ensure_ascii=False)
                file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise BatchrunError(f"cannot write {target}: {error}: check the disk that holds output.path") from error
    finally:
        temporary.unlink(missing_ok=True)


def _rows(parts: Sequence[str | os.PathLike[str]], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    keys = ("completion", "finish_reason", "error_type", "error", "prompt_tokens", "cached_tokens", "completion_tokens")
    columns = {key: names.get(key, key) for key in keys} | {"custom_id": "custom_id"}
    for part in parts:
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(batch_size=READ_ROWS, columns=list(columns.values())):
                values = [batch.column(name).to_pylist() for name in columns.values()]
                yield from (dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True))


def _response(row: Mapping[str, Any], model: str, created: int) -> dict[str, Any]:
    custom_id = row["custom_id"]
    number = hashlib.sha256(f"{model}\x1f{created}\x1f{custom_id}".encode()).hexdigest()[:32]
    line: dict[str, Any] = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": None, "error": None}
    if row["error_type"] is not None:
        line["error"] = {"code": row["error_type"], "message": row["error"]}
        return line
    usage = {
        "prompt_tokens": row["prompt_tokens"],
        "completion_tokens": row["completion_tokens"],
        "total_tokens": row["prompt_tokens"] + row["completion_tokens"],
        "prompt_tokens_details": {"cached_tokens": row["cached_tokens"]},
    }
    message = {"role": "assistant", "content": row["completion"], "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": row["finish_reason"]}
    body = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage,
    }
    line["response"] = {"status_code": 200, "request_id": number, "body": body}
    return line

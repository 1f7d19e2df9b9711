"""OpenAI's batch response file, made of the parts of a finished job.

The format: https://platform.openai.com/docs/api-reference/batch (the request output object).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.disk import explained, temporary
from batchrun.data.plan import MANIFEST, STATE_FOLDER
from batchrun.data.token_bytes import TokenBytes
from batchrun.errors import BatchrunError

# Beside the parts it would be taken for a part by readers of the whole folder.
BATCH_OUTPUT = f"{STATE_FOLDER}/batch_output.jsonl"
READ_ROWS = 4096
READ_LOGPROBS = 32  # rows with an object for each of the likeliest at each token
UNLIKELY = -9999.0  # the API's number for what is very unlikely; here also for tokens that no step has sampled


def write_batch_output(
    folder: Path,
    parts: Sequence[str],
    model: str,
    names: Mapping[str, str] | None = None,
    samples: int = 1,
    tokens: TokenBytes | None = None,
) -> bool:
    """Write BATCH_OUTPUT of a finished job: a line for each `samples` rows of `parts`, which are one request's choices,
    in their order.

    `parts` are names in `folder`; `names` maps what a line is made of to the output's columns, where those have other
    names (`OutputSchema.names`); `tokens` tells the texts of tokens, for log-probabilities. The file appears whole or
    not at all, and is the same for the same parts. Returns False, and does nothing, while a part is missing: another
    worker's. Raises BatchrunError if it cannot be written.
    """
    paths = [folder / part for part in parts]
    if not all(path.exists() for path in paths):
        return False
    target = folder / BATCH_OUTPUT
    created = int((folder / MANIFEST).stat().st_mtime)
    written = temporary(target)
    with explained(target):
        try:
            with open(written, "x", encoding="utf-8") as file:
                rows = _rows(paths, names or {})
                while choices := list(islice(rows, samples)):
                    json.dump(_response(choices, model, created, tokens), file, ensure_ascii=False)
                    file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(written, target)
        except pa.ArrowException as error:
            raise BatchrunError(f"cannot make {target} from the parts: {error}") from error
        finally:
            written.unlink(missing_ok=True)
    return True


def _rows(parts: Sequence[Path], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    keys = ("completion", "finish_reason", "error_type", "error", "prompt_tokens", "cached_tokens", "completion_tokens")
    more = {key: names[key] for key in ("reasoning", "reasoning_tokens", "tool_calls", "logprobs") if key in names}
    at_once = READ_LOGPROBS if "logprobs" in more else READ_ROWS
    columns = {key: names.get(key, key) for key in keys} | more | {"custom_id": "custom_id"}
    for part in parts:
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(batch_size=at_once, columns=list(columns.values())):
                values = [batch.column(name).to_pylist() for name in columns.values()]
                yield from (dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True))


def _message(row: Mapping[str, Any], number: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": row["completion"], "refusal": None}
    if calls := row.get("tool_calls"):
        message["content"] = row["completion"] or None
        message["tool_calls"] = [
            {"id": f"call_{number}_{place}", "type": "function", "function": call} for place, call in enumerate(calls)
        ]
    if row.get("reasoning") is not None:
        message["reasoning_content"] = row["reasoning"]  # as servers of open models name it
    return message


def _finish_reason(row: Mapping[str, Any]) -> str:
    called = row["finish_reason"] == "stop" and row.get("tool_calls")
    return "tool_calls" if called else str(row["finish_reason"])


def _logprobs(row: Mapping[str, Any], tokens: TokenBytes | None) -> dict[str, Any] | None:
    if tokens is None or row.get("logprobs") is None:
        return None
    content = [
        {**_token(each, tokens), "top_logprobs": [_token(top, tokens) for top in each["top"]]}
        for each in row["logprobs"]
    ]
    return {"content": content, "refusal": None}


def _token(token: Mapping[str, Any], tokens: TokenBytes) -> dict[str, Any]:
    data = tokens[token["token_id"]]
    logprob = UNLIKELY if math.isnan(token["logprob"]) else max(token["logprob"], UNLIKELY)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _response(rows: Sequence[Mapping[str, Any]], model: str, created: int, tokens: TokenBytes | None) -> dict[str, Any]:
    """The line of one request, whose samples are `rows`. Those that failed are left out, unless all did."""
    answered = [row for row in rows if row["error_type"] is None]
    row = rows[0]
    custom_id = row["custom_id"]
    number = hashlib.sha256(f"{model}\x1f{created}\x1f{custom_id}".encode()).hexdigest()[:32]
    line: dict[str, Any] = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": None, "error": None}
    if not answered:
        line["error"] = {"code": row["error_type"], "message": row["error"]}
        return line
    # The API counts the prompt once, however many choices there are.
    prompt_tokens, completion_tokens = answered[0]["prompt_tokens"], sum(row["completion_tokens"] for row in answered)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answered[0]["cached_tokens"]},
    }
    if "reasoning_tokens" in row:
        tokens = sum(row["reasoning_tokens"] for row in answered)
        usage["completion_tokens_details"] = {"reasoning_tokens": tokens}
    choices = [
        {
            "index": index,
            "message": _message(row, f"{number[:20]}{index:04}"),
            "logprobs": _logprobs(row, tokens),
            "finish_reason": _finish_reason(row),
        }
        for index, row in enumerate(rows)
        if row["error_type"] is None
    ]
    body = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage,
    }
    line["response"] = {"status_code": 200, "request_id": number, "body": body}
    return line

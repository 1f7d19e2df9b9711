from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchrun.errors import InputError
from tests.data.formats.inputs import opened, rows_of, write_lines


def request(custom_id: Any = "a", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": messages, **body},
    }


def test_columns_of_a_request(tmp_path: Path) -> None:
    body = {"max_completion_tokens": 7, "temperature": 1, "stop": "x", "seed": 3, "user": "u", "n": 1, "stream": False}
    path = write_lines(tmp_path / "r.jsonl", [request("one", **body), "", request("two")])
    first, second = rows_of(opened(path, format="openai"))
    assert (first["custom_id"], first["model"], first["url"]) == ("one", "m", "/v1/chat/completions")
    assert json.loads(first["messages"]) == [{"role": "user", "content": "hello"}]
    given = {key: value for key, value in first["params"].items() if value is not None}
    assert given == {"max_tokens": 7, "temperature": 1.0, "stop": ["x"], "seed": 3}
    assert all(value is None for value in second["params"].values())
    assert "why" not in first


def test_tools_of_a_request(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    lines = [request("a", tools=tools, tool_choice="auto"), request("b", tools=tools, tool_choice="none"), request("c")]
    rows = rows_of(opened(write_lines(tmp_path / "r.jsonl", lines), format="openai"))
    assert [row["tools"] and json.loads(row["tools"]) for row in rows] == [tools, None, None]
    assert all("why" not in row for row in rows)


def test_penalties_and_biases_of_a_request(tmp_path: Path) -> None:
    body = {"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"50": -100, "7": 3}, "logprobs": False}
    path = write_lines(tmp_path / "r.jsonl", [request("one", **body), request("two", logit_bias={})])
    first, second = rows_of(opened(path, format="openai"))
    given = {key: value for key, value in first["params"].items() if value is not None}
    bias = given.pop("logit_bias")
    assert dict(bias) == {"50": -100.0, "7": 3.0}
    assert given == {"presence_penalty": 0.5, "frequency_penalty": -1.0}
    assert not second["params"]["logit_bias"]


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": None}, None),
    ],
)
def test_log_probabilities_of_a_request(tmp_path: Path, asked: dict[str, Any], given: int | None) -> None:
    (row,) = rows_of(opened(write_lines(tmp_path / "r.jsonl", [request(**asked)]), format="openai"))
    assert "why" not in row
    assert row["params"]["logprobs"] == given


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{broken", "line 2: not JSON"),
        ({**request(), "custom_id": None}, "line 2: custom_id is missing"),
        ({**request(), "url": "/v1/embeddings"}, "line 2: url '/v1/embeddings' is not supported"),
        ({**request(), "method": "GET"}, "line 2: method 'GET' is not POST"),
        ({"custom_id": "a", "url": "/v1/chat/completions"}, "line 2: body is missing"),
        (request(messages=None), "line 2: body.messages is missing"),
        (request(stream=True), "line 2: body.stream=true is not supported"),
        (request(n=2), "line 2: body.n=2 is not supported"),
        (request(tool_choice="required"), "line 2: body.tool_choice="),
        (request(temperature=-1), "line 2: sampling.temperature=-1"),
        (request(max_tokens=1.5), "line 2: max_tokens=1.5 is not int"),
        (request(logprobs=3), "line 2: body.logprobs=3 must be true or false; top_logprobs has the number"),
        (request(top_logprobs=3), "line 2: body.top_logprobs=3 needs body.logprobs=true beside it"),
        (request(logprobs=True, top_logprobs=-1), "line 2: sampling.logprobs=-1 is out of range"),
        (request(logprobs=True, top_logprobs="x"), "line 2: logprobs='x' is not int"),
        (request(logit_bias={"50": 200}), "line 2: sampling.logit_bias: 50=200.0 is out of range"),
        (request(unheard_of=1), "line 2: body.unheard_of=1 is not supported"),
    ],
)
def test_what_cannot_be_answered_is_a_broken_row(tmp_path: Path, line: Any, why: str) -> None:
    path = write_lines(tmp_path / "r.jsonl", [request("first"), line, request("last")])
    found = rows_of(opened(path, format="openai"))
    assert [row["custom_id"] for row in (found[0], found[2])] == ["first", "last"]
    assert found[1]["why"].startswith(why)
    assert "why" not in found[0]
    assert "why" not in found[2]
    if isinstance(line, dict):
        assert found[1]["custom_id"] == line["custom_id"]


def test_a_doubled_id_names_both_lines(tmp_path: Path) -> None:
    lines: list[Any] = [request(str(i)) for i in range(2000)]
    lines[1500] = request("77")
    path = write_lines(tmp_path / "r.jsonl", ["", *lines])
    with pytest.raises(InputError, match=r"'77' comes twice: in .*r\.jsonl, line 79, and in .*r\.jsonl, line 1502"):
        opened(path, format="openai")


def test_a_doubled_id_over_two_files_names_both(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [request("x"), request("y")])
    write_lines(tmp_path / "b.jsonl", [request("z"), request("x")])
    with pytest.raises(InputError, match=r"'x' comes twice: in .*a\.jsonl, line 1, and in .*b\.jsonl, line 2"):
        opened(tmp_path, format="openai")


def test_rows_without_an_id_are_not_doubles(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "r.jsonl", [request(None), request(None), "x", "x"])
    assert len(rows_of(opened(path, format="openai"))) == 4

"""Tools reach the chat template as they were given, and messages that call them stay whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchrun.config import PromptConfig
from batchrun.data.messages import parse_messages
from batchrun.data.prompts import PromptBuilder
from batchrun.data.tools import parse_tools
from batchrun.errors import ConfigError, InputError
from tests.data.tiny import make_tokenizer

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}
SEND = {"type": "function", "function": {"name": "send", "parameters": {}}}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}:{{ t.function.parameters | tojson }};{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.id }}={{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
LOOK_SHOWN = 'look:{"properties": {"at": {"type": "string"}}};'


def builder(rows: pa.Table, folders: Any = (), template: str = TEMPLATE, **config: Any) -> PromptBuilder:
    config = {"template": "{{ text }}", "chat_template": template, **config}
    return PromptBuilder(PromptConfig(**config), make_tokenizer(False), rows.schema, 1000, folders)


def texts(rows: pa.Table, **config: Any) -> list[str | None]:
    made = builder(rows, **config)
    prompts = made.build(rows.select(made.columns).to_batches()[0])
    return [prompt.text if prompt.error is None else prompt.error for prompt in prompts]


ROWS = pa.table({"text": ["hi"]})


def test_the_jobs_tools_are_a_list_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([LOOK, SEND]))
    expected = [LOOK_SHOWN + "send:{};[user]hi"]
    assert texts(ROWS, tools=[LOOK, SEND]) == expected
    assert texts(ROWS, tools=json.dumps([LOOK, SEND])) == expected
    assert texts(ROWS, tools="tools.json", folders=[tmp_path]) == expected
    assert texts(ROWS) == ["[user]hi"]


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ("gone.json", r"prompt\.tools=gone\.json is not a file"),
        ("[{]", r"prompt\.tools: not JSON"),
        (["look"], r"prompt\.tools: not JSON"),
        ([3], r"prompt\.tools: tool 0 is not an object with the schema of a function but int"),
    ],
)
def test_what_is_no_list_of_schemas_is_refused(tools: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        builder(ROWS, tools=tools)


def test_rows_may_have_their_own() -> None:
    both = [LOOK, {"type": "function", "function": {"name": "send"}}]
    template = TEMPLATE.replace("parameters | tojson", "parameters")
    for own in (pa.array([json.dumps(both), None, "[]"]), pa.array([both, None, []])):
        rows = pa.table({"text": ["a", "b", "c"], "own": own})
        shown = texts(rows, tools_column="own", tools=[SEND], template=template)
        assert [str(text).count("look") for text in shown] == [1, 0, 0]
        assert [str(text).count("send") for text in shown] == [1, 1, 1]
    broken = pa.table({"text": ["a"], "own": ["{"]})
    assert str(texts(broken, tools_column="own")[0]).startswith("column own: not JSON")
    with pytest.raises(InputError, match=r"prompt\.tools_column=text2 is not a column"):
        builder(ROWS, tools_column="text2")
    with pytest.raises(InputError, match=r"prompt\.tools_column=n has type int64"):
        builder(pa.table({"text": ["a"], "n": [1]}), tools_column="n")


def test_a_template_that_shows_no_tools_is_refused() -> None:
    plain = "{{ messages[0].content }}"
    with pytest.raises(InputError, match=r"it shows the model no tools: set another with prompt\.chat_template"):
        builder(ROWS, tools=[LOOK], template=plain)
    rows = pa.table({"text": ["a", "b"], "own": [json.dumps([LOOK]), None]})
    failed, fine = texts(rows, tools_column="own", template=plain)
    assert "shows the model no tools" in str(failed)
    assert fine == "b"


def test_tools_need_a_chat() -> None:
    with pytest.raises(ConfigError, match=r"shown by a chat template: use prompt\.kind=chat"):
        PromptConfig(kind="completion", template="x", tools=[LOOK])
    with pytest.raises(ConfigError, match=r"prompt\.tools=3 must be a list of schemas"):
        PromptConfig(template="x", tools=3)


def test_the_tools_are_part_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([LOOK]))
    by_file = builder(ROWS, tools="tools.json", folders=[tmp_path]).identity()
    assert by_file == builder(ROWS, tools=[LOOK]).identity() != builder(ROWS, tools=[SEND]).identity()


CALLING = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "look"},
]


def test_messages_that_call_tools_stay_whole() -> None:
    said = parse_messages(json.dumps(CALLING))
    assert said[1]["content"] is None
    assert said[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "sea"}}
    assert said[2] == CALLING[2]
    columns = pa.array([CALLING])
    assert parse_messages(columns.to_pylist()[0]) == said, "what Arrow makes null in other messages is not there"
    rows = pa.table({"m": columns})
    made = PromptBuilder(PromptConfig(messages="m", chat_template=TEMPLATE), make_tokenizer(False), rows.schema, 1000)
    [prompt] = made.build(rows.to_batches()[0])
    assert prompt.text == '[user]weather?[assistant]c1={"at": "sea"}[tool]rain'


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ("look", "message 0 has tool_calls that are not a list of objects"),
        ([{"function": {"arguments": "{"}}], "message 0 calls a tool with arguments that are not JSON"),
    ],
)
def test_calls_that_are_none_are_refused(calls: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_messages([{"role": "assistant", "content": None, "tool_calls": calls}])


def test_no_tools_are_none() -> None:
    assert parse_tools(None) is parse_tools("") is parse_tools("[]") is parse_tools([]) is None

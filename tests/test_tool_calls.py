"""Calls of tools leave the text of a completion for columns of their own, or stay in it with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import runner
from batchrun.config import Config
from batchrun.data.batch_output import BATCH_OUTPUT
from batchrun.engine.llm import LLM
from batchrun.engine.params import SamplingParams
from batchrun.engine.structure import StructuredOutputs
from batchrun.errors import ConfigError
from batchrun.tool_calls import Answer, ToolCall, known_format, split_calls
from tests.engine.families import make_model
from tests.engine.speller import ENDS, VOCABULARY, make_tokenizer
from tests.test_runner import job, read

PARIS, ROME = ToolCall("look", '{"city": "Paris"}'), ToolCall("look", '{"city": "R\u00f4me </tool_call>"}')
HERMES = [f'<tool_call>\n{{"name": "look", "arguments": {call.arguments}}}\n</tool_call>' for call in (PARIS, ROME)]
LLAMA = '{"name": "look", "parameters": {"city": "Paris"}}'
MISTRAL = "[TOOL_CALLS]"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHAT = (
    "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
)


@pytest.mark.parametrize(
    ("format", "text", "rest", "calls"),
    [
        ("hermes", HERMES[0], "", [PARIS]),
        ("hermes", f"I look.\n{HERMES[0]}\n{HERMES[1]}\n", "I look.", [PARIS, ROME]),
        ("hermes", HERMES[0].removesuffix("</tool_call>"), "", [PARIS]),
        ("hermes", HERMES[0].removesuffix("</tool_call>") + HERMES[1], "", [PARIS, ROME]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", [ToolCall("now", "{}")]),
        ("hermes", " No need. ", " No need. ", []),
        ("hermes", "", "", []),
        ("llama3_json", LLAMA, "", [PARIS]),
        ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [PARIS, PARIS]),
        ("llama3_json", f"So:<|python_tag|> {LLAMA.replace('parameters', 'arguments')}", "So:", [PARIS]),
        ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
        ("llama3_json", '{"age": 3', '{"age": 3', []),
        ("mistral", f'{MISTRAL} [{{"name": "look", "arguments": {PARIS.arguments}, "id": "a1"}}]', "", [PARIS]),
        ("mistral", f"Hm {MISTRAL}look{PARIS.arguments}{MISTRAL}look[ARGS]{ROME.arguments}", "Hm", [PARIS, ROME]),
        ("mistral", f"{MISTRAL}look[CALL_ID]x9[ARGS]{PARIS.arguments}", "", [PARIS]),
        ("mistral", f"{MISTRAL} []", f"{MISTRAL} []", []),
        ("mistral", "none", "none", []),
    ],
)
def test_each_format_is_read(format: str, text: str, rest: str, calls: list[ToolCall]) -> None:
    assert split_calls(text, format) == Answer(rest, calls)


@pytest.mark.parametrize(
    ("format", "text", "why"),
    [
        ("hermes", f"{HERMES[0]}<tool_call>", "a call is not JSON: Expecting value"),
        ("hermes", HERMES[0][:-20], "a call is not JSON: "),
        (
            "hermes",
            HERMES[0].replace("</tool_call>", " and so on"),
            "'and so on' follows a call in place of </tool_call>",
        ),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'a call has no name: {"arguments": {}}'),
        ("hermes", '<tool_call>{"name": "look"}</tool_call>', "the arguments of the call of look are no JSON object"),
        ("hermes", '<tool_call>{"name": "look", "arguments": NaN}', "a call is not JSON: NaN is no JSON number"),
        ("hermes", "<tool_call>[1]</tool_call>", "a call is [1], which is no JSON object"),
        ("hermes", "<tool_call>" + '{"a":' * 100_000, "nested too deeply"),
        ("llama3_json", LLAMA[:-1], "a call is not JSON: "),
        ("llama3_json", f"{LLAMA};", "a call is not JSON: Expecting value"),
        ("llama3_json", '<|python_tag|>search.call(query="x")', "a call is not JSON: Expecting value"),
        ("llama3_json", f'{LLAMA}; {{"name": "look"}}', "the arguments of the call of look are no JSON object"),
        ("mistral", f'{MISTRAL} [{{"name": "look"}}]', "the arguments of the call of look are no JSON object"),
        ("mistral", f"{MISTRAL} [3]", "a call has no name: 3"),
        ("mistral", f"{MISTRAL}look", "a call is not JSON: Expecting value"),
        ("mistral", f"{MISTRAL} {{}}", "' {}' is not the name of a tool"),
    ],
)
def test_what_cannot_be_read_stays_in_the_text(format: str, text: str, why: str) -> None:
    whole, calls, error = split_calls(text, format, "length")
    assert (whole, calls) == (text, None)
    assert str(error).startswith(f"the completion ended by length: {why}")
    assert split_calls(text, format).error == str(error).removeprefix("the completion ended by length: ")


def test_the_format_is_what_the_chat_template_speaks_of() -> None:
    assert known_format(CHAT) == "hermes"
    assert known_format("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert (
        known_format('{"name": function name, "parameters": dictionary of argument name and its value}')
        == "llama3_json"
    )
    assert known_format("<tool_call><function=name>") is None
    assert known_format("{{ messages }}") is None
    assert known_format(None) is None


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its marker of Mistral is a special token, as it is there."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [MISTRAL]})
    tokenizer.chat_template = CHAT
    folder = make_model(
        "llama", tmp_path_factory.mktemp("models") / "speller", vocab_size=VOCABULARY, eos_token_id=ENDS
    )
    tokenizer.save_pretrained(folder)
    return folder


def calling(model: Path, source: Path, output: Path, **changes: Any) -> Config:
    """A job whose rows say what column `params` makes them say."""
    settings: dict[str, Any] = {"prompt__kind": "chat", "prompt__params": "params", "sampling__max_tokens": 120}
    return job(model, source, output, **(settings | changes))


def says(*texts: str) -> list[str]:
    return [json.dumps({"structured_outputs": {"choice": [text]}}) for text in texts]


def write(folder: Path, **columns: Any) -> Path:
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return folder


def test_calls_have_columns(speller: Path, tmp_path: Path) -> None:
    answers = [HERMES[0], "Hello", f"Well, {HERMES[0]}{HERMES[0]}", "<tool_call>{", HERMES[0]]
    tools = [json.dumps([TOOL])] * 4 + [None]
    source = write(tmp_path / "in", text=list("abcde"), params=says(*answers), tools=tools)
    runner.run(calling(speller, source, tmp_path / "out", prompt__tools_column="tools"))
    rows = read(tmp_path / "out")
    assert [row["completion"] for row in rows] == ["", "Hello", "Well,", "<tool_call>{", HERMES[0]]
    call = PARIS._asdict()
    assert [row["tool_calls"] for row in rows] == [[call], [], [call, call], None, []], "the last is told of no tool"
    assert [row["tool_calls_error"] is None for row in rows] == [True, True, True, False, True]
    assert rows[3]["tool_calls_error"].startswith("a call is not JSON: ")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    runner.run(calling(speller, source, tmp_path / "out", prompt__tools_column="tools"))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")} == before


def test_a_marker_that_is_a_special_token_is_found_and_no_other_is_shown(speller: Path, tmp_path: Path) -> None:
    tokens = [len(make_tokenizer()), make_tokenizer().pad_token_id]
    params = [json.dumps({"allowed_token_ids": [token], "max_tokens": 2}) for token in tokens]
    source = write(tmp_path / "in", text=["a", "b"], params=params)
    runner.run(calling(speller, source, tmp_path / "out", output__tool_calls="mistral"))
    marked, padded = read(tmp_path / "out")
    assert (marked["completion"], marked["tool_calls"]) == (MISTRAL * 2, None)
    assert marked["tool_calls_error"].startswith("the completion ended by length: a call is not JSON: ")
    assert (padded["completion"], padded["tool_calls"]) == ("", [])


def test_tool_calls_of_a_request_are_those_of_the_api(speller: Path, tmp_path: Path) -> None:
    bodies = [
        {"tools": [TOOL], "structured_outputs": {"choice": [HERMES[0] + HERMES[0]]}},
        {"tools": [TOOL], "structured_outputs": {"choice": ["Hello"]}},
        {"tools": [TOOL], "tool_choice": "none", "structured_outputs": {"choice": [HERMES[0]]}},
    ]
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions"}
        | {"body": {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 120, **body}}
        for i, body in enumerate(bodies)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes: dict[str, Any] = {"prompt__template": None, "input__format": "openai", "prompt__kind": "chat"}
    runner.run(job(speller, tmp_path / "in.jsonl", tmp_path / "out", **changes))
    written = (tmp_path / "out" / BATCH_OUTPUT).read_text().splitlines()
    first, second, third = (json.loads(line)["response"]["body"]["choices"][0] for line in written)
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["content"] is None
    calls = first["message"]["tool_calls"]
    assert [(call["type"], call["function"]) for call in calls] == [("function", PARIS._asdict())] * 2
    assert len({call["id"] for call in calls}) == 2
    for choice, text in ((second, "Hello"), (third, HERMES[0])):
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
        assert "tool_calls" not in choice["message"]


def test_jobs_without_tools_have_no_columns(speller: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in", text=["a"], params=says(HERMES[0]))
    options: dict[str, dict[str, Any]] = {"none": {}, "off": {"prompt__tools": [TOOL], "output__tool_calls": None}}
    for name, changes in options.items():
        runner.run(calling(speller, source, tmp_path / name, **changes))
        (row,) = read(tmp_path / name)
        assert row["completion"] == HERMES[0]
        assert "tool_calls" not in row


def test_the_door_reads_calls(speller: Path) -> None:
    with LLM(str(speller), dtype="float32", kv_cache_gib=0.05, workers="1") as llm:
        forms = [StructuredOutputs(choice=[text]) for text in (HERMES[0], "Hi", "<tool_call>")]
        params = [SamplingParams(max_tokens=120, structured_outputs=form) for form in forms]
        conversation = [{"role": "user", "content": "x"}]
        called, plain, broken = llm.chat([conversation] * 3, params, tools=[TOOL])
        assert llm.tool_calls(called) == [PARIS]
        assert llm.tool_calls(plain) == []
        with pytest.raises(ValueError, match="a call is not JSON"):
            llm.tool_calls(broken)
        llm.tool_format = None
        with pytest.raises(ValueError, match="set tool_format to one of hermes, llama3_json, mistral"):
            llm.tool_calls(called)


def test_what_cannot_be_is_refused(speller: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in", text=["a"])
    with pytest.raises(ConfigError, match=r"output\.tool_calls='xml' is not one of auto, hermes, llama3_json, mistral"):
        job(speller, source, tmp_path / "out", output__tool_calls="xml")
    with pytest.raises(ConfigError, match=r"output\.tool_calls=hermes takes calls out of the text"):
        calling(speller, source, tmp_path / "out", output__tool_calls="hermes", prompt__turns=["and?"])

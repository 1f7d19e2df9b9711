from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchrun.config import PromptConfig
from batchrun.data.prompt import Prompt
from batchrun.data.prompts import PromptBuilder
from batchrun.errors import InputError
from tests.data.tiny import CHAT, CHAT_WITH_BOS, make_tokenizer

BOS = 1
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def build(
    rows: dict[str, Any] | pa.Table, tokenizer: Any = None, max_model_len: int = 1000, **config: Any
) -> list[Prompt]:
    table = rows if isinstance(rows, pa.Table) else pa.table(rows)
    builder = PromptBuilder(PromptConfig(**config), tokenizer or make_tokenizer(True), table.schema, max_model_len)
    batch = table.select(builder.columns).to_batches()[0] if builder.columns else table.to_batches()[0]
    return builder.build(batch)


def refusal(schema: dict[str, pa.DataType] | None = None, tokenizer: Any = None, **config: Any) -> str:
    with pytest.raises(InputError) as caught:
        PromptBuilder(
            PromptConfig(**config),
            tokenizer or make_tokenizer(True),
            pa.schema(schema or {"id": pa.int64(), "text": pa.string()}),
            1000,
        )
    return str(caught.value)


def texts(prompts: list[Prompt]) -> list[str | None]:
    assert [prompt.error for prompt in prompts] == [None] * len(prompts)
    return [prompt.text for prompt in prompts]


def decoded(prompt: Prompt) -> str:
    return str(make_tokenizer(True).decode(prompt.ids))


def test_chat_prompt_golden() -> None:
    [prompt] = build(
        {"text": ["good film"], "lang": ["en"]},
        template="Label: {{ text }}",
        system="You read {{ lang }}.",
        examples=[{"user": "bad", "assistant": "neg"}],
        prefill="{{ lang }}:",
    )
    assert prompt.text == (
        "<|system|>You read en.<|end|><|user|>bad<|end|><|assistant|>neg<|end|>"
        "<|user|>Label: good film<|end|><|assistant|>en:"
    )
    assert decoded(prompt) == "<s>" + prompt.text
    assert prompt.ids[:2] == [BOS, 6]
    assert (prompt.error_type, prompt.error) == (None, None)


def test_null_columns_render_as_nothing_and_blank_system_is_left_out() -> None:
    rows = {"text": ["a", "b"], "persona": ["P", None], "note": [None, "n"]}
    assert texts(build(rows, template="{{ text }}[{{ note }}]", system="{{ persona }}")) == [
        "<|system|>P<|end|><|user|>a[]<|end|><|assistant|>",
        "<|user|>b[n]<|end|><|assistant|>",
    ]


@pytest.mark.parametrize(("bos", "starts"), [(True, [BOS]), (False, [])])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_bos_as_the_tokenizer_wants_it(bos: bool, starts: list[int], kind: str) -> None:
    [prompt] = build({"text": ["x"]}, make_tokenizer(bos), template="{{ text }}", kind=kind)
    assert prompt.ids.count(BOS) == len(starts)
    assert prompt.ids[: len(starts)] == starts


@pytest.mark.parametrize("bos", [True, False])
def test_bos_in_the_chat_template_is_not_doubled(bos: bool) -> None:
    [prompt] = build({"text": ["x"]}, make_tokenizer(bos, CHAT_WITH_BOS), template="{{ text }}")
    assert prompt.ids[0] == BOS
    assert prompt.ids.count(BOS) == 1


@pytest.mark.parametrize("text", ["x", "<s>x", "<s><s>x"])
def test_bos_in_raw_text_is_not_doubled(text: str) -> None:
    [prompt] = build({"text": [text]}, template="{{ text }}", kind="completion")
    assert prompt.ids == make_tokenizer(True)("x")["input_ids"]


def test_completion_is_tokenised_as_the_tokenizer_does() -> None:
    rows = {"text": ["one", "日 é"]}
    prompts = build(rows, template="Q: {{ text }}\nA:", prefill=" yes", kind="completion")
    assert texts(prompts) == ["Q: one\nA: yes", "Q: 日 é\nA: yes"]
    assert [prompt.ids for prompt in prompts] == [make_tokenizer(True)(prompt.text)["input_ids"] for prompt in prompts]


def test_columns_are_only_those_needed() -> None:
    schema = pa.schema({"a": pa.string(), "b": pa.string(), "c": pa.string(), "d": pa.string()})
    config = PromptConfig(template="{{ d }}", system="{{ a }}", prefill="{{ a }}{{ c }}")
    assert PromptBuilder(config, make_tokenizer(True), schema, 10).columns == ["a", "c", "d"]


def test_template_without_columns_gives_each_row_a_prompt() -> None:
    assert texts(build({"id": [1, 2]}, template="Say hi.", kind="completion")) == ["Say hi."] * 2


def test_bad_rows_are_data_and_leave_their_neighbours_alone() -> None:
    rows = {"text": ["fine", "   ", None, "zero", "long" * 20, "fine"], "n": [1, 1, 1, 0, 1, 1]}
    config: dict[str, Any] = {"template": "{{ text }}{% if 1 // n %}{% endif %}", "kind": "completion"}
    prompts = build(rows, max_model_len=20, **config)
    assert [prompt.error_type for prompt in prompts] == [
        None,
        "empty_prompt",
        "empty_prompt",
        "template_error",
        "prompt_too_long",
        None,
    ]
    assert prompts[3].error is not None
    assert "division" in prompts[3].error
    assert prompts[0] == prompts[5] == build({"text": ["fine"], "n": [1]}, **config)[0]


@pytest.mark.parametrize(("length", "error_type"), [(8, None), (9, "prompt_too_long"), (10, "prompt_too_long")])
def test_limit_leaves_room_for_one_token(length: int, error_type: str | None) -> None:
    [prompt] = build({"text": ["x" * length]}, max_model_len=10, template="{{ text }}", kind="completion")
    assert prompt.error_type == error_type
    assert len(prompt.ids) == length + 1
    if error_type:
        assert prompt.error is not None
        assert f"{length + 1} tokens" in prompt.error
        assert "model.max_model_len=10" in prompt.error


BLANK = [None, "", " \n\t"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_rows_whose_columns_are_all_blank_are_empty(policy: str, kind: str) -> None:
    rows = {"text": [*BLANK, "x", None], "lang": [None, "", " ", None, "en"]}
    prompts = build(rows, template="Label ({{ lang }}): {{ text }}", kind=kind, on_empty=policy)
    assert [prompt.error_type for prompt in prompts] == ["empty_prompt"] * 3 + [None] * 2
    assert [prompt.skipped for prompt in prompts] == [policy == "skip"] * 3 + [False] * 2
    assert prompts[0].error == "null or blank: text, lang"


def test_blank_columns_can_be_sent_and_text_that_is_blank_as_a_whole_cannot() -> None:
    prompts = build({"text": BLANK}, template="Say something.{{ text }}", kind="completion", on_empty="send")
    assert [prompt.text for prompt in prompts] == ["Say something.", "Say something.", "Say something. \n\t"]
    prompts = build({"text": BLANK}, template="{{ text }}", kind="completion", on_empty="send")
    assert [prompt.error_type for prompt in prompts] == ["empty_prompt"] * 3


def test_conversations_without_text_are_empty() -> None:
    nothing = [None, "", "null", "[]", '[{"role": "user", "content": " "}]', '[{"role": "system", "content": "S"}]']
    prompts = build({"m": [*nothing, '[{"role": "user", "content": "hi"}]', "{"]}, messages="m", on_empty="skip")
    assert [prompt.error_type for prompt in prompts] == ["empty_prompt"] * 6 + [None, "invalid_row"]
    assert [prompt.skipped for prompt in prompts] == [True] * 6 + [False] * 2


def test_text_without_tokens_is_empty() -> None:
    tokenizer = make_tokenizer(False)
    silent = type("Silent", (), {"__call__": lambda self, texts, **_: {"input_ids": [[] for _ in texts]}})()
    builder = PromptBuilder(
        PromptConfig(template="{{ text }}", kind="completion"), tokenizer, pa.schema({"text": pa.string()}), 10
    )
    builder.window.tokenizer = silent
    [prompt] = builder.build(pa.record_batch({"text": ["x"]}))
    assert prompt.error_type == "empty_prompt"


def test_row_that_the_tokenizer_refuses() -> None:
    class Picky:
        def __init__(self) -> None:
            self.inner = make_tokenizer(True)

        def __call__(self, text: Any, **options: Any) -> Any:
            if "bad" in text:
                raise TypeError("cannot encode")
            return self.inner(text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    prompts = build({"text": ["a", "bad", "c"]}, Picky(), template="{{ text }}", kind="completion")
    assert [prompt.error_type for prompt in prompts] == [None, "invalid_row", None]
    assert prompts[2].ids == make_tokenizer(True)("c")["input_ids"]


def test_values_that_python_cannot_hold_are_invalid_rows() -> None:
    table = pa.table({"at": pa.array([0, 10**14], pa.timestamp("s"))})
    good, bad = build(table, template="{{ at }}", kind="completion")
    assert good.text == "1970-01-01T00:00:00"
    assert bad.error_type == "invalid_row"
    assert bad.error is not None
    assert bad.error.startswith("column at: ")


def test_nanosecond_timestamps_render_as_iso_text() -> None:
    table = pa.table({"at": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", "UTC"))})
    prompts = build(table, template="[{{ at }}]", kind="completion", on_empty="send")
    assert texts(prompts) == ["[2023-11-14T22:13:20.123456+00:00]", "[]"]


def test_lone_surrogates_are_replaced() -> None:
    messages = '[{"role": "user", "content": "a\\ud835b"}]'
    [prompt] = build({"m": [messages]}, messages="m")
    assert prompt.text == "<|user|>a\ufffdb<|end|><|assistant|>"
    assert decoded(prompt) == "<s>" + prompt.text


def test_lone_surrogates_in_what_is_wrong_with_a_row_are_replaced() -> None:
    template = "{% if messages[0]['content'] != 'text' %}{{ raise_exception(messages[0]['content']) }}{% endif %}"
    messages = '[{"role": "user", "content": "a\\ud835b"}]'
    [prompt] = build({"m": [messages]}, messages="m", chat_template=template)
    assert (prompt.error_type, prompt.error) == ("template_error", "chat template: a\ufffdb")


def test_messages_column() -> None:
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "bye"},
    ]
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "hi"}]
    expected = [
        "<|system|>S<|end|><|user|>hi<|end|><|assistant|>yo<|end|><|user|>bye<|end|><|assistant|>",
        "<|system|>Own.<|end|><|user|>hi<|end|><|assistant|>",
    ]
    listed = pa.table({"m": pa.array([talk, own], MESSAGES)})
    as_json = pa.table({"m": [json.dumps(talk), json.dumps(own)]})
    coded = as_json.set_column(0, "m", as_json.column("m").dictionary_encode())
    for table in (listed, as_json, coded):
        assert texts(build(table, messages="m", system="S")) == expected


def test_examples_go_between_system_and_the_column() -> None:
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "hi"}]
    table = pa.table({"m": pa.array([own, own[1:]], MESSAGES)})
    assert texts(build(table, messages="m", examples=[{"user": "q", "assistant": "a"}])) == [
        "<|system|>Own.<|end|><|user|>q<|end|><|assistant|>a<|end|><|user|>hi<|end|><|assistant|>",
        "<|user|>q<|end|><|assistant|>a<|end|><|user|>hi<|end|><|assistant|>",
    ]


def test_prompt_ids_are_sent_as_they_are() -> None:
    tokenizer = make_tokenizer(True)
    table = pa.table({"ids": pa.array([[5, 6], [], None, [1, len(tokenizer)], [-1], [3, None]], pa.list_(pa.int32()))})
    prompts = build(table, tokenizer, prompt_ids="ids")
    assert prompts[0] == Prompt([5, 6])
    assert [prompt.error_type for prompt in prompts[1:]] == ["empty_prompt"] * 2 + ["invalid_row"] * 3
    assert prompts[3].error == f"column ids: token 1 is {len(tokenizer)}; ids go from 0 to {len(tokenizer) - 1}"


def test_chat_template_that_raises_for_one_row() -> None:
    template = CHAT + "{% if 'bomb' in messages[-1]['content'] %}{{ raise_exception('no bombs') }}{% endif %}"
    good, bad = build({"text": ["flower", "bomb"]}, template="{{ text }}", chat_template=template)
    assert good.error_type is None
    assert (bad.error_type, bad.error) == ("template_error", "chat template: no bombs")


def test_chat_template_kwargs_reach_the_template() -> None:
    template = CHAT + "{% if not thinking %}<none>{% endif %}"
    [prompt] = build(
        {"text": ["x"]}, template="{{ text }}", chat_template=template, chat_template_kwargs={"thinking": 0}
    )
    assert prompt.text is not None
    assert prompt.text.endswith("<|assistant|><none>")


def test_texts_behind_settings_are_part_of_the_identity(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("Label: {{ text }}")
    schema = pa.schema({"text": pa.string()})
    config = PromptConfig(template_file="t.jinja")
    builder = PromptBuilder(config, make_tokenizer(True), schema, 100, [tmp_path])
    assert builder.identity() == {
        "prompt.template_file (text)": "Label: {{ text }}",
        "prompt.chat_template (text)": CHAT,
    }
    plain = PromptBuilder(PromptConfig(template="x", kind="completion"), make_tokenizer(True), schema, 100)
    assert plain.identity() == {}


def test_no_prompt_says_what_to_set_and_lists_columns() -> None:
    message = refusal()
    assert "prompt.template" in message
    assert "id, text" in message


@pytest.mark.parametrize("key", ["template", "system", "prefill"])
def test_unknown_variable_names_the_setting(key: str) -> None:
    config: dict[str, Any] = {"template": "x", key: "{{ txet }}"}
    assert f"prompt.{key} uses txet" in refusal(**config)


def test_template_file_that_is_missing_or_wrong(tmp_path: Path) -> None:
    assert "nowhere.jinja is not a file" in refusal(template_file=str(tmp_path / "nowhere.jinja"))
    (tmp_path / "bad.jinja").write_text("a\n{{ text")
    assert "bad.jinja, line 2" in refusal(template_file=str(tmp_path / "bad.jinja"))


def test_columns_of_the_wrong_type() -> None:
    roles_only = pa.list_(pa.struct([("role", pa.string())]))
    for wrong in (pa.int64(), pa.list_(pa.string()), roles_only):
        assert "must be a list of structs" in refusal({"m": wrong}, messages="m")
    for wrong in (pa.string(), pa.list_(pa.float32())):
        assert "must be a list of integers" in refusal({"ids": wrong}, prompt_ids="ids")
    assert "prompt.messages=gone is not a column" in refusal(messages="gone")
    assert "prompt.prompt_ids=gone is not a column" in refusal(prompt_ids="gone")


def test_prompt_ids_refuse_settings_they_would_ignore() -> None:
    message = refusal({"ids": pa.list_(pa.int32())}, prompt_ids="ids", system="S", prefill="P")
    assert "prompt.system and prompt.prefill" in message


def test_tokenizer_without_chat_template() -> None:
    bare = make_tokenizer(True, None)
    message = refusal(tokenizer=bare, template="{{ text }}")
    assert "prompt.kind=completion" in message
    assert "prompt.chat_template" in message
    assert texts(build({"text": ["x"]}, bare, template="{{ text }}", chat_template=CHAT)) == [
        "<|user|>x<|end|><|assistant|>"
    ]

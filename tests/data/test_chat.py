from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchrun.config import PromptConfig
from batchrun.data.chat import RESERVED_KWARGS, ChatTemplate
from batchrun.data.messages import message, parse_messages
from batchrun.errors import InputError
from tests.data.tiny import CHAT, CHAT_WITH_BOS, CHAT_WITHOUT_SYSTEM, make_tokenizer


class Named:
    """A tokenizer with several named chat templates."""

    def __init__(self, templates: dict[str, str]) -> None:
        self.inner = make_tokenizer(True)
        self.chat_template = templates

    def get_chat_template(self, name: str | None) -> str:
        return str(type(self.inner).get_chat_template(self, name))


def made(tokenizer: Any = None, folders: list[Path] | None = None, **config: Any) -> ChatTemplate:
    return ChatTemplate(PromptConfig(**config), tokenizer or make_tokenizer(True), folders or [])


def test_given_text_file_and_own_template(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CHAT_WITH_BOS)
    assert made().text == CHAT
    assert made(chat_template=CHAT_WITH_BOS).text == CHAT_WITH_BOS
    assert made(folders=[tmp_path], chat_template="chat.jinja").text == CHAT_WITH_BOS
    with pytest.raises(InputError, match=r"prompt\.chat_template=other\.jinja is not a file"):
        made(chat_template="other.jinja")


def test_tokenizer_with_named_templates() -> None:
    named = Named({"default": CHAT, "rag": CHAT_WITH_BOS})
    assert made(named).text == CHAT
    assert made(named, chat_template="rag").text == CHAT_WITH_BOS
    with pytest.raises(InputError, match=r"\['rag', 'tools'\].*prompt\.chat_template"):
        made(Named({"rag": CHAT, "tools": CHAT}))


def test_refusal_carries_the_templates_words() -> None:
    chat = made(chat_template=CHAT_WITHOUT_SYSTEM)
    chat.check(False, [])
    with pytest.raises(InputError, match=r"System role not supported; .*move prompt\.system into the template"):
        chat.check(True, [])


def test_refusal_of_examples() -> None:
    chat = made(chat_template="{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}x")
    chat.check(False, [])
    with pytest.raises(InputError, match="one turn only"):
        chat.check(False, [message("user", "q"), message("assistant", "a")])


def test_broken_template_is_refused() -> None:
    with pytest.raises(InputError, match="refuses a trial conversation"):
        made(chat_template="{% for m in %}").check(False, [])


@pytest.mark.parametrize("key", sorted(RESERVED_KWARGS))
def test_reserved_kwargs(key: str) -> None:
    with pytest.raises(InputError, match=f"cannot set {key}"):
        made(chat_template_kwargs={key: True})


def test_parsed_messages_keep_other_keys_and_drop_nulls() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}], "name": None}
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert parse_messages([call, parts]) == [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}, parts]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        ("null", "null"),
        ([], "no messages"),
        ("[]", "no messages"),
        ("[{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("7", "not a list of messages but int"),
        ({"role": "user"}, "not a list of messages but dict"),
        (["hi"], "message 0 is not an object"),
        ([None], "message 0 is not an object"),
        ([{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}], "message 1 has role 'robot'"),
        ([{"role": None, "content": "a"}], "message 0 has role None"),
        ([{"role": ["user"], "content": "a"}], r"message 0 has role \['user'\]"),
        ([{"role": "user", "content": None}], r"message 0 \(user\) has no content"),
        ([{"role": "user", "content": 5}], r"message 0 \(user\) has content that is neither"),
    ],
)
def test_bad_messages_say_what_is_wrong(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_messages(value)

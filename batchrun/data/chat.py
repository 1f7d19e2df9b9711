"""The chat template: which one, whether it takes the job's messages, and its text for a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchrun.config import PromptConfig
from batchrun.data.messages import Message, message
from batchrun.data.templates import read_text
from batchrun.data.tools import Tools
from batchrun.errors import InputError

RESERVED_KWARGS = {
    "conversation",
    "chat_template",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "sanitize_control_tokens",
}


class ChatTemplate:
    """`text` is `prompt.chat_template` (a template, a file, or a name the tokenizer knows) or the tokenizer's own.

    Raises InputError if there is none, or `prompt.chat_template_kwargs` sets what batchrun sets.
    """

    def __init__(self, config: PromptConfig, tokenizer: Any, folders: Sequence[Path]) -> None:
        self.tokenizer = tokenizer
        self.text = _template_text(config.chat_template, tokenizer, folders)
        self.kwargs = dict(config.chat_template_kwargs)
        self.generation_prompt = True  # whether a conversation ends where the answer begins
        reserved = sorted(RESERVED_KWARGS & self.kwargs.keys())
        if reserved:
            raise InputError(f"prompt.chat_template_kwargs cannot set {', '.join(reserved)}: batchrun sets them itself")

    def render(self, messages: list[Message], tools: Tools | None = None) -> str:
        """The conversation, up to the point where the answer begins. Raises whatever the template raises, ValueError
        for tools that it would not show."""
        if tools and "tools" not in self.text:
            raise ValueError("it shows the model no tools: set another with prompt.chat_template")
        # Some releases of transformers leave out what is None, and others show templates the word.
        said = [{key: value for key, value in message.items() if value is not None} for message in messages]
        text: str = self.tokenizer.apply_chat_template(
            said,
            tools=tools,
            chat_template=self.text,
            tokenize=False,
            add_generation_prompt=self.generation_prompt,
            **self.kwargs,
        )
        return text

    def check(self, has_system: bool, examples: list[Message], tools: Tools | None = None) -> None:
        """Render a conversation of the job's shape. Raises InputError with the template's own words if it refuses."""
        system = [message("system", "text")] if has_system else []
        try:
            self.render([*system, *examples, message("user", "text")], tools)
        except Exception as error:
            remedy = "; if it takes no system message, move prompt.system into the template" if has_system else ""
            raise InputError(f"the chat template refuses a trial conversation: {reason(error)}{remedy}") from error


def chat_template_text(config: PromptConfig, tokenizer: Any, folders: Sequence[Path]) -> str | None:
    """The chat template that prompts go through, None if they go through none. Raises InputError if it is not there."""
    if config.kind != "chat" or config.prompt_ids is not None:
        return None
    return _template_text(config.chat_template, tokenizer, folders)


def _template_text(given: str | None, tokenizer: Any, folders: Sequence[Path]) -> str:
    own = getattr(tokenizer, "chat_template", None)
    if given is None and own is None:
        raise InputError(
            "the tokenizer has no chat template: use prompt.kind=completion, or give one with prompt.chat_template"
        )
    if given is not None and not (isinstance(own, dict) and given in own):
        return given if "{" in given else read_text("prompt.chat_template", given, folders)
    try:
        text: str = tokenizer.get_chat_template(given)
    except ValueError as error:
        raise InputError(f"{error} Choose one with prompt.chat_template") from error
    return text


def reason(error: Exception) -> str:
    """What an exception says, or its name if it says nothing."""
    return str(error) or type(error).__name__

"""How a row becomes token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchrun.config.base import in_range, one_of, setting
from batchrun.errors import ConfigError

PROMPT_KINDS = ("chat", "completion")
OVERLONG = ("error", "truncate_left", "truncate_right", "truncate_middle", "skip")
ON_EMPTY = ("error", "skip", "send")


@dataclass
class PromptConfig:
    """How a row becomes token ids: exactly one of template, template_file, messages, prompt_ids, prompts."""

    kind: str = setting("chat", "chat: through the model's chat template; completion: the text as it is", identity=True)
    template: str | None = setting(None, "Jinja2 template over the row's columns", identity=True)
    template_file: str | None = setting(
        None, "file with the template; looked up beside the job, then as a path", identity=True
    )
    variables: dict[str, Any] = setting(
        {},
        "variables of the templates, as in prompt.variables.language=French; a column of that name comes first",
        identity=True,
    )
    messages: str | None = setting(None, "column with a list of {role, content}", identity=True)
    prompt_ids: str | None = setting(None, "column with ready token ids", identity=True)
    prompts: dict[str, str] = setting(
        {},
        "several prompts for a row, by the name of the column for each answer: templates that know the earlier ones",
        identity=True,
    )
    turns: list[str] = setting(
        [],
        "further turns of the conversation: templates of what the user says next, which know the earlier answers",
        identity=True,
    )
    params: str | None = setting(
        None, "column with a row's own sampling parameters: a struct or JSON text with keys of sampling", identity=True
    )
    system: str | None = setting(None, "system prompt (a Jinja2 template too)", identity=True)
    examples: list[dict[str, str]] = setting([], "few-shot examples: a list of {user, assistant}", identity=True)
    prefill: str | None = setting(None, "text that the answer starts with (a Jinja2 template too)", identity=True)
    chat_template: str | None = setting(None, "chat template text, or a file, in place of the model's", identity=True)
    chat_template_kwargs: dict[str, Any] = setting({}, "extra variables for the chat template", identity=True)
    tools: Any = setting(
        None,
        "schemas of functions that the chat template shows: a list, or a JSON file with one",
        identity=True,
    )
    tools_column: str | None = setting(
        None, "column with a row's own tools, in place of these: JSON text of a list, or a list", identity=True
    )
    overlong: str = setting(
        "error",
        "what becomes of a prompt that is too long: error, skip, or truncate_left, _right or _middle to cut its text",
        identity=True,
    )
    reserve_tokens: int | None = setting(
        None,
        "tokens of the window that a prompt must leave; default: 1, and the row's max_tokens where prompts are cut",
        identity=True,
    )
    on_empty: str = setting(
        "error",
        "what becomes of a row whose columns in the prompt are all null or blank: error, skip or send",
        identity=True,
    )

    def __post_init__(self) -> None:
        one_of("prompt.kind", self.kind, PROMPT_KINDS)
        one_of("prompt.overlong", self.overlong, OVERLONG)
        one_of("prompt.on_empty", self.on_empty, ON_EMPTY)
        in_range("prompt.reserve_tokens", self.reserve_tokens, 1)
        given = [k for k in ("template", "template_file", "messages", "prompt_ids") if getattr(self, k) is not None]
        given += ["prompts"] if self.prompts else []
        if len(given) > 1:
            raise ConfigError(
                f"prompt.{' and prompt.'.join(given)} are both set: a prompt has one source; set the others to null"
            )
        if self.turns and (self.kind != "chat" or self.prompts or self.prompt_ids):
            raise ConfigError(
                "prompt.turns goes on with a conversation: it needs prompt.kind=chat, and neither prompt.prompts nor "
                "prompt.prompt_ids"
            )
        for example in self.examples:
            if set(example) != {"user", "assistant"}:
                raise ConfigError(
                    f"prompt.examples has {dict(example)}: each example needs the keys user and assistant, and no other"
                )
        if self.tools is not None and not isinstance(self.tools, (str, list)):
            raise ConfigError(f"prompt.tools={self.tools!r} must be a list of schemas, or a JSON file with one")
        if (self.tools is not None or self.tools_column) and (self.kind == "completion" or self.prompt_ids):
            raise ConfigError("prompt.tools and prompt.tools_column are shown by a chat template: use prompt.kind=chat")
        if self.kind == "completion" and (self.system or self.examples or self.messages or self.chat_template):
            raise ConfigError(
                "prompt.kind=completion sends the text as it is: put system text and examples "
                "in the template, or use prompt.kind=chat"
            )

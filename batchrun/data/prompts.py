"""From a row to token ids: template, messages, chat template, prefill, tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchrun.config import PromptConfig
from batchrun.data.chat import ChatTemplate, reason
from batchrun.data.continuations import Continuations, Joiner
from batchrun.data.formats.base import ROW_ERROR
from batchrun.data.messages import (
    SYSTEM_ROLES,
    Message,
    NoMessages,
    is_empty,
    is_list,
    is_messages_type,
    longest_turn,
    message,
    parse_messages,
    storage_type,
)
from batchrun.data.prompt import Draft, Prompt, RowError
from batchrun.data.row_params import is_params_type, parse_params
from batchrun.data.schemas import column_list
from batchrun.data.templates import Template, read_text
from batchrun.data.tokens import vocab_size
from batchrun.data.tools import Tools, is_tools_type, job_tools, parse_tools
from batchrun.data.values import clean_text, is_blank, to_python
from batchrun.data.window import Window
from batchrun.errors import ErrorType, InputError

ANSWERS = "answers"  # what templates call the answers to the row's prompts so far: a list, or by the prompts' names

log = logging.getLogger(__name__)


class PromptBuilder:
    """Turns batches of rows into prompts. Everything that can be known without rows is checked on construction.

    `tokenizer` is a transformers tokenizer; `schema` holds the columns there are; `max_model_len` and `max_tokens`
    bound the prompts as in Window; relative template files are looked up in `template_folders` first; `continuations`
    are what a task scores after each prompt.
    Raises InputError.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Any,
        schema: pa.Schema,
        max_model_len: int,
        template_folders: Sequence[Path] = (),
        max_tokens: int = 1,
        continuations: Continuations | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.schema = schema
        self.folders = template_folders
        policies = {"empty_prompt": config.on_empty, "prompt_too_long": config.overlong}
        self.skipped = {error_type for error_type, policy in policies.items() if policy == "skip"}
        self.template = self._prompt_template()
        self.system = self._optional_template("system", config.system)
        self.prefill = self._optional_template("prefill", config.prefill)
        self.following = self._following_templates()
        self.tools = job_tools(config.tools, template_folders)
        self.examples = [message(role, example[role]) for example in config.examples for role in ("user", "assistant")]
        self.continuations = continuations
        self._look_for_idle_variables()
        self._check_columns()
        self.columns = self._needed_columns()
        self.window = Window(config, tokenizer, max_model_len, max_tokens)
        self.joiner: Joiner | None = None
        if continuations is not None:
            self.joiner = Joiner(continuations, tokenizer, self.window.leading, max_model_len)
        self.vocab_size = vocab_size(tokenizer) if config.prompt_ids else 0
        self.chat_template: ChatTemplate | None = None
        if config.kind == "chat" and config.prompt_ids is None:
            self.chat_template = ChatTemplate(config, tokenizer, template_folders)
            trial = [message("user", "text"), message("assistant", "text")] if config.turns else []
            self.chat_template.check(self.system is not None, self.examples + trial, self.tools)

    def identity(self) -> dict[str, str]:
        """Texts that settings only point to, for the fingerprint: the template file's and the chat template's."""
        texts = {}
        if self.config.template_file is not None and self.template is not None:
            texts["prompt.template_file (text)"] = self.template.text
        if self.chat_template is not None:
            texts["prompt.chat_template (text)"] = self.chat_template.text
        if self.tools is not None:
            texts["prompt.tools (text)"] = json.dumps(self.tools)
        return texts

    def build(self, batch: pa.RecordBatch) -> list[Prompt]:
        """One prompt a row, in row order. `batch` has at least `columns`. A row that fails is a Prompt with `error`."""
        columns = [to_python(batch.column(name)) for name in self.columns]
        rows = zip(*columns, strict=True) if columns else [()] * batch.num_rows
        broken = batch.column(ROW_ERROR).to_pylist() if ROW_ERROR in batch.schema.names else [None] * batch.num_rows
        drafts = [
            self._draft(dict(zip(self.columns, values, strict=True)))
            if why is None
            else Draft(Prompt([], "invalid_row", why))
            for values, why in zip(rows, broken, strict=True)
        ]
        return self._finished(drafts)

    def _finished(self, drafts: list[Draft]) -> list[Prompt]:
        """The prompts as token ids in the window."""
        prompts = [draft.prompt for draft in drafts]
        self.window.tokenize([prompt for prompt in prompts if prompt.text is not None])
        if self.joiner is not None:
            self.joiner.measure(prompts)
        for draft in drafts:
            self.window.fit(draft)
        if self.joiner is not None:
            self.joiner.join(prompts)
        for prompt in prompts:
            prompt.skipped = prompt.error_type in self.skipped
        return prompts

    def _prompt_template(self) -> Template | None:
        config = self.config
        if config.prompts:
            name, text = next(iter(config.prompts.items()))
            return self._compiled(f"prompt.prompts.{name}", text)
        if config.template is not None:
            return self._compiled("prompt.template", config.template)
        if config.template_file is not None:
            text = read_text("prompt.template_file", config.template_file, self.folders)
            return self._compiled(f"prompt.template_file={config.template_file}", text)
        if config.messages is None and config.prompt_ids is None:
            raise InputError(
                "the job has no prompt: set prompt.template (or template_file), prompt.messages or prompt.prompt_ids; "
                f"the columns are {column_list(self.schema.names)}"
            )
        return None

    def _following_templates(self) -> list[Template]:
        """Those of a row's prompts after the first one. They know the earlier answers by the name ANSWERS."""
        later = list(self.config.prompts.items())[1:]
        texts = {f"prompt.prompts.{name}": text for name, text in later}
        texts |= {f"prompt.turns[{number}]": text for number, text in enumerate(self.config.turns)}
        if texts and ANSWERS in self.schema.names:
            raise InputError(
                f"the input has a column {ANSWERS}, by which name prompts know the earlier answers: leave it out with "
                "input.columns"
            )
        return [self._compiled(key, text, ANSWERS) for key, text in texts.items()]

    def _optional_template(self, name: str, text: str | None) -> Template | None:
        return None if text is None else self._compiled(f"prompt.{name}", text)

    def _compiled(self, key: str, text: str, *more: str) -> Template:
        """A template over the columns, the names `more` and the job's variables."""
        return Template(key, text, [*self.schema.names, *more], self.config.variables)

    def _look_for_idle_variables(self) -> None:
        """Most likely they are misspelt; or the job's template was replaced by one without them."""
        used = {name for template in self._templates() for name in (*template.used, *template.columns)}
        for name in sorted(set(self.config.variables) - used):
            log.warning("prompt.variables.%s is used by no template", name)

    def _check_columns(self) -> None:
        config = self.config
        if config.messages is not None:
            found = self._type_of("prompt.messages", config.messages)
            if not is_messages_type(found):
                raise InputError(
                    f"prompt.messages={config.messages} has type {found}: "
                    "it must be a list of structs with role and content, or JSON text of such a list"
                )
        if config.prompt_ids is not None:
            found = storage_type(self._type_of("prompt.prompt_ids", config.prompt_ids))
            if not is_list(found) or not pa.types.is_integer(found.value_type):
                raise InputError(
                    f"prompt.prompt_ids={config.prompt_ids} has type {found}: it must be a list of integers"
                )
            ignored = [key for key in ("system", "examples", "prefill", "chat_template") if getattr(config, key)]
            if ignored:
                raise InputError(
                    f"prompt.prompt_ids sends ready token ids, so prompt.{' and prompt.'.join(ignored)} would not be "
                    "used: set the others to null"
                )
        if config.tools_column is not None:
            found = self._type_of("prompt.tools_column", config.tools_column)
            if not is_tools_type(found):
                raise InputError(
                    f"prompt.tools_column={config.tools_column} has type {found}: it must be JSON text of a list of "
                    "schemas, or a list of them"
                )
        if config.params is not None:
            found = self._type_of("prompt.params", config.params)
            if not is_params_type(found):
                raise InputError(
                    f"prompt.params={config.params} has type {found}: it must be a struct with names of the sampling "
                    "section, or JSON text of one"
                )

    def _type_of(self, key: str, column: str) -> pa.DataType:
        if column not in self.schema.names:
            raise InputError(f"{key}={column} is not a column; the columns are {column_list(self.schema.names)}")
        return self.schema.field(column).type

    def _needed_columns(self) -> list[str]:
        config = self.config
        needed = {name for name in (config.messages, config.prompt_ids, config.params, config.tools_column) if name}
        for template in (*self._templates(), self.continuations):
            needed |= set(template.columns if template else ())
        return [name for name in self.schema.names if name in needed]

    def _templates(self) -> list[Template]:
        return [template for template in (self.template, self.system, self.prefill, *self.following) if template]

    def _draft(self, row: dict[str, Any]) -> Draft:
        try:
            for name, value in row.items():
                if isinstance(value, ValueError):
                    raise RowError("invalid_row", f"column {name}: {value}")
            params = None if self.config.params is None else self._params(row[self.config.params])
            if self.config.prompt_ids is not None:
                draft = Draft(Prompt(self._ready_ids(row[self.config.prompt_ids]), params=params))
            else:
                follow = partial(self._follow, row, params) if self.following else None
                body, whole = self._text(row)
                tools = self.config.tools_column is None or bool(self._row_tools(row))
                draft = Draft(Prompt([], text=whole(body), params=params, tools=tools, follow=follow), body, whole)
            return draft if self.joiner is None else self.joiner.announce(draft, row)
        except RowError as error:
            return Draft(Prompt([], error.error_type, clean_text(str(error))))

    def _follow(self, row: dict[str, Any], params: dict[str, Any] | None, answers: Sequence[str]) -> Prompt | None:
        """The row's next prompt."""
        if len(answers) > len(self.following):
            return None
        follow = partial(self._follow, row, params)
        try:
            body, whole = self._text(row, answers)
            tools = self.config.tools_column is None or bool(self._row_tools(row))
            draft = Draft(Prompt([], text=whole(body), params=params, tools=tools, follow=follow), body, whole)
        except RowError as error:
            draft = Draft(Prompt([], error.error_type, clean_text(str(error)), follow=follow))
        return self._finished([draft])[0]

    def _text(self, row: dict[str, Any], answers: Sequence[str] = ()) -> tuple[str, Callable[[str], str]]:
        """The text of the prompt that comes after `answers` which may be cut, and what makes the whole of it."""
        prefill = render(self.prefill, row) if self.prefill else ""
        given = self._given(row, answers)
        if self.chat_template is None:
            return clean_text(given[0]["content"]), lambda body: clean_text(body + prefill)
        given += self._turns(row, prefill, answers)
        turn = longest_turn(given)
        messages, tools = self._conversation(given, row), self._row_tools(row)
        body = clean_text(turn["content"]) if turn else ""
        return body, lambda body: clean_text(self._rendered(messages, turn, body, tools) + prefill)

    def _turns(self, row: dict[str, Any], prefill: str, answers: Sequence[str]) -> list[Message]:
        """What was said after the first prompt: each answer, and what the user says to it."""
        said: list[Message] = []
        for number in range(len(answers) if self.config.turns else 0):
            known = row | {ANSWERS: list(answers[: number + 1])}
            text = self._body(known, self.following[number])
            said += [message("assistant", prefill + answers[number]), message("user", text)]
        return said

    def _named_body(self, row: dict[str, Any], answers: Sequence[str]) -> str:
        """What is asked by the first of prompt.prompts that has no answer yet."""
        if not answers:
            return self._body(row)
        known = dict(zip(self.config.prompts, answers, strict=False))
        return self._body(row | {ANSWERS: known}, self.following[len(answers) - 1])

    def _given(self, row: dict[str, Any], answers: Sequence[str]) -> list[Message]:
        """What is asked first."""
        if self.config.prompts:
            return [message("user", self._named_body(row, answers))]
        return [message("user", self._body(row))] if self.template else self._column_messages(row)

    def _rendered(self, messages: list[Message], turn: Message | None, body: str, tools: Tools | None) -> str:
        """The conversation with another text in place of one turn's."""
        assert self.chat_template is not None, "only chats have messages"
        try:
            return self.chat_template.render([{**m, "content": body} if m is turn else m for m in messages], tools)
        except Exception as error:
            raise RowError("template_error", f"chat template: {reason(error)}") from error

    def _conversation(self, given: list[Message], row: dict[str, Any]) -> list[Message]:
        """A row's messages among those of the job."""
        system: list[Message] = []
        if self.system and not any(given_message["role"] in SYSTEM_ROLES for given_message in given):
            text = render(self.system, row)
            system = [message("system", text)] if text.strip() else []
        if self.examples:
            leads = given[0]["role"] in SYSTEM_ROLES
            return [*system, *given[:leads], *self.examples, *given[leads:]]
        return system + given

    def _body(self, row: dict[str, Any], template: Template | None = None) -> str:
        template = template or self.template
        assert template is not None, "a prompt without messages or ids has a template"
        text = render(template, row)
        if not text.strip():
            raise RowError("empty_prompt", f"{template.key} renders no text for this row")
        names = [name for name in template.columns if name != ANSWERS]
        if names and self.config.on_empty != "send" and all(is_blank(row[name]) for name in names):
            raise RowError("empty_prompt", f"null or blank: {', '.join(names)}")
        return text

    def _column_messages(self, row: dict[str, Any]) -> list[Message]:
        column = str(self.config.messages)
        try:
            messages = parse_messages(row[column])
        except ValueError as error:
            kind: ErrorType = "empty_prompt" if isinstance(error, NoMessages) else "invalid_row"
            raise RowError(kind, f"column {column}: {error}") from error
        if self.config.on_empty != "send" and all(is_empty(message) for message in messages):
            raise RowError("empty_prompt", f"column {column}: no message has text")
        return messages

    def _row_tools(self, row: dict[str, Any]) -> Tools | None:
        """The row's own tools, or the job's."""
        column = self.config.tools_column
        try:
            return (parse_tools(row[column]) if column else None) or self.tools
        except ValueError as error:
            raise RowError("invalid_row", f"column {column}: {error}") from error

    def _params(self, value: Any) -> dict[str, Any]:
        try:
            return parse_params(value)
        except ValueError as error:
            raise RowError("invalid_row", f"column {self.config.params}: {error}") from error

    def _ready_ids(self, ids: Any) -> list[int]:
        column = self.config.prompt_ids
        if not ids:
            raise RowError("empty_prompt", f"column {column}: {'null' if ids is None else 'no token ids'}")
        for number, token in enumerate(ids):
            if token is None or not 0 <= token < self.vocab_size:
                raise RowError(
                    "invalid_row", f"column {column}: token {number} is {token}; ids go from 0 to {self.vocab_size - 1}"
                )
        return list(ids)


def render(template: Template, row: dict[str, Any]) -> str:
    """The template's text for a row. Raises RowError."""
    try:
        return template.render(row)
    except Exception as error:
        raise RowError("template_error", f"{template.key}: {reason(error)}") from error

"""From a row to token ids: template, messages, chat template, prefill, tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchrun.config import PromptConfig
from batchrun.data.chat import ChatTemplate, reason
from batchrun.data.formats.base import ROW_ERROR
from batchrun.data.messages import (
    SYSTEM_ROLES,
    Message,
    is_list,
    is_messages_type,
    message,
    parse_messages,
    storage_type,
)
from batchrun.data.row_params import is_params_type, parse_params
from batchrun.data.schemas import column_list
from batchrun.data.templates import Template, read_text
from batchrun.data.tokens import leading_specials, vocab_size, with_leading
from batchrun.data.values import clean_text, to_python
from batchrun.errors import InputError


@dataclass(slots=True)
class Prompt:
    """What one row sends to the model, or why it sends nothing.

    `ids` is kept for a prompt that is too long, so that its length can be reported. `text` is the whole rendered
    text, None for ready ids and for rows whose text could not be made.
    """

    ids: list[int]
    error_type: str | None = None  # template_error | invalid_row | empty_prompt | prompt_too_long
    error: str | None = None
    text: str | None = None
    params: dict[str, Any] | None = None  # the row's own sampling parameters, by their names in the config


class RowError(Exception):
    """One row cannot be sent. `error_type` is what its output row shows."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class PromptBuilder:
    """Turns batches of rows into prompts. Everything that can be known without rows is checked on construction.

    `tokenizer` is a transformers tokenizer; `schema` holds the columns there are; a prompt has fewer than
    `max_model_len` tokens, so that at least one can be generated; relative template files are looked up in
    `template_folders` first. Raises InputError.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Any,
        schema: pa.Schema,
        max_model_len: int,
        template_folders: Sequence[Path] = (),
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.schema = schema
        self.max_model_len = max_model_len
        self.folders = template_folders
        self.template = self._prompt_template()
        self.system = self._optional_template("system", config.system)
        self.prefill = self._optional_template("prefill", config.prefill)
        self.examples = [message(role, example[role]) for example in config.examples for role in ("user", "assistant")]
        self._check_columns()
        self.columns = self._needed_columns()
        self.leading = leading_specials(tokenizer)
        self.vocab_size = vocab_size(tokenizer) if config.prompt_ids else 0
        self.chat_template: ChatTemplate | None = None
        if config.kind == "chat" and config.prompt_ids is None:
            self.chat_template = ChatTemplate(config, tokenizer, template_folders)
            self.chat_template.check(self.system is not None, self.examples)

    def identity(self) -> dict[str, str]:
        """Texts that settings only point to, for the fingerprint: the template file's and the chat template's."""
        texts = {}
        if self.config.template_file is not None and self.template is not None:
            texts["prompt.template_file (text)"] = self.template.text
        if self.chat_template is not None:
            texts["prompt.chat_template (text)"] = self.chat_template.text
        return texts

    def build(self, batch: pa.RecordBatch) -> list[Prompt]:
        """One prompt a row, in row order. `batch` has at least `columns`. A row that fails is a Prompt with `error`."""
        columns = [to_python(batch.column(name)) for name in self.columns]
        rows = zip(*columns, strict=True) if columns else [()] * batch.num_rows
        broken = batch.column(ROW_ERROR).to_pylist() if ROW_ERROR in batch.schema.names else [None] * batch.num_rows
        prompts = [
            self._build_row(dict(zip(self.columns, values, strict=True)))
            if why is None
            else Prompt([], "invalid_row", why)
            for values, why in zip(rows, broken, strict=True)
        ]
        self._tokenize([prompt for prompt in prompts if prompt.text is not None])
        for prompt in prompts:
            self._check_length(prompt)
        return prompts

    def _prompt_template(self) -> Template | None:
        config = self.config
        if config.template is not None:
            return Template("prompt.template", config.template, self.schema.names)
        if config.template_file is not None:
            text = read_text("prompt.template_file", config.template_file, self.folders)
            return Template(f"prompt.template_file={config.template_file}", text, self.schema.names)
        if config.messages is None and config.prompt_ids is None:
            raise InputError(
                "the job has no prompt: set prompt.template (or template_file), prompt.messages or prompt.prompt_ids; "
                f"the columns are {column_list(self.schema.names)}"
            )
        return None

    def _optional_template(self, name: str, text: str | None) -> Template | None:
        return None if text is None else Template(f"prompt.{name}", text, self.schema.names)

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
        needed = {name for name in (self.config.messages, self.config.prompt_ids, self.config.params) if name}
        for template in (self.template, self.system, self.prefill):
            needed |= set(template.columns if template else ())
        return [name for name in self.schema.names if name in needed]

    def _build_row(self, row: dict[str, Any]) -> Prompt:
        try:
            for name, value in row.items():
                if isinstance(value, ValueError):
                    raise RowError("invalid_row", f"column {name}: {value}")
            params = None if self.config.params is None else self._params(row[self.config.params])
            if self.config.prompt_ids is not None:
                return Prompt(self._ready_ids(row[self.config.prompt_ids]), params=params)
            return Prompt([], text=clean_text(self._text(row)), params=params)
        except RowError as error:
            return Prompt([], error.error_type, clean_text(str(error)))

    def _text(self, row: dict[str, Any]) -> str:
        prefill = _render(self.prefill, row) if self.prefill else ""
        if self.chat_template is None:
            return self._body(row) + prefill
        messages = self._messages(row)
        try:
            return self.chat_template.render(messages) + prefill
        except Exception as error:
            raise RowError("template_error", f"chat template: {reason(error)}") from error

    def _messages(self, row: dict[str, Any]) -> list[Message]:
        given = [message("user", self._body(row))] if self.template else self._column_messages(row)
        system: list[Message] = []
        if self.system and not any(given_message["role"] in SYSTEM_ROLES for given_message in given):
            text = _render(self.system, row)
            system = [message("system", text)] if text.strip() else []
        if self.examples:
            leads = given[0]["role"] in SYSTEM_ROLES
            return [*system, *given[:leads], *self.examples, *given[leads:]]
        return system + given

    def _body(self, row: dict[str, Any]) -> str:
        assert self.template is not None, "a prompt without messages or ids has a template"
        text = _render(self.template, row)
        if not text.strip():
            raise RowError("empty_prompt", f"{self.template.key} renders no text for this row")
        return text

    def _column_messages(self, row: dict[str, Any]) -> list[Message]:
        column = str(self.config.messages)
        try:
            return parse_messages(row[column])
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
            raise RowError("invalid_row", f"column {column}: {'null' if ids is None else 'no token ids'}")
        for number, token in enumerate(ids):
            if token is None or not 0 <= token < self.vocab_size:
                raise RowError(
                    "invalid_row", f"column {column}: token {number} is {token}; ids go from 0 to {self.vocab_size - 1}"
                )
        return list(ids)

    def _tokenize(self, prompts: list[Prompt]) -> None:
        """Fill in `ids` of prompts with text: all in one call, or one by one to find the row that cannot be."""
        try:
            for prompt, ids in zip(prompts, self._ids([str(prompt.text) for prompt in prompts]), strict=True):
                prompt.ids = with_leading(ids, self.leading)
        except Exception as error:
            if len(prompts) == 1:
                prompts[0].error_type, prompts[0].error = "invalid_row", f"the tokenizer refuses the text: {error}"
                return
            for prompt in prompts:
                self._tokenize([prompt])

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _check_length(self, prompt: Prompt) -> None:
        if prompt.error_type is not None:
            return
        if not prompt.ids:
            prompt.error_type, prompt.error = "empty_prompt", "the prompt has no tokens"
        elif len(prompt.ids) >= self.max_model_len:
            prompt.error_type = "prompt_too_long"
            prompt.error = (
                f"the prompt has {len(prompt.ids)} tokens, and model.max_model_len={self.max_model_len} "
                f"leaves room for at most {self.max_model_len - 1}"
            )


def _render(template: Template, row: dict[str, Any]) -> str:
    try:
        return template.render(row)
    except Exception as error:
        raise RowError("template_error", f"{template.key}: {reason(error)}") from error

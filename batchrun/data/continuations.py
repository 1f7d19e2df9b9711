"""Texts whose likelihood after a row's prompt is asked for, as the tokens that follow those of the prompt.

Prompt and continuation are tokenised as one text, as they would have been in training: a continuation's tokens are
those of both together without those of the prompt, and spaces at the prompt's end count as the continuation's. Both
are what lm-evaluation-harness does. Where the border runs through a token, so that the prompt alone has other tokens
than in the whole, the continuation is tokenised alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from batchrun.border import tokens_after
from batchrun.config import ChooseConfig, PromptConfig
from batchrun.data.chat import reason
from batchrun.data.messages import is_list, is_text, storage_type
from batchrun.data.prompt import Draft, Prompt, RowError
from batchrun.data.schemas import column_list
from batchrun.data.templates import Template
from batchrun.data.tokens import plain_ids, with_leading
from batchrun.data.values import clean_text
from batchrun.errors import ConfigError, InputError

SPACES = " \t"
Tokens = tuple[int, ...]


class Continuations(ABC):
    """The texts that follow each row's prompt. `columns` are those that they are made of."""

    columns: Sequence[str] = ()
    delimiter = ""

    @abstractmethod
    def texts(self, row: dict[str, Any]) -> list[str]:
        """Those of one row, from its values by column. Raises RowError."""


class Labels(Continuations):
    """The labels of task=choose. Raises ConfigError, InputError."""

    def __init__(self, config: ChooseConfig, prompt: PromptConfig, schema: pa.Schema) -> None:
        self.labels = config.labels
        if self.labels is None:
            raise ConfigError(
                "task=choose needs labels: set choose.labels to a list, as in choose.labels=[good,bad], or to the name "
                "of a column with lists"
            )
        self.delimiter = config.delimiter or ""
        if config.delimiter is None and (prompt.kind == "completion" or prompt.prefill is not None):
            self.delimiter = " "
        if isinstance(self.labels, str):
            if self.labels not in schema.names:
                raise InputError(
                    f"choose.labels={self.labels} is not a column; the columns are {column_list(schema.names)}"
                )
            found = storage_type(schema.field(self.labels).type)
            if not is_list(found) or not is_text(found.value_type):
                raise InputError(f"choose.labels={self.labels} has type {found}: it must be a list of strings")
            self.columns = [self.labels]

    def texts(self, row: dict[str, Any]) -> list[str]:
        if not isinstance(self.labels, str):
            return list(self.labels)
        labels = row[self.labels] or []
        if len(labels) < 2 or len(set(labels)) < len(labels) or not all(labels):
            raise RowError(
                "invalid_row", f"column {self.labels}: {labels!r} must be two labels or more, all different, none empty"
            )
        return [clean_text(label) for label in labels]


class Ending(Continuations):
    """The one continuation of task=score: the text of a template. Raises InputError."""

    def __init__(self, template: str, schema: pa.Schema) -> None:
        self.template = Template("score.continuation", template, schema.names)
        self.columns = self.template.columns

    def texts(self, row: dict[str, Any]) -> list[str]:
        try:
            text = self.template.render(row)
        except Exception as error:
            raise RowError("template_error", f"score.continuation: {reason(error)}") from error
        if not text:
            raise RowError("empty_prompt", "score.continuation renders no text for this row")
        return [clean_text(text)]


class Joiner:
    """Gives prompts the tokens of their continuations: `announce` as a row is rendered, `measure` before the prompts
    are fitted into the window, and `join` after that."""

    def __init__(self, source: Continuations, tokenizer: Any, leading: list[int], max_model_len: int) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.leading = leading
        self.max_model_len = max_model_len

    def announce(self, draft: Draft, row: dict[str, Any]) -> Draft:
        """Note a row's continuations on its prompt, without the spaces at its end. Raises RowError."""
        prompt, whole = draft.prompt, draft.whole
        prompt.texts = self.source.texts(row)
        prompt.joint = self.source.delimiter
        if prompt.text is None or whole is None:
            return draft
        text = prompt.text.rstrip(SPACES)
        prompt.joint = prompt.text[len(text) :] or prompt.joint
        prompt.text = text
        return draft._replace(whole=lambda body: whole(body).rstrip(SPACES))

    def measure(self, prompts: list[Prompt]) -> None:
        """Tokens of each continuation alone: about as many as they will be."""
        good = [prompt for prompt in prompts if prompt.error_type is None]
        texts = list(dict.fromkeys(prompt.joint + text for prompt in good for text in prompt.texts))
        ids = dict(zip(texts, self._ids(texts), strict=True))
        for prompt in good:
            prompt.continuations = tuple(ids[prompt.joint + text] for text in prompt.texts)

    def join(self, prompts: list[Prompt]) -> None:
        """Tokens of each continuation after its prompt, or why the prompt cannot be sent with them."""
        good = [prompt for prompt in prompts if prompt.error_type is None]
        both = iter(self._ids([f"{p.text}{p.joint}{text}" for p in good if p.text is not None for text in p.texts]))
        for prompt in good:
            if prompt.text is not None:
                pairs = [(next(both), alone) for alone in prompt.continuations]
                prompt.continuations = tuple(
                    tokens_after(prompt.ids, with_leading(list(whole), self.leading), alone) for whole, alone in pairs
                )
            longest = max(map(len, prompt.continuations))
            if not all(prompt.continuations):
                prompt.error_type, prompt.error = "empty_prompt", "a continuation has no tokens"
            elif len(prompt.ids) + longest > self.max_model_len:
                prompt.error_type = "prompt_too_long"
                prompt.error = (
                    f"the prompt has {len(prompt.ids)} tokens and what follows it {longest}: more than "
                    f"model.max_model_len={self.max_model_len}"
                )

    def _ids(self, texts: list[str]) -> list[Tokens]:
        return list(map(tuple, plain_ids(self.tokenizer, texts)))

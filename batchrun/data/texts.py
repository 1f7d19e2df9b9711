"""Texts for a model that reads and does not answer: with the tokenizer's own special tokens, one by one or in pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchrun.config import PromptConfig
from batchrun.data.messages import Message, message
from batchrun.data.prompt import Draft, Prompt, RowError
from batchrun.data.prompts import PromptBuilder, render
from batchrun.data.templates import Template
from batchrun.data.values import clean_text
from batchrun.data.window import Window
from batchrun.errors import InputError


class TextBuilder(PromptBuilder):
    """Rows to texts of at most `max_length` tokens, special ones among them.

    `pair` are the templates of two texts in place of the prompt's one: with prompt.kind=completion they are tokenised
    as a pair, with chat they are a user's turn and its answer. `prefix` is put before each text; with `lower_case` all
    becomes small letters. Raises InputError.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Any,
        schema: pa.Schema,
        max_length: int,
        template_folders: Sequence[Path] = (),
        pair: tuple[str, str] | None = None,
        prefix: str = "",
        lower_case: bool = False,
    ) -> None:
        self.pair = pair
        self.query = None if pair is None else Template("rank.query", pair[0], schema.names, config.variables)
        self.prefix = prefix
        self.lower_case = lower_case
        super().__init__(config, tokenizer, schema, max_length, template_folders)
        self.window = TextWindow(config, tokenizer, max_length, special_tokens=self.chat_template is None)
        if self.chat_template is not None:
            self.chat_template.generation_prompt = False

    def _prompt_template(self) -> Template | None:
        if self.pair is None:
            return super()._prompt_template()
        config = self.config
        given = [k for k in ("template", "template_file", "messages", "prompt_ids") if getattr(config, k) is not None]
        if given:
            raise InputError(
                f"rank.query and rank.text take the place of prompt.{given[0]}: set it, or the two of them, to null"
            )
        return self._compiled("rank.text", self.pair[1])

    def _templates(self) -> list[Template]:
        return [*super()._templates(), *([self.query] if self.query else [])]

    def _given(self, row: dict[str, Any], answers: Sequence[str]) -> list[Message]:
        if self.query is None or self.chat_template is None:
            return super()._given(row, answers)
        return [message("user", self._query(row)), message("assistant", self._body(row))]

    def _draft(self, row: dict[str, Any]) -> Draft:
        draft = super()._draft(row)
        if self.query is not None and self.chat_template is None and draft.prompt.error_type is None:
            try:
                draft.prompt.first = clean_text(self._query(row))
            except RowError as error:
                return Draft(Prompt([], error.error_type, clean_text(str(error))))
        return draft

    def _text(self, row: dict[str, Any], answers: Sequence[str] = ()) -> tuple[str, Callable[[str], str]]:
        body, whole = super()._text(row, answers)
        if self.chat_template is not None:
            return body, whole
        return body, lambda body: self._prepared(whole(body))

    def _prepared(self, text: str) -> str:
        text = (self.prefix + text).strip()
        return text.lower() if self.lower_case else text

    def _query(self, row: dict[str, Any]) -> str:
        assert self.query is not None, "only pairs have a query"
        text = render(self.query, row)
        if not text.strip() and self.config.on_empty != "send":
            raise RowError("empty_prompt", "rank.query renders no text for this row")
        return text


class TextWindow(Window):
    """Texts may be `max_length` tokens long; what is cut is the text, as the tokenizer itself cuts, and never a special
    token. Without `special_tokens` the text holds them already, and a part of it is left out."""

    def __init__(self, config: PromptConfig, tokenizer: Any, max_length: int, special_tokens: bool) -> None:
        super().__init__(config, tokenizer, max_length, 1)
        self.special_tokens = special_tokens
        if special_tokens and config.overlong == "truncate_middle":
            raise InputError(
                "prompt.overlong=truncate_middle is not for texts that are read only: use truncate_right or "
                "truncate_left"
            )
        if self.truncates and special_tokens:
            tokenizer.truncation_side = config.overlong.removeprefix("truncate_")

    def _encode(self, prompts: list[Prompt], **options: Any) -> None:
        """Fill in `ids`, and `type_ids` of pairs."""
        if not self.special_tokens:
            super()._encode(prompts)
            return
        if not prompts:
            return
        texts = [str(prompt.text) for prompt in prompts]
        pairs = prompts[0].first is not None
        given = ([str(prompt.first) for prompt in prompts], texts) if pairs else (texts,)
        encoded = self.tokenizer(*given, return_attention_mask=False, verbose=False, **options)
        types = encoded.get("token_type_ids") if pairs else None
        for number, prompt in enumerate(prompts):
            prompt.ids = encoded["input_ids"][number]
            prompt.type_ids = None if types is None else types[number]

    def _rooms(self, prompt: Prompt) -> list[int]:
        return [self.max_model_len - (self.config.reserve_tokens or 0)]

    def _cut(self, draft: Draft, room: int) -> bool:
        if not (self.truncates and self.special_tokens) or draft.whole is None:
            return super()._cut(draft, room)
        prompt = draft.prompt
        before = len(prompt.ids)
        self._encode([prompt], truncation=True, max_length=room)
        prompt.truncated_tokens = before - len(prompt.ids)
        return len(prompt.ids) <= room

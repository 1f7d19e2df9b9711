"""Prompts in the model's window: token ids, and what becomes of a prompt that has too many of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from batchrun.config import PromptConfig
from batchrun.data.prompt import Draft, Prompt, RowError
from batchrun.data.tokens import leading_specials, plain_ids, with_leading
from batchrun.data.truncation import cut_ids, cut_text
from batchrun.data.values import clean_text
from batchrun.errors import InputError


class Window:
    """A prompt has fewer than `max_model_len` tokens, so that at least one can be generated; where prompts are cut, so
    few that `max_tokens` can, unless the row has its own. With `max_tokens` 0 nothing is generated, and a prompt may
    fill the window but for its continuations.

    Raises InputError for a reserve that leaves no room.
    """

    def __init__(self, config: PromptConfig, tokenizer: Any, max_model_len: int, max_tokens: int) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.max_tokens = max_tokens
        self.truncates = config.overlong.startswith("truncate")
        self.leading = leading_specials(tokenizer)
        if config.reserve_tokens is not None and config.reserve_tokens >= max_model_len:
            raise InputError(
                f"prompt.reserve_tokens={config.reserve_tokens} leaves no room for a prompt in "
                f"model.max_model_len={max_model_len}: set it lower"
            )

    def tokenize(self, prompts: list[Prompt]) -> None:
        """Fill in `ids` of prompts with text: all in one call, or one by one to find the row that cannot be."""
        try:
            self._encode(prompts)
        except Exception as error:
            if len(prompts) == 1:
                prompts[0].error_type, prompts[0].error = "invalid_row", f"the tokenizer refuses the text: {error}"
                return
            for prompt in prompts:
                self.tokenize([prompt])

    def _encode(self, prompts: list[Prompt]) -> None:
        for prompt, ids in zip(prompts, plain_ids(self.tokenizer, [str(p.text) for p in prompts]), strict=True):
            prompt.ids = with_leading(ids, self.leading)

    def fit(self, draft: Draft) -> None:
        """Cut the prompt or note why it cannot be sent, if it has no tokens or too many."""
        prompt = draft.prompt
        if prompt.error_type is not None:
            return
        if not prompt.ids:
            prompt.error_type, prompt.error = "empty_prompt", "the prompt has no tokens"
            return
        rooms = self._rooms(prompt)
        try:
            if any(len(prompt.ids) <= room or self._cut(draft, room) for room in rooms):
                return
        except RowError as error:  # the chat template refuses the shorter text
            prompt.error_type, prompt.error = error.error_type, clean_text(str(error))
            return
        prompt.error_type = "prompt_too_long"
        prompt.error = (
            f"the prompt has {len(prompt.ids)} tokens, and model.max_model_len={self.max_model_len} leaves room for at "
            f"most {rooms[-1]}"
        )
        if self.truncates:
            prompt.error += "; what may not be cut fills that alone"

    def _rooms(self, prompt: Prompt) -> list[int]:
        """Tokens that the prompt may have, the number to try first in front."""
        if self.max_tokens == 0:
            follows = max(map(len, prompt.continuations), default=0)
            return [self.max_model_len - max(follows, self.config.reserve_tokens or 0)]
        if self.config.reserve_tokens is not None:
            return [self.max_model_len - self.config.reserve_tokens]
        if not self.truncates:
            return [self.max_model_len - 1]
        wanted = (prompt.params or {}).get("max_tokens", self.max_tokens)
        # A completion that may be as long as the window must not push the prompt out of it.
        return [self.max_model_len - min(wanted, self.max_model_len // 2), self.max_model_len - 1]

    def _cut(self, draft: Draft, room: int) -> bool:
        """Make the prompt fit by leaving out a part of its body. False if that cannot be."""
        if not self.truncates:
            return False
        prompt, before, policy = draft.prompt, len(draft.prompt.ids), self.config.overlong
        if draft.whole is None:
            prompt.ids = cut_ids(prompt.ids, room, policy, self.tokenizer.bos_token_id) or prompt.ids
        elif cut := cut_text(draft.body, room, policy, self.tokenizer, partial(self._whole, draft.whole)):
            prompt.text, prompt.ids = cut
        prompt.truncated_tokens = before - len(prompt.ids)
        return len(prompt.ids) <= room

    def _whole(self, render: Callable[[str], str], body: str) -> tuple[str, list[int]]:
        text = render(body)
        return text, with_leading(plain_ids(self.tokenizer, [text])[0], self.leading)

"""Texts for an Encoder from Python: tokenised and cut as the model's files say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from batchrun.config import EmbedConfig, RankConfig
from batchrun.engine.checkpoint import Checkpoint
from batchrun.engine.encoder_config import TextForm, embedding, scores
from batchrun.engine.params import Completion, Request
from batchrun.engine.pooler import Pooler

Text = str | tuple[str, str]  # a text, or a pair of them


class Texts:
    """What a model makes of texts, and how they become requests. Raises what `embedding` and `scores` raise."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: Any, settings: EmbedConfig | RankConfig) -> None:
        self.tokenizer = tokenizer
        self.pooler: Pooler
        self.form = TextForm()
        if isinstance(settings, EmbedConfig):
            self.pooler, self.form = embedding(checkpoint, tokenizer, settings)
        else:
            self.pooler = scores(checkpoint, tokenizer, settings)

    def requests(self, texts: Sequence[Text]) -> list[Request]:
        """One request each, whose key is its number. Texts that are too long are cut at the right."""
        return [self._request(number, text) for number, text in enumerate(texts)]

    def _request(self, number: int, text: Text) -> Request:
        pair = (self._prepared(text),) if isinstance(text, str) else tuple(text)
        encoded = self.tokenizer(*pair, truncation=True, max_length=self.pooler.max_length, verbose=False)
        types = encoded.get("token_type_ids") if len(pair) == 2 else None
        return Request(number, encoded["input_ids"], type_ids=types)

    def _prepared(self, text: str) -> str:
        text = (self.form.prompt + text).strip()
        return text.lower() if self.form.lower_case else text


def stacked(completions: Sequence[Completion], size: int) -> np.ndarray:
    """Vectors float32 [texts, size]. Raises ValueError for a text that has none."""
    found = np.empty((len(completions), size), dtype=np.float32)
    for number, completion in enumerate(completions):
        if completion.values is None:
            raise ValueError(f"text {number}: {completion.error}")
        found[number] = completion.values
    return found

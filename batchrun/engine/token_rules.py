"""What a request says about single tokens, as ids of the model's vocabulary: biases, the allowed, the forbidden."""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from batchrun.engine.params import SamplingParams

REMEMBERED = 256  # sets of rules: most jobs have one for all their rows


class TokenRules(NamedTuple):
    """Ids are int64, each once in its array."""

    biased: np.ndarray  # [B]
    biases: np.ndarray  # float32 [B], added to the logits of `biased`
    allowed: np.ndarray | None  # [A]; None: all
    banned: np.ndarray  # [N]: bad words of one token
    heads: np.ndarray  # [W, L]: of bad words of several tokens, all but the last; -1 in front of shorter ones
    lasts: np.ndarray  # [W]: which must not follow these
    ends: np.ndarray  # [E]: what would end the row, and must not before min_tokens
    lasting: bool  # there is more than `ends`
    number: int  # from 1; the same for the same rules, as long as these are remembered


class RuleBook:
    """Reads the rules of requests, for one tokenizer and vocabulary. Equal rules are read once and shared."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: np.ndarray) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self._numbers = count(1)
        self._read = lru_cache(REMEMBERED)(self._read_rules)

    def of(self, params: SamplingParams) -> TokenRules | None:
        """The rules of a request, None if it has none.

        Raises ValueError for an id outside of the vocabulary, and for a bias whose text is not one token.
        """
        for token in params.stop_token_ids:
            self._checked("stop_token_ids", token)
        ends = (params.stop_token_ids, params.ignore_eos) if params.min_tokens else None
        if not (params.logit_bias or params.bad_words or params.allowed_token_ids or ends):
            return None
        return self._read(params.logit_bias, params.allowed_token_ids, params.bad_words, ends)

    def _read_rules(
        self,
        bias: tuple[tuple[int | str, float], ...],
        allowed: tuple[int, ...] | None,
        bad_words: tuple[str, ...],
        ends: tuple[tuple[int, ...], bool] | None,
    ) -> TokenRules:
        biases: dict[int, float] = {}
        for key, value in bias:
            token = self._one_token(key) if isinstance(key, str) else self._checked("logit_bias", key)
            if token in biases:
                raise ValueError(f"logit_bias names token {token} twice, the second time as {key!r}")
            biases[token] = value
        forbidden = {ids for word in bad_words for ids in self._spellings(word)}
        ending: set[int] = set()
        if ends is not None:
            stop_ids, ignore_eos = ends
            ending = {*stop_ids, *(() if ignore_eos else self.eos_ids.tolist())}
        several = sorted(ids for ids in forbidden if len(ids) > 1)
        width = max((len(ids) - 1 for ids in several), default=0)
        heads = [(-1,) * (width + 1 - len(ids)) + ids[:-1] for ids in several]
        return TokenRules(
            biased=np.array(list(biases), dtype=np.int64),
            biases=np.array(list(biases.values()), dtype=np.float32),
            allowed=None if allowed is None else _ids({self._checked("allowed_token_ids", token) for token in allowed}),
            banned=_ids({ids[0] for ids in forbidden if len(ids) == 1}),
            heads=np.array(heads, dtype=np.int64).reshape(len(several), width),
            lasts=np.array([ids[-1] for ids in several], dtype=np.int64),
            ends=_ids({token for token in ending if 0 <= token < self.vocab_size}),
            lasting=bool(biases or allowed or forbidden),
            number=next(self._numbers),
        )

    def _checked(self, name: str, token: int) -> int:
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"{name}: token {token} is not one of the model's: ids go from 0 to {self.vocab_size - 1}")
        return token

    def _one_token(self, text: str) -> int:
        ids = self._encode(text)
        if len(ids) != 1:
            raise ValueError(
                f"logit_bias: {text!r} is {len(ids)} tokens, {ids[:8]}: a bias is of one; name tokens by their ids"
            )
        return self._checked("logit_bias", ids[0])

    def _spellings(self, word: str) -> set[tuple[int, ...]]:
        """The word's tokens at the start of a text and after a space, which are others with most tokenizers."""
        spellings = {tuple(self._encode(text)) for text in (word, " " + word.lstrip())}
        for token in (token for ids in spellings for token in ids):
            self._checked("bad_words", token)
        return spellings - {()}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _ids(tokens: set[int]) -> np.ndarray:
    return np.array(sorted(tokens), dtype=np.int64)

"""What is made of a model's hidden states instead of the next token: an embedding, or scores. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EmbeddingPooler:
    """One vector of a text: its tokens' states pooled, sent through `dense` layers, cut, and brought to length 1.

    `dense` are folders with a layer each, in the form of sentence-transformers. The first `skip` tokens are a prompt
    that is not pooled.
    """

    pooling: str
    size: int  # numbers in an embedding
    normalize: bool
    max_length: int  # tokens of the longest text
    dense: tuple[Path, ...] = ()
    skip: int = 0


@dataclass(frozen=True, slots=True)
class ScorePooler:
    """A number for each label, from the model's own classification head."""

    labels: tuple[str, ...]
    activation: str  # none | sigmoid | softmax
    max_length: int  # tokens of the longest text

    @property
    def size(self) -> int:
        return len(self.labels)


Pooler = EmbeddingPooler | ScorePooler

from __future__ import annotations

from typing import Any

import pytest

from batchrun.data.tokens import leading_specials, vocab_size, with_leading
from tests.data.tiny import make_tokenizer


class Fixed:
    """A tokenizer that puts `before` and `after` around the token 9."""

    def __init__(self, before: list[int], after: list[int]) -> None:
        self.before, self.after = before, after

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [*self.before, 9, *self.after] if add_special_tokens else [9]}


@pytest.mark.parametrize(("before", "after"), [([], []), ([1], []), ([1, 2], []), ([1], [3]), ([], [3])])
def test_leading_specials_are_those_before_the_text(before: list[int], after: list[int]) -> None:
    assert leading_specials(Fixed(before, after)) == before


def test_leading_specials_of_real_tokenizers() -> None:
    assert leading_specials(make_tokenizer(True)) == [1]
    assert leading_specials(make_tokenizer(False)) == []


@pytest.mark.parametrize(
    ("ids", "leading", "expected"),
    [
        ([5], [], [5]),
        ([5], [1], [1, 5]),
        ([1, 5], [1], [1, 5]),
        ([1, 1, 5, 1], [1], [1, 5, 1]),
        ([1, 5], [1, 2], [1, 2, 1, 5]),
        ([], [1], [1]),
        ([1, 1, 5], [], [1, 1, 5]),
    ],
)
def test_with_leading(ids: list[int], leading: list[int], expected: list[int]) -> None:
    assert with_leading(ids, leading) == expected


def test_vocab_size_covers_ids_above_the_count() -> None:
    class Sparse:
        def __len__(self) -> int:
            return 2

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 99}

    assert vocab_size(Sparse()) == 100
    tokenizer = make_tokenizer(True)
    assert vocab_size(tokenizer) == len(tokenizer)

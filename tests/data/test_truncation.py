from __future__ import annotations

import string
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from batchrun.data.truncation import cut_ids, cut_text, token_spans
from tests.data.tiny import make_tokenizer

POLICIES = ["truncate_left", "truncate_right", "truncate_middle"]


@cache
def byte_tokenizer() -> Any:
    """Byte-level BPE with a few merges: characters beyond ASCII are several tokens, and words begin with a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the dog and the bird"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def cut(body: str, room: int, policy: str, tokenizer: Any, head: str = "", tail: str = "") -> str | None:
    """What is left of the body."""

    def whole(part: str) -> tuple[str, list[int]]:
        return head + part + tail, ids_of(tokenizer, head + part + tail)

    found = cut_text(body, room, policy, tokenizer, whole)
    if found is None:
        return None
    text, ids = found
    assert ids == ids_of(tokenizer, text)
    assert len(ids) <= room
    assert text.startswith(head)
    assert text.endswith(tail)
    return text[len(head) : len(text) - len(tail)]


@pytest.mark.parametrize(
    ("policy", "left"),
    [("truncate_left", "vwxyz"), ("truncate_right", "abcde"), ("truncate_middle", "abcyz")],
)
def test_each_policy_keeps_its_side_and_fills_the_room(policy: str, left: str) -> None:
    assert cut(string.ascii_lowercase, 9, policy, make_tokenizer(False), head="[[", tail="]]") == left


@pytest.mark.parametrize("policy", POLICIES)
def test_one_token_of_room_more_is_one_token_of_text_more(policy: str) -> None:
    body, tokenizer = string.ascii_lowercase, make_tokenizer(False)
    for room in range(5, 30):
        left = cut(body, room, policy, tokenizer, head="<<", tail=">>")
        assert left is not None
        assert len(left) == room - 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("room", [0, 3, 4])
def test_nothing_of_the_body_is_no_prompt(policy: str, room: int) -> None:
    assert cut("abc", room, policy, make_tokenizer(False), head="[[", tail="]]") is None


@pytest.mark.parametrize("policy", POLICIES)
def test_characters_of_several_tokens_are_whole_or_gone(policy: str) -> None:
    tokenizer, body = byte_tokenizer(), "日本語 naïve 👩‍🚀 Ωmega " * 3
    size = len(ids_of(tokenizer, body))
    assert size > 1.5 * len(body)
    for room in range(4, size):
        left = cut(body, room, policy, tokenizer)
        if left is None:
            assert room < 8
            continue
        assert "\ufffd" not in tokenizer.decode(ids_of(tokenizer, left))
        # The largest of these characters has four tokens, so no more than three at each edge are given away.
        assert len(ids_of(tokenizer, left)) > room - (8 if policy == "truncate_middle" else 4)


def test_words_are_not_glued_together_where_the_middle_was() -> None:
    body = "the cat and the dog and the bird and the cat"
    for room in range(4, 9):
        left = cut(body, room, "truncate_middle", byte_tokenizer())
        assert left is not None
        assert set(left.split()) <= set(body.split())


@given(st.text(max_size=60), st.integers(1, 40), st.sampled_from(POLICIES))
def test_what_is_left_comes_from_the_ends(body: str, room: int, policy: str) -> None:
    tokenizer = byte_tokenizer()
    if len(ids_of(tokenizer, body)) <= room:
        return
    left = cut(body, room, policy, tokenizer)
    if left is not None:
        pairs = [(left[:i], left[i:]) for i in range(len(left) + 1)]
        assert any(body.startswith(a) and body.endswith(b) for a, b in pairs)


def test_a_tokenizer_without_offsets_is_cut_by_length() -> None:
    class Slow:
        is_fast = False

        def __call__(self, text: str, **options: Any) -> Any:
            return byte_tokenizer()(text, add_special_tokens=False)

    body = "the cat and " * 20
    left = cut(body, 20, "truncate_right", Slow())
    assert left is not None
    assert body.startswith(left)
    assert len(ids_of(byte_tokenizer(), left)) > 10


def test_spans_are_in_characters() -> None:
    assert token_spans(byte_tokenizer(), "é a")[:2] == [(0, 1), (0, 1)]
    assert token_spans(make_tokenizer(True), "ab") == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("policy", "bos", "left"),
    [
        ("truncate_left", None, [7, 8, 9]),
        ("truncate_right", None, [1, 2, 3]),
        ("truncate_middle", None, [1, 2, 9]),
        ("truncate_left", 1, [1, 8, 9]),
        ("truncate_right", 1, [1, 2, 3]),
        ("truncate_middle", 1, [1, 2, 9]),
        ("truncate_left", 5, [7, 8, 9]),
    ],
)
def test_ids_are_cut_behind_the_first_token_of_a_text(policy: str, bos: int | None, left: list[int]) -> None:
    assert cut_ids([1, 2, 3, 4, 5, 6, 7, 8, 9], 3, policy, bos) == left


def test_ids_without_room_for_one_beside_the_first() -> None:
    assert cut_ids([1, 2, 3], 1, "truncate_left", 1) is None
    assert cut_ids([1, 2, 3], 1, "truncate_left", None) == [3]

"""Text that grows token by token equals text decoded whole, and stop strings are found wherever they lie."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchrun.engine.detokenizer import REPLACEMENT, IncrementalText, StopMatcher, whole_characters
from batchrun.engine.params import SamplingParams

MERGED = ["th", "he", "Ġt", "Ġth", "Ġthe", "end", "ĠE", "ĠEN", "ĠEND"]
MERGES = [
    ("t", "h"),
    ("h", "e"),
    ("Ġ", "t"),
    ("Ġt", "h"),
    ("Ġth", "e"),
    ("en", "d"),
    ("Ġ", "E"),
    ("ĠE", "N"),
    ("ĠEN", "D"),
]
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT) | st.sampled_from("the END é😀")
)


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte, a few longer ones, and one special token."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "en", *MERGED]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("e", "n"), *MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def word_pieces() -> PreTrainedTokenizerFast:
    """A tokenizer whose decoder puts spaces between words and drops the first."""
    pieces = ["▁once", "▁upon", "▁a", "▁time", "▁", "s", "."]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="▁"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


BYTES = byte_level()
WORDS = word_pieces()


def feed(
    tokenizer: Any, ids: list[int], stop: tuple[str, ...], skip: bool = True
) -> tuple[int, tuple[str, str] | None]:
    """(tokens read, match) of a matcher that gets the tokens one by one."""
    matcher = StopMatcher(tokenizer, SamplingParams(stop=stop, skip_special_tokens=skip))
    for count, token in enumerate(ids, start=1):
        if match := matcher.add(token):
            return count, match
    return len(ids), None


def by_whole_decodes(ids: list[int], stop: tuple[str, ...]) -> tuple[int, tuple[str, str] | None]:
    """The same by decoding everything again after each token."""
    for count in range(1, len(ids) + 1):
        text = BYTES.decode(ids[:count])
        found = [(text.index(s), -len(s), s) for s in stop if s in text]
        if found and not text.endswith(REPLACEMENT):
            at, _, s = min(found)
            return count, (text[:at], s)
    return len(ids), None


@given(TEXTS)
def test_pieces_add_up_to_the_text(text: str) -> None:
    incremental = IncrementalText(BYTES, skip_special_tokens=True)
    pieces = [incremental.add(token) for token in BYTES.encode(text)]
    assert "".join(pieces) == incremental.text == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=20))
def test_pieces_keep_the_spaces_of_word_tokenizers(ids: list[int]) -> None:
    incremental = IncrementalText(WORDS, skip_special_tokens=True)
    for token in ids:
        incremental.add(token)
    assert incremental.text.rstrip(" ") == WORDS.decode(ids).rstrip(" ")


@given(TEXTS, st.data())
def test_stops_are_found_as_by_whole_decodes(text: str, data: st.DataObject) -> None:
    inside = st.integers(0, max(0, len(text) - 1)).flatmap(
        lambda at: st.integers(at + 1, at + 4).map(lambda end: text[at:end] or "x")
    )
    stop = tuple(data.draw(st.lists(inside | st.sampled_from(["END", "the", "é"]), min_size=1, max_size=3)))
    ids = BYTES.encode(text)
    assert feed(BYTES, ids, stop) == by_whole_decodes(ids, stop)


def test_a_stop_string_across_token_borders_is_found() -> None:
    ids = BYTES.encode("say the END of it")
    assert len(BYTES.encode("say the END")) < len("say the END")
    assert feed(BYTES, ids, ("he EN",)) == (len(BYTES.encode("say the END")), ("say t", "he EN"))


def test_the_earliest_of_several_wins_and_of_two_at_one_place_the_longer() -> None:
    ids = BYTES.encode("go END")
    assert ids[-1] == BYTES.convert_tokens_to_ids("ĠEND")
    assert feed(BYTES, ids, ("ND", "EN", "D"))[1] == ("go ", "EN")
    assert feed(BYTES, ids, ("E", "END", "EN"))[1] == ("go ", "END")


def test_a_stop_string_may_end_the_text_at_once() -> None:
    assert feed(BYTES, BYTES.encode("END"), ("END",))[1] == ("", "END")


def test_a_character_in_several_tokens_appears_whole() -> None:
    ids = BYTES.encode("a😀b")
    assert len(ids) == 6
    incremental = IncrementalText(BYTES, skip_special_tokens=True)
    assert [incremental.add(token) for token in ids] == ["a", "", "", "", "😀", "b"]
    assert feed(BYTES, ids, ("😀",)) == (5, ("a", "😀"))


def test_bytes_that_never_become_a_character_do_not_hide_what_follows() -> None:
    broken = BYTES.encode("😀")[:2]
    ids = [*BYTES.encode("x"), *broken, *BYTES.encode("y END")]
    count, match = feed(BYTES, ids, ("END",))
    assert count == len(ids)
    assert match == (BYTES.decode(ids)[: -len("END")], "END")


@pytest.mark.parametrize(("skip", "found"), [(True, None), (False, ("ab", "<|end|>"))])
def test_special_tokens_are_text_only_when_they_are_shown(skip: bool, found: tuple[str, str] | None) -> None:
    ids = [*BYTES.encode("ab"), BYTES.eos_token_id, *BYTES.encode("c")]
    assert feed(BYTES, ids, ("<|end|>",), skip)[1] == found


@given(TEXTS, st.data())
def test_the_text_ends_before_or_behind_the_stop_and_not_before_min_tokens(text: str, data: st.DataObject) -> None:
    """A stop string counts from the token on that completes it, if that is behind the first `least`."""
    ids = BYTES.encode(text)
    at = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[at : at + data.draw(st.integers(1, 3))] or "x"
    least = data.draw(st.integers(0, len(ids) + 1))
    include = data.draw(st.booleans())
    params = SamplingParams(
        stop=(stop,), min_tokens=least, max_tokens=max(1, least), include_stop_str_in_output=include
    )
    matcher, found = StopMatcher(BYTES, params), None
    for token in ids:
        if found := matcher.add(token):
            break
    ends = [end for end in range(len(stop), len(text) + 1) if text[end - len(stop) : end] == stop]
    bytes_before = [len(text[:end].encode()) for end in ends]
    told = [len(BYTES.decode(ids[:n]).encode()) for n in range(1, len(ids) + 1)]
    late = [
        end
        for end, size in zip(ends, bytes_before, strict=True)
        if next(n for n, have in enumerate(told, 1) if have >= size and not BYTES.decode(ids[:n]).endswith(REPLACEMENT))
        > least
    ]
    if not late:
        assert found is None
    else:
        assert found == (text[: late[0]] if include else text[: late[0] - len(stop)], stop)


def longest_window(ids: list[int]) -> int:
    """Tokens in the longest list that is decoded while these come in."""

    class Counting:
        longest = 0

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(ids))
            return str(BYTES.decode(ids, skip_special_tokens=skip_special_tokens))

    counting = Counting()
    incremental = IncrementalText(counting, skip_special_tokens=True)
    for token in ids:
        incremental.add(token)
    return counting.longest


def test_each_token_decodes_a_short_window() -> None:
    assert longest_window(BYTES.encode("the end 😀 " * 50)) <= 8


@pytest.mark.parametrize("kind", ["bytes that are no character", "special tokens that are not shown"])
def test_the_window_is_short_whatever_comes(kind: str) -> None:
    junk = BYTES.encode("😀")[:1] if kind.startswith("bytes") else [BYTES.eos_token_id]
    ids = [*BYTES.encode("ab"), *junk * 300, *BYTES.encode("END")]
    assert longest_window(ids) < 50
    count, match = feed(BYTES, ids, ("END",))
    assert count == len(ids)
    assert match == (BYTES.decode(ids, skip_special_tokens=True)[: -len("END")], "END")


def test_a_character_that_a_limit_cuts_is_left_out() -> None:
    ids = BYTES.encode("a😀")
    assert [whole_characters(BYTES.decode(ids[:n])) for n in range(1, 6)] == ["a", "a", "a", "a", "a😀"]
    assert whole_characters("a" + REPLACEMENT * 9) == "a" + REPLACEMENT * 9, "it says so"

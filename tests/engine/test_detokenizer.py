"""Text that grows token by token equals text decoded whole, and stop strings are found wherever they lie."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchrun.engine.detokenizer import REPLACEMENT, IncrementalText, StopMatcher
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


def test_each_token_decodes_a_short_window() -> None:
    class Counting:
        longest = 0

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(ids))
            return str(BYTES.decode(ids, skip_special_tokens=skip_special_tokens))

    counting = Counting()
    incremental = IncrementalText(counting, skip_special_tokens=True)
    for token in BYTES.encode("the end 😀 " * 50):
        incremental.add(token)
    assert counting.longest <= 8

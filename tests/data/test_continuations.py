"""Where prompt and continuation meet, they are tokenised as one text."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchrun.config import ChooseConfig, PromptConfig
from batchrun.data.continuations import Ending, Labels
from batchrun.data.prompt import Prompt
from batchrun.data.prompts import PromptBuilder
from tests.data.tiny import make_tokenizer

SCHEMA = pa.schema([("text", pa.string()), ("labels", pa.list_(pa.string()))])


def merging_tokenizer() -> Any:
    """BPE that joins "a" and "b", also across the border of prompt and continuation, and " " with "b"."""
    vocab = {token: number for number, token in enumerate(["a", "b", "c", " ", "\n", "ab", " b"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), (" ", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def built(tokenizer: Any, text: str, labels: list[str], max_model_len: int = 100, **config: Any) -> Prompt:
    prompt = PromptConfig(**{"template": "{{ text }}", "kind": "completion", **config})
    source = Labels(ChooseConfig(labels=labels, delimiter=config.pop("delimiter", None)), prompt, SCHEMA)
    builder = PromptBuilder(prompt, tokenizer, SCHEMA, max_model_len, (), 0, source)
    (made,) = builder.build(pa.RecordBatch.from_pylist([{"text": text, "labels": None}], SCHEMA))
    return made


def tokens(tokenizer: Any, prompt: Prompt) -> tuple[list[str], list[list[str]]]:
    names = tokenizer.convert_ids_to_tokens
    return names(prompt.ids), [names(list(ids)) for ids in prompt.continuations]


def test_spaces_at_the_end_of_a_prompt_belong_to_what_follows() -> None:
    tokenizer = merging_tokenizer()
    for text in ("ca", "ca "):
        made = built(tokenizer, text, ["b", "c"])
        assert tokens(tokenizer, made) == (["c", "a"], [[" b"], [" ", "c"]])
    assert tokens(tokenizer, built(tokenizer, "ca  ", ["b", "c"])) == (["c", "a"], [[" ", " b"], [" ", " ", "c"]])


def test_a_border_inside_of_a_token_is_one_nevertheless() -> None:
    """ "a" + "bc" is "ab" "c" as one text: the prompt keeps its token, and the continuation is tokenised alone."""
    source = Ending("{{ labels[0] }}", SCHEMA)
    tokenizer = merging_tokenizer()
    config = PromptConfig(template="{{ text }}", kind="completion")
    builder = PromptBuilder(config, tokenizer, SCHEMA, 100, (), 0, source)
    rows = [{"text": "ca", "labels": ["bc"]}, {"text": "c", "labels": ["abc"]}]
    merged, clean = builder.build(pa.RecordBatch.from_pylist(rows, SCHEMA))
    assert tokens(tokenizer, merged) == (["c", "a"], [["b", "c"]])
    assert tokens(tokenizer, clean) == (["c"], [["ab", "c"]])


def test_what_stands_between_follows_from_the_kind_of_prompt() -> None:
    tokenizer = make_tokenizer(True)
    chat = built(tokenizer, "x", ["a", "b"], kind="chat")
    assert tokens(tokenizer, chat)[1] == [["a"], ["b"]]
    assert tokens(tokenizer, chat)[0][-1] == "<|assistant|>"
    prefilled = built(tokenizer, "x", ["a", "b"], kind="chat", prefill="It is")
    assert tokens(tokenizer, prefilled)[1] == [[" ", "a"], [" ", "b"]]
    made = built(tokenizer, "x", ["a", "b"])
    assert tokens(tokenizer, made) == (["<s>", "x"], [[" ", "a"], [" ", "b"]])


@pytest.mark.parametrize(("length", "fits"), [(5, True), (6, False)])
def test_prompt_and_longest_continuation_fit_the_window(length: int, fits: bool) -> None:
    made = built(make_tokenizer(True), "x" * length, ["abc", "b"], max_model_len=10)
    assert made.error_type == (None if fits else "prompt_too_long")


def test_rows_that_bring_no_labels_say_so() -> None:
    prompt = PromptConfig(template="{{ text }}", kind="completion")
    source = Labels(ChooseConfig(labels="labels"), prompt, SCHEMA)
    builder = PromptBuilder(prompt, make_tokenizer(True), SCHEMA, 100, (), 0, source)
    assert builder.columns == ["text", "labels"]
    rows = [{"text": "x", "labels": labels} for labels in (["a", "b"], None, ["a", None], ["a", ""])]
    good, *bad = builder.build(pa.RecordBatch.from_pylist(rows, SCHEMA))
    assert good.texts == ["a", "b"]
    assert [prompt.error_type for prompt in bad] == ["invalid_row"] * 3

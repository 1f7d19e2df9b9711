from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from batchrun.config import PromptConfig
from batchrun.data.prompt import Prompt
from batchrun.data.prompts import PromptBuilder
from batchrun.errors import InputError
from tests.data.test_truncation import POLICIES, byte_tokenizer
from tests.data.tiny import CHAT, make_tokenizer

WINDOW = 40


def build(rows: dict[str, Any] | pa.Table, tokenizer: Any = None, max_tokens: int = 1, **config: Any) -> list[Prompt]:
    table = rows if isinstance(rows, pa.Table) else pa.table(rows)
    tokenizer = tokenizer or make_tokenizer(True)
    builder = PromptBuilder(PromptConfig(**config), tokenizer, table.schema, WINDOW, (), max_tokens)
    return builder.build(table.select(builder.columns).to_batches()[0])


def shown(prompt: Prompt) -> str:
    assert prompt.error is None
    text = str(make_tokenizer(True).decode(prompt.ids))
    assert text == f"<s>{prompt.text}"
    return text


@pytest.mark.parametrize("policy", ["error", "skip", *POLICIES])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_prompts_at_the_window(policy: str, length: int) -> None:
    """Lengths count the token in front, so the window itself is already too long by one."""
    [prompt] = build({"text": ["x" * (length - 1)]}, template="{{ text }}", kind="completion", overlong=policy)
    if length < WINDOW:
        assert (len(prompt.ids), prompt.error_type, prompt.truncated_tokens) == (length, None, 0)
    elif policy in POLICIES:
        assert (len(prompt.ids), prompt.error_type) == (WINDOW - 1, None)
        assert prompt.truncated_tokens == length - WINDOW + 1
        assert prompt.ids[0] == 1
    else:
        assert (len(prompt.ids), prompt.error_type) == (length, "prompt_too_long")
        assert prompt.skipped == (policy == "skip")
        assert prompt.error is not None
        assert f"{length} tokens" in prompt.error


@pytest.mark.parametrize(
    ("policy", "left"),
    [("truncate_left", "tuvwxyz"), ("truncate_right", "abcdefg"), ("truncate_middle", "abcdxyz")],
)
def test_only_the_text_of_the_row_is_cut(policy: str, left: str) -> None:
    config = {"template": "{{ text }}", "system": "Be kind.", "prefill": "yes:", "overlong": policy}
    [prompt] = build({"text": ["abcdefghijklmnopqrstuvwxyz"]}, max_tokens=15, **config)
    assert shown(prompt) == f"<s><|system|>Be kind.<|end|><|user|>{left}<|end|><|assistant|>yes:"
    assert (len(prompt.ids), prompt.truncated_tokens) == (25, 19)


def test_examples_are_never_cut() -> None:
    config: dict[str, Any] = {"template": "{{ text }}", "examples": [{"user": "a longer one!", "assistant": "B"}]}
    [prompt] = build({"text": ["abcdefghijklmnopqrstuvwxyz"]}, overlong="truncate_left", **config)
    before = "<s><|user|>a longer one!<|end|><|assistant|>B<|end|>"
    assert shown(prompt) == f"{before}<|user|>jklmnopqrstuvwxyz<|end|><|assistant|>"


def test_room_is_kept_for_max_tokens_of_the_job_or_the_row() -> None:
    rows = {"text": ["x" * 100] * 3, "p": [None, '{"max_tokens": 30}', '{"max_tokens": 5}']}
    config: dict[str, Any] = {"template": "{{ text }}", "kind": "completion", "params": "p"}
    cut = build(rows, max_tokens=10, overlong="truncate_right", **config)
    # A row that may write the whole window full has half of it for its prompt.
    assert [len(prompt.ids) for prompt in cut] == [WINDOW - 10, WINDOW // 2, WINDOW - 5]
    assert [prompt.truncated_tokens for prompt in cut] == [101 - WINDOW + 10, 101 - WINDOW // 2, 101 - WINDOW + 5]
    kept = build({**rows, "text": ["x" * 37] * 3}, max_tokens=10, overlong="error", **config)
    assert [len(prompt.ids) for prompt in kept] == [38] * 3
    assert {prompt.error_type for prompt in kept} == {None}


@pytest.mark.parametrize(("policy", "error_type"), [("truncate_left", None), ("error", "prompt_too_long")])
def test_reserve_tokens_is_kept_free_under_every_policy(policy: str, error_type: str | None) -> None:
    config: dict[str, Any] = {"template": "{{ text }}", "kind": "completion", "reserve_tokens": 15, "overlong": policy}
    fits, long = build({"text": ["x" * 24, "x" * 25]}, max_tokens=10, **config)
    assert (len(fits.ids), fits.error_type, fits.truncated_tokens) == (25, None, 0)
    assert long.error_type == error_type
    assert error_type or len(long.ids) == 25


def test_a_reserve_as_long_as_the_window_is_refused() -> None:
    with pytest.raises(InputError, match=r"prompt\.reserve_tokens=40 .*model\.max_model_len=40"):
        build({"text": ["x"]}, template="{{ text }}", reserve_tokens=WINDOW)


def test_room_for_max_tokens_is_given_up_before_the_row_is() -> None:
    [prompt] = build({"text": ["abc"]}, template="{{ text }}", system="x" * 28, max_tokens=15, overlong="truncate_left")
    assert (prompt.error_type, len(prompt.ids), prompt.truncated_tokens) == (None, 37, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_fixed_parts_that_are_too_long_alone(policy: str) -> None:
    prompts = build({"text": ["x", "y" * 99]}, template="{{ text }}", system="s" * 50, overlong=policy)
    assert [prompt.error_type for prompt in prompts] == ["prompt_too_long"] * 2
    assert [len(prompt.ids) for prompt in prompts] == [57, 155]
    assert all(prompt.error and "fills that alone" in prompt.error for prompt in prompts)


def test_of_a_conversation_the_longest_turn_of_the_user_is_cut() -> None:
    talk = [
        {"role": "system", "content": "S" * 9},
        {"role": "user", "content": "abcdefghijkl" * 2},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "short"},
    ]
    [prompt] = build({"m": [json.dumps(talk)]}, messages="m", overlong="truncate_right")
    assert shown(prompt) == (
        "<s><|system|>SSSSSSSSS<|end|><|user|>abcdefghijklab<|end|><|assistant|>A<|end|><|user|>short<|end|><|assistant|>"
    )
    assert len(prompt.ids) == WINDOW - 1


def test_multi_byte_characters_at_the_cut() -> None:
    tokenizer = byte_tokenizer()
    texts = ["é" * n for n in range(10, 40)] + ["a" + "日" * n for n in range(8, 30)]
    for policy in POLICIES:
        for prompt in build({"text": texts}, tokenizer, template="{{ text }}", kind="completion", overlong=policy):
            assert prompt.error_type is None
            assert prompt.text is not None
            assert "\ufffd" not in tokenizer.decode(prompt.ids)
            assert WINDOW - 6 < len(prompt.ids) < WINDOW or not prompt.truncated_tokens


def test_ready_ids_are_cut_and_keep_the_token_in_front() -> None:
    table = pa.table({"ids": pa.array([[1, *range(5, 90)], list(range(5, 90))], pa.list_(pa.int32()))})
    with_bos, without = build(table, prompt_ids="ids", overlong="truncate_left")
    assert with_bos.ids == [1, *range(52, 90)]
    assert without.ids == list(range(51, 90))
    assert (with_bos.truncated_tokens, without.truncated_tokens) == (47, 46)


def test_a_chat_template_that_refuses_the_shorter_text() -> None:
    template = CHAT + "{% if messages[-1]['content'] | length < 50 %}{{ raise_exception('too short') }}{% endif %}"
    builder_rows = {"text": ["x" * 60]}
    [prompt] = build(
        builder_rows,
        template="{{ text }}",
        chat_template="{% if messages[-1]['content'] != 'text' %}" + template + "{% endif %}",
        overlong="truncate_left",
    )
    assert (prompt.error_type, prompt.error) == ("template_error", "chat template: too short")

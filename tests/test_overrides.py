from __future__ import annotations

import re
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from batchrun.compose import compose_config
from batchrun.config import leaves
from batchrun.errors import ConfigError
from batchrun.overrides import LEAVES, suggest, translate
from batchrun.typed import decode, encode, literal, split_list, unescape

OPTIONS = {"job": ["annotate", "demo"], "model": ["default"], "sampling": ["creative", "greedy"], "input": ["parquet"]}
AWKWARD = st.text(st.sampled_from(list("\\'\"${}[],=#:~ab \n")) | st.characters(codec="utf-8"), max_size=30)


def parsed(override: str) -> Any:
    """What Hydra's own parser makes of one override."""
    return OverridesParser.create().parse_override(override).value()


@given(AWKWARD)
@example("ends in \\")
@example("\\'")
def test_encoded_text_is_read_back_by_hydra(text: str):
    assert parsed(f"input.path={encode(text)}") == text
    assert decode(encode(text)) == text


@given(AWKWARD)
@example(r"\\${a}")
@example("${")
def test_literal_text_is_read_back_by_omegaconf(text: str):
    assert OmegaConf.to_container(OmegaConf.create({"a": literal(text)}), resolve=True) == {"a": text}


@given(AWKWARD.filter(lambda text: text != "null" and decode(text) == text))
@example("{{ text }} costs ${price}")
def test_a_prompt_typed_with_doubled_backslashes_arrives_as_it_is(text: str):
    [override, *others] = translate([f"prompt.template={text}".replace("\\", "\\\\")], OPTIONS)
    key, _, value = override.partition("=")
    assert OmegaConf.create({"a": parsed(f"{key}={value}")}).a == text
    assert others == ["prompt.template_file=null", "prompt.messages=null", "prompt.prompt_ids=null"]


@given(st.lists(AWKWARD.map(encode), max_size=4))
def test_a_list_of_quoted_texts_is_split_where_it_was_joined(items: list[str]):
    assert split_list(f"[{', '.join(items)}]") == items


@pytest.mark.parametrize(
    ("value", "items"),
    [
        ("[]", []),
        ("[a]", ["a"]),
        ("[a, b/x=1/*.parquet]", ["a", "b/x=1/*.parquet"]),
        ("[{a,b}.parquet,[0-9]]", ["{a,b}.parquet", "[0-9]"]),
        ("[it's, 5 o'clock]", ["it's", "5 o'clock"]),
    ],
)
def test_split_list(value: str, items: list[str]):
    assert split_list(value) == items


def test_escapes_stand_for_characters_and_nothing_else_changes():
    assert unescape(r"a\nb\tc\\n \d \x") == "a\nb\tc\\n \\d \\x"


@pytest.mark.parametrize(
    ("word", "override"),
    [
        ("input.limit=1e6", "input.limit=1000000"),
        ("input.limit=1_000", "input.limit=1000"),
        ("input.limit=null", "input.limit=null"),
        ("+input.limit=7", "input.limit=7"),
        ("sampling.temperature=1", "sampling.temperature=1.0"),
        ("sampling.stop_token_ids=1,2", "sampling.stop_token_ids=[1,2]"),
        ("sampling.stop_token_ids=[1,2]", "sampling.stop_token_ids=[1,2]"),
        ("model.revision=123", "model.revision='123'"),
        ("model.path='a b'", "model.path='a b'"),
        ("model=default", "model=default"),
        ("model=Qwen/Qwen2.5-0.5B-Instruct", "model.path='Qwen/Qwen2.5-0.5B-Instruct'"),
        ("prompt.chat_template_kwargs.enable_thinking=false", "++prompt.chat_template_kwargs.enable_thinking=false"),
        ("launch.index=${oc.env:RANK}", "launch.index=${oc.env:RANK}"),
    ],
)
def test_translate(word: str, override: str):
    assert translate([word], OPTIONS) == [override]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("annotate", "did you mean job=annotate?"),
        ("input.limit", "'input.limit' is not KEY=VALUE"),
        ("~sampling", "set it to null"),
        ("input.limit=1.5", "is not a whole number"),
        ("sampling.temperature=0,1", "sampling.temperature=0,1 is not a number"),
        ("job=anotate", "is not one of annotate, demo; did you mean job=annotate?"),
        ("job=mine/own.yaml", "--config-dir"),
        ("job=", "job= is not one of annotate, demo"),
        ("input=rows.parquet", "input.path=rows.parquet"),
        ("sampling=warm", "sampling=warm is not one of creative, greedy"),
        ("hydra.run.dir=x", "there is no setting 'hydra.run.dir'"),
    ],
)
def test_translate_refuses(word: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        translate([word], OPTIONS)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("max_tokens", "sampling.max_tokens"),
        ("sampling.max_new_tokens", "sampling.max_tokens"),
        ("max_rows", "input.limit"),
        ("engine.blok_size", "engine.block_size"),
        ("samplng", "sampling"),
        ("tempreature", "sampling.temperature"),
    ],
)
def test_suggest(typed: str, meant: str):
    assert suggest(typed) == f": did you mean {meant}?"


def test_suggest_is_silent_when_nothing_is_near():
    assert suggest("zzz") == ""


def test_every_setting_has_a_type():
    assert list(LEAVES) == list(leaves())


@settings(max_examples=20)
@given(AWKWARD.filter(lambda text: text != "" and "${" not in text and not text.startswith("~")))
@example("date=2024/[0-9]*.parquet")
def test_a_quoted_path_goes_through_the_whole_composition(text: str):
    assert compose_config([f"output.path={encode(text)}"]).output.path == text

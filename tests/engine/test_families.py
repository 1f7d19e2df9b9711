"""Every family that is said to work does, on every backend; the others are refused by name, with the reason."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from batchrun.config import ModelConfig
from batchrun.engine import hook
from batchrun.engine.acceptance import check_model, paged_logits
from batchrun.engine.attention.base import LayerCall
from batchrun.engine.attention.registry import BACKENDS
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.checkpoint import Checkpoint, open_checkpoint
from batchrun.engine.layers import fuse_model
from batchrun.engine.model import PagedModel, load_model
from batchrun.engine.support import UnsupportedModel, is_vision_language, refusal
from tests.engine.families import (
    ALL_FAMILIES,
    FAMILIES,
    HARD_FAMILIES,
    MORE_FAMILIES,
    SHAPE,
    build_model,
    known,
    make_model,
    random_prompt,
    replaceable,
)

ROUNDING = 3e-5  # what may be left of the error in float32: sums in another order, exp to 2e-7, over all layers
RUNNABLE = replaceable(ALL_FAMILIES)
WINDOWED = [family for family in RUNNABLE if ALL_FAMILIES[family].get("sliding_window")]


@lru_cache(maxsize=1)  # the tests of one family follow one another
def paged(family: str) -> PagedModel:
    return PagedModel(build_model(family, hook.NAME))


@pytest.mark.parametrize("family", RUNNABLE)
def test_equals_eager_attention(family: str) -> None:
    model = paged(family)
    assert refusal(model.module.config) is None
    for backend in {"torch", "cpu"} & set(BACKENDS):
        assert check_model(model, BACKENDS[backend]) < ROUNDING, backend


@pytest.mark.parametrize("family", RUNNABLE)
def test_fused_layers_say_the_same(family: str) -> None:
    model = PagedModel(build_model(family, hook.NAME))
    prompts = [np.array(random_prompt(length, length), dtype=np.int32) for length in (30, 9)]
    expected = paged_logits(model, TorchAttention, prompts, 15)
    fuse_model(model)
    logits = paged_logits(model, TorchAttention, prompts, 15)
    assert (logits - expected).norm() < ROUNDING * expected.norm()


class WithoutWindow(TorchAttention):
    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(replace(call, window=None), q, k, v)


@pytest.mark.parametrize("family", WINDOWED)
def test_the_window_matters(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{family}: logits differ"):
        check_model(paged(family), WithoutWindow)


REFUSED = {
    "bailing_hybrid": "recurrent state",
    "bamba": "recurrent state",
    "bart": "encoder-decoder",
    "bert": "an encoder",
    "bloom": "position bias",
    "blt": "patches of changing length",
    "deepseek_v32": "learned index",
    "deepseek_v4": "learned index",
    "doge": "a mask that depends on the data",
    "falcon": "code of its own",
    "falcon_h1": "mix attention with a recurrent state",
    "falcon_mamba": "recurrent state",
    "git": "code of its own",
    "glm_moe_dsa": "learned index",
    "gpt_neo": "code of its own",
    "granitemoehybrid": "recurrent state",
    "jamba": "recurrent state",
    "kimi_linear": "recurrent state",
    "lfm3": "convolutions",
    "llama4": "fixed chunks of positions",
    "llama4_text": "fixed chunks of positions",
    "mamba": "recurrent state",
    "mamba2": "recurrent state",
    "minimax": "recurrent state",
    "mllama": "attend to an image",
    "mpt": "position bias",
    "mt5": "encoder-decoder",
    "nemotron_h": "recurrent state",
    "olmo_hybrid": "recurrent state",
    "openai-gpt": "code of its own",
    "qwen3_5": "recurrent state",
    "qwen3_next": "recurrent state",
    "recurrent_gemma": "recurrent state",
    "roberta": "an encoder",
    "rwkv": "recurrent state",
    "t5": "encoder-decoder",
    "t5gemma": "encoder-decoder",
    "vit": "no text generation model",
    "whisper": "encoder-decoder",
    "xglm": "code of its own",
    "xlnet": "code of its own",
    "xlstm": "recurrent state",
    "zamba": "recurrent state",
    "zamba2": "recurrent state",
}


@pytest.mark.parametrize("family", known(REFUSED))
def test_refused_by_name_before_any_weights(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family)
    config.save_pretrained(tmp_path)  # there are no weights in the folder to look at
    with pytest.raises(UnsupportedModel, match=f"^{family} cannot run here: [^.]*{REFUSED[family]}[^.]*$"):
        open_checkpoint(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("family", "layer_types", "why"),
    [
        ("lfm2", ["conv", "full_attention", "conv"], "convolutions"),
        ("llama", ["full_attention", "linear_attention", "full_attention"], "recurrent state"),
        ("qwen3", ["full_attention", "chunked_attention", "full_attention"], "fixed chunks"),
        ("llama", ["full_attention", "window_attention", "full_attention"], "layers of the kind 'window_attention'"),
    ],
)
def test_refused_for_one_of_its_layers(family: str, layer_types: list[str], why: str) -> None:
    config = AutoConfig.for_model(family, **{**SHAPE, "layer_types": layer_types})
    assert why in (refusal(config) or "")


def test_layers_that_never_call_the_attention_are_missed() -> None:
    with pytest.raises(UnsupportedModel, match="bloom: 0 of its 3 layers attend"):
        PagedModel(build_model("bloom"))
    with pytest.raises(UnsupportedModel, match="lfm2: 1 of its 3 layers attend"):
        PagedModel(build_model("lfm2", hook.NAME, layer_types=["conv", "full_attention", "conv"]))


def test_a_mask_of_its_own_is_seen() -> None:
    with pytest.raises(UnsupportedModel, match="doge: its attention needs a mask"):
        PagedModel(build_model("doge", hook.NAME))


def test_a_list_of_attentions_without_ours_is_named(tmp_path: Path) -> None:
    make_model("gpt_neo", tmp_path, attention_types=[[["global"], 3]], num_layers=3)
    checkpoint = Checkpoint(tmp_path, AutoConfig.from_pretrained(tmp_path), ModelConfig(path=str(tmp_path)))
    with pytest.raises(UnsupportedModel, match="gpt_neo: it picks its attention from a list of its own"):
        load_model(checkpoint, torch.device("cpu"), torch.float32)


VISION: dict[str, Any] = {
    "num_hidden_layers": 1,
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
VISION_LANGUAGE: dict[str, dict[str, Any]] = {
    "aya_vision": {"sliding_window": 8},
    "gemma3": {"sliding_window": 8},
    "idefics3": {},
    "internvl": {},
    "llava": {},
    "llava_next": {},
    "llava_onevision": {},
    "mistral3": {},
    "qwen2_5_vl": SECTIONS,
    "qwen2_vl": SECTIONS,
    "qwen3_vl": SECTIONS,
    "smolvlm": {},
}


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_the_language_part_of_a_vision_language_model_works(family: str, tmp_path: Path) -> None:
    shape = {key: value for key, value in SHAPE.items() if key != "pad_token_id"}
    language = AutoConfig.for_model(family).get_text_config(decoder=True).model_type
    text = {"model_type": language, **shape, **VISION_LANGUAGE[family]}
    config = AutoConfig.for_model(family, text_config=text, vision_config=VISION)
    torch.manual_seed(1)
    auto_class = AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM
    auto_class.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    model = load_model(open_checkpoint(ModelConfig(path=str(tmp_path))), torch.device("cpu"), torch.float32)
    assert check_model(model, TorchAttention) < ROUNDING


def test_the_page_of_models_is_in_step_with_these_tests() -> None:
    page = Path(__file__).resolve().parents[2].joinpath("docs", "models.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part.partition("\n")[2] for part in page.split("\n## ")}
    lists = {
        "Compared with generate": {**FAMILIES, **HARD_FAMILIES},
        "Compared with eager attention": MORE_FAMILIES,
        "Vision-language models": VISION_LANGUAGE,
    }
    for title, families in lists.items():
        paragraphs = sections[title].split("\n\n")
        (listed,) = (
            text for text in paragraphs if text.startswith("`") and text.count("`, `") + text.count("`,\n`") > 9
        )
        assert re.findall(r"`([^`]+)`", listed) == sorted(families), title
    assert f"weights; {len(FAMILIES) + len(HARD_FAMILIES)} families" in sections["Compared with generate"]
    assert f"weights; {len(MORE_FAMILIES)} more families" in sections["Compared with eager attention"]
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", sections["Refused"], re.MULTILINE))
    assert list(rows) == sorted(REFUSED)
    for family in known(REFUSED):
        assert rows[family] == refusal(AutoConfig.for_model(family))

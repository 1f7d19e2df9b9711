"""What a model's files say of its embeddings and scores, and what is refused from them alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig

from batchrun.config import EmbedConfig, ModelConfig, RankConfig
from batchrun.engine.checkpoint import Checkpoint, load_tokenizer, open_checkpoint
from batchrun.engine.encoder_config import embedding, scores
from batchrun.engine.pooler import EmbeddingPooler
from batchrun.engine.pooling import Embed
from batchrun.engine.sentence_transformers import read_sentence_transformer
from batchrun.engine.support import UnsupportedModel, check_config
from batchrun.errors import ConfigError
from tests.engine.encoders import make_encoder, make_tokenizer, write_modules

MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def checkpoint_of(folder: Path, config: Any, **model: Any) -> Checkpoint:
    """A checkpoint of which only the config is there."""
    return Checkpoint(folder, config, ModelConfig(path=str(folder), **model))


def bert(**changes: Any) -> Any:
    return AutoConfig.for_model("bert", hidden_size=32, **changes)


def resolve(folder: Path, config: Any = None, limit: int | None = None, **settings: Any) -> Any:
    return embedding(
        checkpoint_of(folder, config or bert(), max_model_len=limit), make_tokenizer(), EmbedConfig(**settings)
    )


def test_modules_say_how_to_pool(tmp_path: Path) -> None:
    write_modules(tmp_path, {"pooling_mode_lasttoken": True}, "Normalize", max_seq_length=128, do_lower_case=True)
    pooler, form = resolve(tmp_path)
    assert pooler == EmbeddingPooler("last", 32, normalize=True, max_length=128)
    assert form.lower_case
    pooler, _ = resolve(tmp_path, pooling="cls", normalize=False, dimensions=8, limit=64)
    assert pooler == EmbeddingPooler("cls", 8, normalize=False, max_length=64)


def test_pooling_in_one_key(tmp_path: Path) -> None:
    write_modules(tmp_path, {"pooling_mode": "weightedmean"})
    pooler, _ = resolve(tmp_path)
    assert (pooler.pooling, pooler.normalize) == ("weighted_mean", False)


def test_without_modules_encoders_pool_by_mean_and_decoders_by_the_last_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve(tmp_path)[0].pooling == "mean"
    assert resolve(tmp_path, LlamaConfig(hidden_size=32))[0].pooling == "last"
    assert "does not say how to pool: taking last (embed.pooling)" in caplog.text
    caplog.clear()
    assert resolve(tmp_path, pooling="cls")[0] == EmbeddingPooler("cls", 32, normalize=True, max_length=512)
    assert not caplog.text


def test_prompts_of_the_model(tmp_path: Path) -> None:
    write_modules(tmp_path, MEAN | {"include_prompt": False})
    said = {"prompts": {"query": "w4 w5", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    pooler, form = resolve(tmp_path)
    assert (form.prompt, pooler.skip) == ("w4 w5", 3)  # and the token before it
    pooler, form = resolve(tmp_path, prompt="document")
    assert (form.prompt, pooler.skip) == ("", 0)
    with pytest.raises(ConfigError, match=r"embed\.prompt=code is no prompt of the model: there are query, document"):
        resolve(tmp_path, prompt="code")


def test_dense_layers(tmp_path: Path) -> None:
    write_modules(tmp_path, MEAN, "Dense", "Normalize")
    layer = {
        "in_features": 32,
        "out_features": 5,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    weight, bias = torch.randn(5, 32), torch.randn(5)
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(layer))
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    pooler, _ = resolve(tmp_path)
    assert (pooler.size, pooler.dense) == (5, (tmp_path / "2_Dense",))
    hidden = torch.randn(3, 4, 32)
    expected = torch.tanh(hidden.mean(1) @ weight.T + bias)
    found = Embed(pooler)(hidden, torch.tensor([4, 4, 4]))
    np.testing.assert_allclose(found.detach(), torch.nn.functional.normalize(expected), atol=1e-6)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors: .* model\.allow_pickle=true"):
        Embed(pooler)


def test_modules_that_are_not_known_are_named(tmp_path: Path) -> None:
    write_modules(tmp_path, MEAN, "CNN")
    with pytest.raises(UnsupportedModel, match=r"has a module CNN: known are"):
        read_sentence_transformer(tmp_path)


def test_two_modes_of_pooling_need_a_choice(tmp_path: Path) -> None:
    write_modules(tmp_path, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True})
    with pytest.raises(UnsupportedModel, match=r"pools by cls and mean, .* choose one with embed\.pooling"):
        resolve(tmp_path)
    assert resolve(tmp_path, pooling="cls")[0].pooling == "cls"


def test_quantization_is_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, bert(), quantization="int8")
    with pytest.raises(ConfigError, match=r"model\.quantization=int8 is for models that generate"):
        embedding(checkpoint, make_tokenizer(), EmbedConfig())


def test_the_longest_text(tmp_path: Path) -> None:
    roberta = AutoConfig.for_model("roberta", hidden_size=32, max_position_embeddings=514, pad_token_id=1)
    assert resolve(tmp_path, roberta)[0].max_length == 512
    with pytest.raises(ConfigError, match=r"model\.max_model_len=513 is more than the 512 positions"):
        resolve(tmp_path, roberta, limit=513)


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "none"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        (
            {"num_labels": 2, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            "sigmoid",
        ),
    ],
)
def test_activation_as_the_config_says(tmp_path: Path, settings: dict[str, Any], activation: str) -> None:
    assert scores(checkpoint_of(tmp_path, bert(**settings)), make_tokenizer(), RankConfig()).activation == activation


def test_a_reward_is_not_bounded(tmp_path: Path) -> None:
    reward = LlamaConfig(num_labels=1, hidden_size=32)
    assert scores(checkpoint_of(tmp_path, reward), make_tokenizer(), RankConfig()).activation == "none"


def test_an_activation_that_is_not_known_is_named(tmp_path: Path) -> None:
    odd = bert(num_labels=1, sbert_ce_default_activation_function="torch.nn.modules.activation.ELU")
    with pytest.raises(UnsupportedModel, match=r"its activation ELU is not one of .*rank\.activation"):
        scores(checkpoint_of(tmp_path, odd), make_tokenizer(), RankConfig())


@pytest.mark.parametrize(
    ("family", "architecture", "purpose", "message"),
    [
        ("bert", "BertModel", "generate", "it is an encoder.*; task=embed makes embeddings of texts with it"),
        ("modernbert", "ModernBertModel", "generate", "no text generation model.*; task=embed makes embeddings"),
        ("llama", "LlamaForSequenceClassification", "generate", "classification head.*; task=rank gives its scores"),
        ("llama", "LlamaForCausalLM", "rank", "its files are of LlamaForCausalLM, without a classification head"),
        ("bert", "BertModel", "rank", "its files are of BertModel, without a classification head"),
        ("bart", "BartForSequenceClassification", "rank", "it is an encoder-decoder"),
        ("bart", "BartModel", "embed", "transformers has not an encoder of its own"),
        ("vit", "ViTModel", "embed", "it needs more than text"),
        ("clip", "CLIPModel", "embed", "it needs more than text"),
    ],
)
def test_what_cannot_work_is_refused_from_the_config(
    family: str, architecture: str, purpose: str, message: str
) -> None:
    config = AutoConfig.for_model(family, architectures=[architecture])
    with pytest.raises(UnsupportedModel, match=f"^{family} cannot run here: .*{message}"):
        check_config(config, purpose)


def test_weights_that_lack_a_layer_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from tests.engine.test_encoder import load_embedder

    make_encoder("bert", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    # A pooler is not used, so it may be missing; a layer may not.
    save_file({k: v for k, v in weights.items() if "pooler" not in k}, tmp_path / "model.safetensors", {"format": "pt"})
    load_embedder(tmp_path)
    save_file({k: v for k, v in weights.items() if "layer.1.output" not in k}, tmp_path / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    with pytest.raises(ConfigError, match=r"its weights lack 4 tensors"):
        load_embedder(tmp_path)


def test_open_checkpoint_takes_the_purpose(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    with pytest.raises(UnsupportedModel, match="task=embed"):
        open_checkpoint(ModelConfig(path=str(tmp_path)))
    checkpoint = open_checkpoint(ModelConfig(path=str(tmp_path)), purpose="embed")
    assert load_tokenizer(checkpoint).pad_token_id == 0

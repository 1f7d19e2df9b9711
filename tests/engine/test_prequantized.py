"""Checkpoints with quantised weights: loaded by transformers and left as they are, or refused before that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.config.model import ModelConfig
from batchrun.engine import prequantized
from batchrun.engine.checkpoint import open_checkpoint
from batchrun.engine.linear import is_plain
from batchrun.engine.params import SamplingParams
from batchrun.engine.prequantized import PACKAGES, check_quantized, placement, quantization_method
from batchrun.errors import ConfigError
from tests.engine.adapters import make_adapter
from tests.engine.families import engine_of, generate, load, make_model, make_tokenizer, random_prompt

CPU = torch.device("cpu")
PROMPTS = [random_prompt(i, length) for i, length in enumerate((3, 9, 17))]
# As config.json has them in checkpoints of each method.
STORED: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
}


def with_stored(folder: Path, to: Path, stored: dict[str, Any]) -> Path:
    """A copy whose config says that its weights are quantised."""
    copy = Path(shutil.copytree(folder, to))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    return copy


def check(folder: Path, **options: Any) -> None:
    check_quantized(open_checkpoint(ModelConfig(str(folder), **options)), CPU, torch.float32)


@pytest.mark.parametrize("method", STORED)
def test_a_library_that_is_not_there_is_named(
    method: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prequantized, "find_spec", lambda module: None)
    monkeypatch.setattr("batchrun.engine.loading.load_model", lambda *_: pytest.fail("the model was loaded"))
    folder = with_stored(llama, tmp_path / "m", STORED[method])
    packages = " ".join(package for _, package in PACKAGES[method])
    with pytest.raises(ConfigError, match=rf"are quantised by {method}, which needs .*: pip install {packages}$"):
        load(folder)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"quant_method": "odd"}, "are quantised by odd, which cannot be loaded here: Unknown quantization type"),
        ({"producer": {"name": "modelopt"}}, "are quantised by unnamed, which cannot be loaded here: .*quant_method"),
    ],
)
def test_a_method_that_transformers_has_not_is_named(
    stored: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(with_stored(llama, tmp_path / "m", stored))


def test_what_transformers_says_of_the_machine_reaches_the_user(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("a GPU is needed")

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", refuses)
    monkeypatch.setattr(prequantized, "_is_there", lambda module: True)
    with pytest.raises(ConfigError, match=r"by fp8, which cannot be loaded here: a GPU is needed"):
        check(with_stored(llama, tmp_path / "m", STORED["fp8"]))


def test_settings_that_would_round_or_change_them_again_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = with_stored(llama, tmp_path / "m", STORED["fp8"])
    with pytest.raises(ConfigError, match=r"by fp8, and model\.quantization=int8 would round them again: set none"):
        check(folder, quantization="int8")
    make_adapter(tmp_path / "adapter", llama, 1)
    with pytest.raises(ConfigError, match=r"by fp8, and model\.adapter needs those of the model"):
        check(folder, adapter=str(tmp_path / "adapter"))


def test_ordinary_weights_need_nothing(llama: Path) -> None:
    checkpoint = open_checkpoint(ModelConfig(str(llama)))
    check_quantized(checkpoint, CPU, torch.float32)
    assert quantization_method(checkpoint.config) is None
    assert placement(checkpoint.config, CPU) == {}


def test_only_products_of_floats_are_plain() -> None:
    linear = torch.nn.Linear(4, 4)
    assert is_plain(linear)
    vars(linear)["forward"] = torch.nn.Identity().forward
    assert not is_plain(linear)
    rounded = torch.nn.Linear(4, 4)
    rounded.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    assert not is_plain(rounded)
    rounded.weight = torch.nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    assert not is_plain(rounded)


class Own(torch.Tensor):
    """Stands for a library's tensors that know how to multiply themselves."""


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_products_of_others_are_left_alone(
    family: str, family_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchrun.engine import loading

    original = loading.load_model

    def quantised(*arguments: Any) -> Any:
        model = original(*arguments)
        for name, part in model.module.named_modules():
            if name.endswith(("_proj", "lm_head")):
                weight = part.weight.detach().as_subclass(Own)
                part.weight = torch.nn.Parameter(weight, requires_grad=False)
        return model

    folder = family_folder(family)
    with load(folder) as llm:
        expected = [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_tokens=6))]
    monkeypatch.setattr(loading, "load_model", quantised)
    with load(folder) as llm:
        module = engine_of(llm).model.module
        products = [part for name, part in module.named_modules() if name.endswith(("_proj", "lm_head"))]
        assert {type(part) for part in products} == {torch.nn.Linear}
        assert [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_tokens=6))] == expected


def quantised_llama(folder: Path, config: Any) -> Path:
    """A tiny llama whose sizes the kernels of libraries take, quantised when it is read, and saved so."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    plain = make_model("llama", folder / "plain", num_hidden_layers=2, head_dim=64, **sizes)
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    model.save_pretrained(folder / "quantised")
    make_tokenizer().save_pretrained(folder / "quantised")
    return folder / "quantised"


def assert_equals_generate(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map={"": "cpu"})
    expected = [generate(reference, prompt, 8) for prompt in PROMPTS]
    with load(folder) as llm:
        assert [list(c.token_ids) for c in llm.generate(PROMPTS, SamplingParams(max_tokens=8))] == expected
        products = [p for name, p in engine_of(llm).model.module.named_modules() if name.endswith("_proj")]
        assert products
        assert not any(is_plain(part) for part in products)


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_equals_generate(bits: int, tmp_path: Path) -> None:
    """Of 8 bits without the threshold beyond which columns stay in floats, which are chosen by the whole batch."""
    for package in ("bitsandbytes", "accelerate"):
        pytest.importorskip(package)
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.float32, llm_int8_threshold=0.0
    )  # fmt: skip
    assert_equals_generate(quantised_llama(tmp_path, config))


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao_equals_generate(name: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    pytest.importorskip("accelerate")
    from transformers import TorchAoConfig

    assert_equals_generate(quantised_llama(tmp_path, TorchAoConfig(getattr(quantization, name)())))


def test_compressed_tensors_equals_generate(tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    plain = make_model("llama", tmp_path / "plain", num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    weights = quantization.QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    settings = {"config_groups": {"all": scheme}, "ignore": ["lm_head"], "format": "int-quantized"}
    quantization.apply_quantization_config(model, quantization.QuantizationConfig(**settings))
    for part in model.modules():
        if hasattr(part, "weight_scale"):
            part.weight_scale.data = part.weight.data.abs().amax(1, keepdim=True) / 127
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "quantised")
    compressor.update_config(tmp_path / "quantised")
    make_tokenizer().save_pretrained(tmp_path / "quantised")
    stored = open_checkpoint(ModelConfig(str(tmp_path / "quantised"))).config
    assert quantization_method(stored) == "compressed-tensors"
    assert_equals_generate(tmp_path / "quantised")

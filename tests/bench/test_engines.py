from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batchrun.bench.engines import ADAPTERS, KINDS, choose_engines, parse_engine
from batchrun.config import BenchConfig, Config, EngineConfig
from batchrun.errors import ConfigError

NO_PYTHON = "/nowhere/bin/python"


def config(**options: object) -> Config:
    return Config(bench=BenchConfig(**options), engine=EngineConfig(block_size=16))  # type: ignore[arg-type]


def test_every_engine_has_its_adapter():
    assert {path.name for path in ADAPTERS.glob("*_engine.py")} == {f"{name}_engine.py" for name in KINDS}


def test_an_engine_with_settings():
    spec = parse_engine("transformers:batch=8:sort=false", config(), "m")
    assert spec.settings == {"batch": 8, "tokens": 0, "sort": False, "use_cache": True}
    assert (spec.label, spec.kind, spec.model, spec.python, spec.ours) == (
        "transformers:batch=8:sort=false", "transformers", "m", sys.executable, False,
    )  # fmt: skip


def test_our_engine_takes_the_job_s_settings_and_its_own():
    spec = parse_engine("batchrun:max_num_seqs=4:static=2:workers=1:attention=torch", config(), "m")
    assert spec.ours
    assert {key: spec.settings[key] for key in ("block_size", "max_num_seqs", "static", "workers", "attention")} == {
        "block_size": 16, "max_num_seqs": 4, "static": 2, "workers": "1", "attention": "torch",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("sglang", "'sglang': the engines are batchrun, transformers"),
        ("vllm:seqs=4", "vllm takes max_num_seqs, max_batched_tokens"),
        ("vllm:max_num_seqs", "as key=value"),
        ("openvino", "set bench.models.openvino to a folder exported by optimum-cli"),
    ],
)
def test_engines_that_there_are_not(label: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_engine(label, config(), "m")


def test_a_model_of_an_engine_s_own(tmp_path: Path):
    spec = parse_engine("llama_cpp", config(models={"llama_cpp": str(tmp_path)}), "m")
    assert spec.model == str(tmp_path)
    with pytest.raises(ConfigError, match="is not there"):
        parse_engine("llama_cpp", config(models={"llama_cpp": str(tmp_path / "x.gguf")}), "m")


def test_auto_is_ours_transformers_and_what_is_found(stand_ins: Path, tmp_path: Path):
    assert [spec.kind for spec in choose_engines(config(), "m")] == ["batchrun", "transformers", "vllm"]
    (stand_ins / "openvino_genai.py").touch()
    found = choose_engines(config(models={"openvino": str(tmp_path)}), "m")
    assert [spec.kind for spec in found] == ["batchrun", "transformers", "vllm", "openvino"]


def test_ours_comes_first_and_no_engine_twice():
    specs = choose_engines(config(engines=["transformers", "batchrun", "transformers", "transformers:batch=1"]), "m")
    assert [spec.label for spec in specs] == ["batchrun", "transformers", "transformers:batch=1"]


def test_an_engine_that_is_not_installed_is_named_before_anything_loads():
    with pytest.raises(ConfigError, match=r"no module vllm.*bench.python.vllm"):
        choose_engines(config(engines=["vllm"]), "m")
    with pytest.raises(ConfigError, match=f"{NO_PYTHON} cannot be started"):
        choose_engines(config(engines=["vllm"], python={"vllm": NO_PYTHON}), "m")
    with pytest.raises(ConfigError, match=r"bench.python names vlm: the engines are"):
        choose_engines(config(python={"vlm": NO_PYTHON}), "m")

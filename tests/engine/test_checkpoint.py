"""Where a model is found, what is refused before a weight is loaded, and what identifies the files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchrun.config import ModelConfig
from batchrun.engine.checkpoint import Checkpoint, eos_token_ids, load_tokenizer, open_checkpoint
from batchrun.engine.model import PagedModel, load_model
from batchrun.errors import ConfigError

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
REMEDY = "Copy the model to a folder and set model=/path/to/folder"
OPEN = """
import sys
from batchrun.config import ModelConfig
from batchrun.engine.checkpoint import open_checkpoint
from batchrun.errors import ConfigError
try:
    open_checkpoint(ModelConfig(path=sys.argv[1]), offline=sys.argv[2] == "offline")
except ConfigError as error:
    print(error)
"""


def opened(folder: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(ModelConfig(path=str(folder), **options))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A model folder that the test may change."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("how", ["online", "offline"])
def test_a_hub_that_cannot_be_reached_is_named_with_the_remedy(how: str, tmp_path: Path) -> None:
    """In a process of its own: the hub client reads its environment when it is imported."""
    environment = {key: value for key, value in os.environ.items() if "PROXY" not in key.upper()}
    environment.pop("HF_HUB_OFFLINE", None)
    environment |= {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", OPEN, "nobody/nothing", how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "model=nobody/nothing is not a local folder" in done.stdout
    assert REMEDY in done.stdout


def test_offline_by_the_hub_s_own_variable_gives_the_same_advice() -> None:
    with pytest.raises(ConfigError, match="nobody/nothing is not a local folder") as error:
        open_checkpoint(ModelConfig(path="nobody/nothing"))
    assert REMEDY in str(error.value)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "~/no-such-model-folder"])
def test_a_path_that_is_not_there_is_never_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="is neither a folder with a transformers model nor a GGUF file"):
        open_checkpoint(ModelConfig(path=name))


def test_a_name_that_is_neither_path_nor_hub_id() -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
        open_checkpoint(ModelConfig(path="bad name!"))


def test_no_model_at_all() -> None:
    with pytest.raises(ConfigError, match="set model=FOLDER"):
        open_checkpoint(ModelConfig())


def test_a_file_is_not_a_folder(llama: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a folder with a transformers model nor a GGUF file"):
        opened(llama / "config.json")


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        opened(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "no-such-family"}', "\xff\x00"])
def test_a_config_that_cannot_be_read(text: str, copy: Path) -> None:
    (copy / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="its config cannot be read"):
        opened(copy)


def test_weights_must_be_there_unless_they_are_not_asked_for(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors weights"):
        opened(copy)
    assert open_checkpoint(ModelConfig(path=str(copy)), weights=False).config.model_type == "llama"


def test_end_tokens_are_merged_from_three_places(copy: Path) -> None:
    change(copy / "config.json", eos_token_id=[7, 8])
    change(copy / "generation_config.json", eos_token_id=9)
    checkpoint = opened(copy)
    assert eos_token_ids(checkpoint, load_tokenizer(checkpoint)) == {1, 7, 8, 9}
    change(copy / "generation_config.json", eos_token_id=[8, 10])
    assert eos_token_ids(opened(copy), load_tokenizer(checkpoint)) == {1, 7, 8, 10}
    (copy / "generation_config.json").unlink()
    change(copy / "config.json", eos_token_id=None)
    assert eos_token_ids(opened(copy), load_tokenizer(checkpoint)) == {1}


def test_another_tokenizer_may_be_named(llama: Path, copy: Path, tmp_path: Path) -> None:
    change(copy / "tokenizer_config.json", eos_token="w5")
    checkpoint = opened(llama, tokenizer=str(copy))
    assert load_tokenizer(checkpoint).eos_token_id == 5
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(opened(llama, tokenizer=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}, 128),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS}, 64),
    ],
    ids=["default", "yarn", "linear", "dynamic", "longrope"],
)  # fmt: skip
def test_the_window_ends_where_rotary_angles_begin_to_depend_on_the_batch(
    changes: dict[str, Any], limit: int, copy: Path
) -> None:
    config = json.loads((copy / "config.json").read_text())
    change(copy / "config.json", rope_parameters={**config["rope_parameters"], **changes})
    assert opened(copy).max_model_len == limit


def test_longrope_as_checkpoints_of_phi3_write_it(family_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(family_folder("phi3"), tmp_path / "model"))
    scaling = {"type": "longrope", **FACTORS}
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    (folder / "config.json").write_text(
        json.dumps({**config, "rope_theta": 10000.0, "rope_scaling": scaling, "original_max_position_embeddings": 64})
    )
    assert opened(folder).max_model_len == 64


def test_asked_window(llama: Path) -> None:
    assert opened(llama, max_model_len=100).max_model_len == 100
    assert opened(llama, max_model_len=512).max_model_len == 512
    with pytest.raises(ConfigError, match=r"model\.max_model_len=513 is more than the 512 positions"):
        _ = opened(llama, max_model_len=513).max_model_len


def test_a_window_that_the_config_does_not_tell_must_be_set(copy: Path) -> None:
    class Silent:
        rope_parameters = None

        def get_text_config(self, decoder: bool) -> Any:
            return self

    with pytest.raises(ConfigError, match=r"set model\.max_model_len"):
        _ = Checkpoint(copy, Silent(), ModelConfig(path="x")).max_model_len
    assert Checkpoint(copy, Silent(), ModelConfig(path="x", max_model_len=9)).max_model_len == 9


def test_names(llama: Path, tmp_path: Path) -> None:
    assert opened(llama).name == llama.name
    snapshot = shutil.copytree(llama, tmp_path / "snapshots" / "0123abcd")
    assert Checkpoint(Path(snapshot), None, ModelConfig(path="org/model")).name == "org/model@0123abcd"


def test_identity_follows_the_files_and_not_their_place(llama: Path, copy: Path) -> None:
    before = opened(llama).identity()
    assert opened(copy).identity() == before
    weights = load_file(copy / "model.safetensors")
    last = sorted(weights)[-1]
    weights[last] = weights[last] + 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    trained = opened(copy).identity()
    assert trained != before
    change(copy / "config.json", rms_norm_eps=1e-3)
    assert opened(copy).identity() not in (before, trained)


def test_identity_sees_a_file_that_comes_or_goes(copy: Path) -> None:
    before = opened(copy).identity()
    (copy / ".cache").mkdir()
    (copy / ".hidden").write_text("not part of the model")
    assert opened(copy).identity() == before
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert opened(copy).identity() != before


def test_identity_of_a_large_file_covers_both_ends(copy: Path) -> None:
    large = copy / "notes.bin"
    large.write_bytes(bytes(3 << 20))
    seen = {opened(copy).identity()}
    for place in (0, (3 << 20) - 1):
        with large.open("r+b") as file:
            file.seek(place)
            file.write(b"\1")
        seen.add(opened(copy).identity())
    assert len(seen) == 3


def test_a_weight_file_that_is_cut_off_is_named(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"{weights} is damaged or cut off .* copy or download it again"):
        opened(copy)
    assert open_checkpoint(ModelConfig(path=str(copy)), weights=False).folder == copy


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1", b"\xff" * 64])
def test_a_weight_file_of_something_else_is_named(content: bytes, copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged or cut off"):
        opened(copy)


def test_a_shard_that_is_not_there_is_named(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(shards))
    with pytest.raises(ConfigError, match=r"1 of its 2 weight files are not there, such as .*00002-of-00002"):
        opened(copy)


def reload(folder: Path, **options: Any) -> PagedModel:
    return load_model(opened(folder, **options), torch.device("cpu"), torch.float32)


def test_tensors_that_are_missing_are_never_filled_with_random_numbers(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 tensors, model\.layers\.1\.mlp\.up_proj\.weight among them"):
        reload(copy)


def test_tensors_of_another_shape_are_named(copy: Path) -> None:
    change(copy / "config.json", intermediate_size=64)
    with pytest.raises(ConfigError, match=r"mlp\.down_proj\.weight is \[32, 48\] and should be \[32, 64\]"):
        reload(copy)


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({mark!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own-family"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
OPEN_TRUSTED = """
import sys, torch
from batchrun.config import ModelConfig
from batchrun.engine.acceptance import check_model
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.checkpoint import open_checkpoint
from batchrun.engine.model import load_model
checkpoint = open_checkpoint(ModelConfig(path=sys.argv[1], trust_remote_code=True))
model = load_model(checkpoint, torch.device("cpu"), torch.float32)
print(checkpoint.config.model_type, check_model(model, TorchAttention))
"""


def test_code_of_a_checkpoint_runs_only_when_asked_for(copy: Path, tmp_path: Path) -> None:
    mark = tmp_path / "the code was run"
    (copy / "own.py").write_text(OWN_CODE.format(mark=str(mark)))
    change(
        copy / "config.json",
        model_type="own-family",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )
    with pytest.raises(ConfigError, match=r"brings Python code of its own.*set model\.trust_remote_code=true"):
        opened(copy)
    assert not mark.exists()
    # In a process of its own: transformers copies the code into a folder that it chooses when it is imported.
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", OPEN_TRUSTED, str(copy)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert mark.exists()
    family, error = done.stdout.split()
    assert family == "own-family"
    assert float(error) < 1e-5


def test_code_beside_a_family_that_transformers_knows_is_left_alone(copy: Path, tmp_path: Path) -> None:
    mark = tmp_path / "the code was run"
    (copy / "own.py").write_text(OWN_CODE.format(mark=str(mark)))
    change(copy / "config.json", auto_map={"AutoModelForCausalLM": "own.OwnModel"})
    assert type(reload(copy).module).__name__ == "LlamaForCausalLM"
    assert not mark.exists()

"""Where a model's files are, and what they say of it without loading a weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from batchrun.config import ModelConfig
from batchrun.engine.adapter import Adapter, open_adapters
from batchrun.engine.gguf import find_gguf, float_bytes, open_gguf
from batchrun.engine.support import check_config
from batchrun.errors import ConfigError

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "tokenizer*"]
WEIGHT_FILES = ["*.safetensors"]
PICKLE_FILES = ["*.bin", "*.pt"]
SAMPLED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model whose files are in a local folder; of one in a GGUF file, the weights are in that."""

    folder: Path
    config: Any  # transformers.PretrainedConfig
    model: ModelConfig
    adapter: Adapter | None = None  # merged into the weights
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # that rows name
    gguf: Path | None = None

    @property
    def text_config(self) -> Any:
        """The language part's config, of which multimodal models have one among several."""
        return self.config.get_text_config(decoder=True)

    @property
    def max_model_len(self) -> int:
        """Tokens in the longest prompt + completion. Raises ConfigError if more is asked than the model has."""
        limit = position_limit(self.text_config)
        asked = self.model.max_model_len
        if limit is None and asked is None:
            raise ConfigError(f"{self.folder} does not say how long its sequences may be: set model.max_model_len")
        if asked is not None and limit is not None and asked > limit:
            raise ConfigError(f"model.max_model_len={asked} is more than the {limit} positions of {self.model.path}")
        return int(asked or limit or 0)

    @property
    def name(self) -> str:
        """Hub id and commit, or the own name of the folder or GGUF file."""
        if self.gguf is not None:
            return self.gguf.name
        if self.folder.parent.name == "snapshots":
            return f"{self.model.path}@{self.folder.name}"
        return self.folder.name

    def weight_bytes(self) -> int:
        """Size of the weight files; of a GGUF file, of what its weights are unpacked to."""
        if self.gguf is not None:
            return float_bytes(self.folder)
        return sum(p.stat().st_size for p in self.folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt"))

    def identity(self) -> str:
        """sha256 over the files: small ones whole, weights by name, size, head and tail.

        The head of a safetensors file is its table of tensors; a retrained model differs in the tail.
        """
        digest = hashlib.sha256()
        files = sorted(p for p in self.folder.iterdir() if p.is_file() and not p.name.startswith("."))
        for path in files if self.gguf is None else [*files, self.gguf]:
            size = path.stat().st_size
            name = "" if path == self.gguf else path.name  # what a single file is called does not make another model
            digest.update(f"{name}:{size};".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLED_BYTES))
                file.seek(max(0, size - SAMPLED_BYTES))
                digest.update(file.read(SAMPLED_BYTES))
        return digest.hexdigest()

    def adapter_identity(self) -> dict[str, Any]:
        """What the adapters' files hold, by the setting that names them."""
        return {
            "model.adapter": self.adapter and self.adapter.identity(),
            "model.adapters": {name: adapter.identity() for name, adapter in self.adapters.items()},
        }


def open_checkpoint(
    model: ModelConfig, *, weights: bool = True, offline: bool = False, purpose: str = "generate"
) -> Checkpoint:
    """Find `model.path` as a folder, else on the hub, and read its config. `purpose` is as in `check_config`.

    With `weights` false only configs and tokenizer files are fetched. Raises ConfigError if there is no such
    folder and the hub cannot give it, or if files are missing or damaged; UnsupportedModel, before any weights
    are fetched, for a family that cannot work.
    """
    if not model.path:
        raise ConfigError("no model is given: set model=FOLDER or model=ORGANISATION/NAME")
    find = partial(local_folder, model.path, model.revision, offline=offline)
    small = SMALL_FILES if model.gguf_file is None else [*SMALL_FILES, model.gguf_file]
    folder = find(small)
    gguf = find_gguf(folder, model.path, model.gguf_file)
    if gguf is not None:
        folder = open_gguf(gguf, with_tokenizer=model.tokenizer is None)
    config = _read_config(folder, model)
    check_config(config, purpose)
    adapters = open_adapters(model, config, purpose)
    if weights and gguf is None:
        folder = find([*SMALL_FILES, *WEIGHT_FILES, *(PICKLE_FILES if model.allow_pickle else [])])
        _check_weights(folder, model)
    return Checkpoint(folder, config, model, *adapters, gguf)


def _read_config(folder: Path, model: ModelConfig) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model={model.path}: {folder} has no config.json, so it is not a transformers model folder; "
            "if the model is in a GGUF file, name it: model=FOLDER/NAME.gguf, or model=ORGANISATION/NAME "
            "model.gguf_file=NAME.gguf"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:  # of a config.json that is no object
        if not model.trust_remote_code and _has_own_code(folder):
            raise ConfigError(
                f"model={model.path} brings Python code of its own, which is not run unless asked for: "
                "read it, and set model.trust_remote_code=true if you trust it"
            ) from error
        raise ConfigError(f"model={model.path}: its config cannot be read: {error}") from error


def _has_own_code(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "config.json").read_text()).get("auto_map"))
    except (ValueError, AttributeError):
        return False


def _check_weights(folder: Path, model: ModelConfig) -> None:
    """Raise ConfigError unless the safetensors files that should be there are, and are as long as they say."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files and not model.allow_pickle:
        raise ConfigError(
            f"model={model.path}: {folder} has no .safetensors weights; convert them, "
            "or set model.allow_pickle=true if you trust the files (opening a .bin file can run code)"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        if absent := [file for file in files if not file.is_file()]:
            raise ConfigError(
                f"model={model.path}: {len(absent)} of its {len(files)} weight files are not there, such as {absent[0]}"
            )
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is damaged or cut off ({error}): copy or download it again") from error


def local_folder(name: str, revision: str | None, patterns: list[str], *, offline: bool) -> Path:
    """The folder of a local path or GGUF file, or of a hub id after fetching what is missing of `patterns`."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".gguf" and path.is_file():
        return path.absolute().parent
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model={name} is neither a folder with a transformers model nor a GGUF file")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=offline))
    except HFValidationError as error:
        raise ConfigError(f"model={name} is neither a folder nor a hub id: {error}") from error
    except HfHubHTTPError as error:
        raise ConfigError(f"model={name}: the model hub refused it: {error}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(
            f"model={name} is not a local folder, is not in the local hub cache, and the model hub cannot be reached. "
            "Copy the model to a folder and set model=/path/to/folder"
        ) from error


def load_tokenizer(checkpoint: Checkpoint, *, offline: bool = False) -> Any:
    """The tokenizer of the checkpoint, or of `model.tokenizer`."""
    from transformers import AutoTokenizer

    other = checkpoint.model.tokenizer
    folder = local_folder(other, None, SMALL_FILES, offline=offline) if other else checkpoint.folder
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=checkpoint.model.trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def generation_defaults(checkpoint: Checkpoint) -> dict[str, float | int]:
    """How the model's generation_config.json samples, by names of SamplingParams; what it does not say is neutral.

    As in `generate`, it is greedy unless `do_sample` is true. Raises ConfigError for a file that is not JSON.
    """
    path = checkpoint.folder / "generation_config.json"
    try:
        said = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    neutral: dict[str, float | int] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    defaults = {name: value if said.get(name) is None else said[name] for name, value in neutral.items()}
    return defaults if said.get("do_sample") else {**defaults, "temperature": 0.0}


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Any) -> set[int]:
    """Every id that ends a sequence: from generation_config, the model's config and the tokenizer.

    Chat models often end a turn with a token that only one of the three names.
    """
    from transformers import GenerationConfig

    values = [checkpoint.text_config.eos_token_id, getattr(tokenizer, "eos_token_id", None)]
    if (checkpoint.folder / "generation_config.json").is_file():
        values.append(GenerationConfig.from_pretrained(checkpoint.folder).eos_token_id)
    ids: set[int] = set()
    for value in values:
        ids.update([value] if isinstance(value, int) else value or [])
    return ids


def position_limit(config: Any) -> int | None:
    """Positions the model was built for.

    Dynamic rotary scalings recompute their frequencies from the longest sequence in the batch, so
    results would depend on batch mates: below the original length they are constant, and there the
    limit is put.
    """
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        limit = getattr(config, name, None)
        if isinstance(limit, int):
            break
    else:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    scalings = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for scaling in scalings:
        if scaling.get("rope_type") in ("dynamic", "longrope"):
            original = scaling.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, original or limit)
    return limit

"""Which weights, and how they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from batchrun.config.base import in_range, one_of, setting
from batchrun.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16", "tf32")
QUANTIZATIONS = ("none", "int8")


@dataclass
class ModelConfig:
    """Which weights, and how they are loaded."""

    path: str | None = setting(None, "local folder, hub id or .gguf file of a model", identity=True)
    gguf_file: str | None = setting(None, "name of the GGUF file in a folder or hub repository of such", identity=True)
    revision: str | None = setting(None, "branch, tag or commit of a hub id", identity=True)
    tokenizer: str | None = setting(None, "folder or hub id of another tokenizer", identity=True)
    dtype: str = setting(
        "auto",
        "auto: the checkpoint's type, on a CPU where that is faster than float32; float32, bfloat16, float16, or tf32: "
        "float32 with products in TF32, on an NVIDIA GPU",
        identity=True,
    )
    quantization: str = setting(
        "none", "none, or int8: weights and activations of the layers' products in 8 bits, on a CPU", identity=True
    )
    adapter: str | None = setting(
        None, "folder of a LoRA adapter that is merged into the weights, for all rows", identity=True
    )
    adapters: dict[str, str] = setting(
        {}, "folders of LoRA adapters by name, for rows that name one: see sampling.adapter", identity=True
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", identity=False)
    max_model_len: int | None = setting(
        None, "longest prompt + completion in tokens; default: the model's", identity=True
    )
    trust_remote_code: bool = setting(False, "run Python code that comes with the checkpoint", identity=True)
    allow_pickle: bool = setting(False, "load .bin weights too; they can run code when opened", identity=False)

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, DTYPES)
        one_of("model.quantization", self.quantization, QUANTIZATIONS)
        if self.adapter is not None and self.adapters:
            raise ConfigError(
                f"model.adapter={self.adapter} is for all rows and model.adapters for those that name one: set one of "
                "them, or name the first in model.adapters and in sampling.adapter"
            )
        in_range("model.max_model_len", self.max_model_len, 2)

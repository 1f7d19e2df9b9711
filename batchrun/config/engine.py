"""How tokens are computed."""

from __future__ import annotations

from dataclasses import dataclass

from batchrun.config.base import in_range, one_of, setting
from batchrun.errors import ConfigError

ATTENTION = ("auto", "torch", "cpu", "triton", "flash_attn", "flashinfer")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
SWITCH = ("auto", "on", "off")
YAML_SWITCH = {"True": "on", "False": "off"}  # what YAML makes of the bare words


@dataclass
class EngineConfig:
    """How tokens are computed: speed and memory; only `kv_cache_dtype` and `batch_invariant` change what they are."""

    attention: str = setting(
        "auto", "attention backend: auto, torch, cpu, triton, flash_attn or flashinfer", identity=False
    )
    block_size: int | None = setting(
        None, "tokens in one page of the KV cache; default: what suits the attention backend", identity=False
    )
    num_blocks: int | None = setting(None, "pages in the KV cache; default: from kv_cache_gib", identity=False)
    kv_cache_gib: float | None = setting(
        None, "memory for the KV cache in GiB; default: from the free memory", identity=False
    )
    gpu_memory_utilization: float = setting(
        0.9, "share of a GPU's memory that the engine may use, weights and steps included", identity=False
    )
    kv_cache_dtype: str = setting(
        "auto",
        "auto: the model's type; half of bfloat16: int8, with a scale for each token and head, on a CPU, "
        "and fp8 (e4m3) on a GPU",
        identity=True,
    )
    swap_space: float = setting(
        0.0, "GiB of host memory of each engine process for the KV of preempted rows, on a GPU", identity=False
    )
    max_num_seqs: int = setting(256, "most sequences running at once", identity=False)
    max_batched_tokens: int = setting(2048, "most tokens computed in one step", identity=False)
    prefix_caching: bool = setting(True, "reuse pages of prompts that begin alike", identity=False)
    fused_layers: bool = setting(
        True, "rebuild decoder layers with merged products, where they compute the same", identity=False
    )
    torch_compile: bool = setting(
        False, "compile decoder layers that are not fused with torch.compile, when the model loads", identity=False
    )
    batch_invariant: bool = setting(
        False, "bitwise the same completion of a row in any batch; on a CPU, each engine has one thread", identity=True
    )
    overlap: str = setting(
        "auto", "plan a step while the device computes the one before: on, off, or auto (on a GPU)", identity=False
    )
    cuda_graphs: str = setting(
        "auto", "launch decode steps as graphs: on, off, or auto (on a GPU, for jobs that last)", identity=False
    )
    workers: str = setting(
        "auto",
        "engine processes: a number, or auto (one per GPU; small models on a CPU: one per core, in bfloat16 per two)",
        identity=False,
    )
    num_threads: int | None = setting(None, "CPU threads; default: all cores given to the process", identity=False)

    def __post_init__(self) -> None:
        one_of("engine.attention", self.attention, ATTENTION)
        one_of("engine.kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        self.overlap = YAML_SWITCH.get(self.overlap, self.overlap)
        self.cuda_graphs = YAML_SWITCH.get(self.cuda_graphs, self.cuda_graphs)
        one_of("engine.overlap", self.overlap, SWITCH)
        one_of("engine.cuda_graphs", self.cuda_graphs, SWITCH)
        in_range("engine.block_size", self.block_size, 1, 1024)
        in_range("engine.num_blocks", self.num_blocks, 2)
        in_range("engine.swap_space", self.swap_space, 0)
        in_range("engine.max_num_seqs", self.max_num_seqs, 1, 65536)
        in_range("engine.max_batched_tokens", self.max_batched_tokens, 1)
        in_range("engine.num_threads", self.num_threads, 1)
        if self.workers != "auto" and not (self.workers.isdecimal() and int(self.workers) >= 1):
            raise ConfigError(f"engine.workers={self.workers!r} must be auto or a number from 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"engine.gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1"
            )
        if self.kv_cache_gib is not None and not self.kv_cache_gib > 0:
            raise ConfigError(f"engine.kv_cache_gib={self.kv_cache_gib} must be above 0")

"""Whether the layers of a model will run as compiled calls, told from its config and the settings before it loads."""

from __future__ import annotations

from typing import Any

from batchrun.config import EngineConfig
from batchrun.engine.checkpoint import Checkpoint
from batchrun_kernels.cpu.product import fits, has_bfloat16_products

# Whose layers are fused, which is found by trying when a model loads (see layers.py), and said in advance for these.
FAMILIES = frozenset(
    {
        "cwm", "gemma", "gemma2", "gemma3_text", "internlm3", "llama", "ministral", "mistral", "phi3", "qwen2", "qwen3",
        "seed_oss", "smollm3",
    }
)  # fmt: skip


def settings_allow(checkpoint: Checkpoint, config: EngineConfig) -> bool:
    """Whether processor and settings are those with which layers in bfloat16 are compiled; see `can_compile`."""
    return (
        has_bfloat16_products()
        and config.attention in ("auto", "cpu")
        and config.fused_layers
        and not config.batch_invariant
        and config.kv_cache_dtype == "auto"
        and checkpoint.model.quantization != "int8"
        and not checkpoint.adapters
    )


def shape_allows(config: Any) -> bool:
    """Whether a model with the config of its language part is of a known family, and its products have no padding."""
    if config.model_type not in FAMILIES:
        return False
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    products = (
        ((heads + 2 * kv_heads) * dim, hidden),
        (hidden, heads * dim),
        (inner, hidden),
        (hidden, inner),
        (config.vocab_size, hidden),
    )
    return all(fits(features, depth) for features, depth in products)

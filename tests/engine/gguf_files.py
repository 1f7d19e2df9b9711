"""GGUF files of tiny Llama models, as llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.engine.families import VOCABULARY

SPECIAL = ["<s>", "</s>", "<pad>", "<unk>"]
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_gguf(path: Path, model: Path, kind: gguf.GGMLQuantizationType | None = None, **metadata: Any) -> Path:
    """The Llama model of a folder as a GGUF file, with products as blocks of a `kind` if one is given.

    `metadata` adds to and changes what the file says: `tokenizer__ggml__eot_token_id=5`.
    """
    module = AutoModelForCausalLM.from_pretrained(model)
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, module.config)
    _add_tokenizer(writer)
    for key, value in metadata.items():
        writer.kv_data[0].pop(key.replace("__", "."), None)
        _add(writer, key.replace("__", "."), value)
    for name, tensor in _tensors(module):
        if kind is None or tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add: dict[type, Any] = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        bool: writer.add_bool,
    }
    add[type(value)](key, value)


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Bytes, as far as the vocabulary goes, and two merges: a list of one is none to older releases of transformers."""
    letters = list(bytes_to_unicode().values())[: VOCABULARY - len(SPECIAL) - 2]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*SPECIAL, *letters, "go", "to"])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (VOCABULARY - len(SPECIAL)))
    writer.add_token_merges(["g o", "t o"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def _tensors(module: Any) -> list[tuple[str, np.ndarray]]:
    config, state = module.config, module.state_dict()
    named = {f"{name}.weight": state[f"{source}.weight"] for name, source in WHOLE.items()}
    for i in range(config.num_hidden_layers):
        named |= {
            f"blk.{i}.{name}.weight": state[f"model.layers.{i}.{source}.weight"] for name, source in LAYER.items()
        }
        for name, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            named[f"blk.{i}.{name}.weight"] = _interleaved(named[f"blk.{i}.{name}.weight"], heads)
    return [(name, tensor.float().numpy()) for name, tensor in named.items()]


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of llama.cpp's rotary embedding, which turns neighbours and not halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape).contiguous()

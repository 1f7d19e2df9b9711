"""transformers' continuous batching: a paged cache, prefixes shared."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

Row = tuple[list[int], int]
NO_TOKEN = -1  # as end of sequence: no row ends early
POLL_SECONDS = 1.0


class Engine:
    """A manager for each run, with a cache of its own. Rows go to the manager itself, since `generate_batch` has one
    output length for all of them."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(spec["threads"])
        transformers.utils.logging.set_verbosity_error()
        self.version = transformers.__version__
        settings = spec["settings"]
        model = transformers.AutoModelForCausalLM.from_pretrained(
            spec["model"], dtype=getattr(torch, spec["dtype"]), attn_implementation="sdpa"
        )
        self.model: Any = model.to(spec["device"]).eval()
        self.generation = transformers.GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0)
        named = {field.name for field in fields(transformers.ContinuousBatchingConfig)}
        page_size = "page_size" if "page_size" in named else "block_size"  # as releases before it call it
        self.batching = transformers.ContinuousBatchingConfig(
            **{page_size: settings["block_size"]},
            num_blocks=_blocks(spec, self.model),
            max_batch_tokens=settings["max_batched_tokens"],
            max_requests_per_batch=settings["max_num_seqs"],
            scheduler_type=settings["scheduler"],
            allow_block_sharing=True,
        )

    def generate(self, rows: list[Row]) -> list[list[int]]:
        import torch

        outputs: list[list[int]] = [[] for _ in rows]
        # Prompts with a common prefix lie side by side, as in generate_batch.
        order = sorted(range(len(rows)), key=lambda i: rows[i][0], reverse=True)
        with (
            torch.no_grad(),  # not inference mode: the manager writes to its tensors in a thread that is not in it
            self.model.continuous_batching_context_manager(
                generation_config=self.generation, continuous_batching_config=self.batching
            ) as manager,
        ):
            for i in order:
                ids, count = rows[i]
                manager.add_request(ids, request_id=str(i), max_new_tokens=count, eos_token_id=NO_TOKEN)
            left = len(rows)
            while left:
                result = manager.get_result(timeout=POLL_SECONDS)
                if result is None and not manager.is_running():
                    raise RuntimeError(f"continuous batching stopped with {left} rows to go")
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    outputs[int(result.request_id)] = result.generated_tokens
                    left -= 1
        return outputs

    def reset(self, rows: list[Row]) -> None:
        """Nothing outlives a run."""


def _blocks(spec: dict[str, Any], model: Any) -> int:
    """Pages for as many of the longest rows as run at once, if so many fit into the memory of the KV cache. More would
    be paid for: each step's mask spans the whole cache."""
    config = model.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    settings, page = spec["settings"], spec["settings"]["block_size"]
    needed = settings["max_num_seqs"] * -(-spec["max_model_len"] // page)
    return min(needed, max(2, int(spec["kv_cache_gib"] * 2**30 / per_token / page)))

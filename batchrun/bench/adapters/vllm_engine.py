"""vLLM, offline."""

from __future__ import annotations

import os
from typing import Any

Row = tuple[list[int], int]


class Engine:
    """`LLM.generate` over token ids, without tokenizer and text."""

    def __init__(self, spec: dict[str, Any]) -> None:
        # Read when vLLM is imported. In one process, so that a stopped bench stops all of it.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(spec["kv_cache_gib"]))))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, spec["cores"])))
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        import vllm

        settings = spec["settings"]
        on_gpu = {"kv_cache_memory_bytes": int(spec["kv_cache_gib"] * 2**30)} if spec["device"] != "cpu" else {}
        self.version = vllm.__version__
        self.llm = vllm.LLM(
            model=spec["model"],
            dtype=spec["dtype"],
            max_model_len=spec["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_batched_tokens"],
            enable_prefix_caching=settings["prefix_caching"],
            enforce_eager=settings["enforce_eager"],
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **on_gpu,
        )

    def generate(self, rows: list[Row]) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=count, detokenize=False) for _, count in rows
        ]
        prompts = [{"prompt_token_ids": ids} for ids, _ in rows]
        done = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in done]

    def reset(self, rows: list[Row]) -> None:
        if self.llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM kept its prefix cache: a second round would not do the same work")

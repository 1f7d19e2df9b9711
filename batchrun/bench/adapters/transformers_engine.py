"""transformers `generate`: left-padded batches that run until their longest row is done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Row = tuple[list[int], int]


class Engine:
    """Batches of `batch` rows, or of as many as pad to `tokens`; in order, or sorted by length of the prompt."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(spec["threads"])
        transformers.utils.logging.set_verbosity_error()
        self.version = transformers.__version__
        self.settings = spec["settings"]
        model = transformers.AutoModelForCausalLM.from_pretrained(
            spec["model"], dtype=getattr(torch, spec["dtype"]), attn_implementation="sdpa"
        )
        self.model: Any = model.to(spec["device"]).eval()
        self.model.generation_config = transformers.GenerationConfig(
            do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=self.settings["use_cache"]
        )

    def generate(self, rows: list[Row]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in rows]
        for numbers in self._batches(rows):
            for number, tokens in zip(numbers, self._complete([rows[i] for i in numbers])):
                outputs[number] = tokens[: rows[number][1]]
        return outputs

    def reset(self, rows: list[Row]) -> None:
        """Nothing outlives a batch."""

    def _batches(self, rows: list[Row]) -> Iterator[list[int]]:
        """Numbers of the rows that run together."""
        order = list(range(len(rows)))
        if self.settings["sort"]:
            order.sort(key=lambda i: -len(rows[i][0]))
        batch: list[int] = []
        for number in order:
            if batch and not self._fits([rows[i] for i in [*batch, number]]):
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _fits(self, batch: list[Row]) -> bool:
        if not self.settings["tokens"]:
            return len(batch) <= self.settings["batch"]
        padded = max(len(ids) for ids, _ in batch) + max(count for _, count in batch)
        return len(batch) * padded <= self.settings["tokens"]

    def _complete(self, batch: list[Row]) -> list[list[int]]:
        """As many tokens for each row as the longest output has."""
        import torch

        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in batch], device=self.model.device)
        seen = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in batch], device=ids.device)
        longest = max(count for _, count in batch)
        with torch.inference_mode():
            done = self.model.generate(
                input_ids=ids, attention_mask=seen, max_new_tokens=longest, min_new_tokens=longest
            )
        return done[:, width:].tolist()

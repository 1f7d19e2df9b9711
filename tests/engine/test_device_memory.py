"""The sum of a GPU's memory, with a meter that counts in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.config import EngineConfig
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.device_memory import GIB, DeviceMemory, measure_memory
from batchrun.engine.hook import NAME
from batchrun.engine.loading import with_fixed
from batchrun.engine.memory import kv_budget
from batchrun.engine.model import PagedModel
from batchrun.errors import ConfigError

TOTAL, WEIGHTS = 1000, 300


class FakeMeter:
    """A device of TOTAL bytes on which each token of a step takes `each` of them."""

    def __init__(self, others: int = 0, each: int = 1) -> None:
        self.others, self.each, self.steps = others, each, []  # type: int, int, list[tuple[int, int]]

    def free_and_total(self) -> tuple[int, int]:
        return TOTAL - self.others - WEIGHTS - 7, TOTAL

    def allocated(self) -> int:
        return WEIGHTS

    def reserved(self) -> int:
        return WEIGHTS + 7

    def peak(self) -> int:
        tokens, rows = self.steps[-1]
        return WEIGHTS + self.each * tokens + (2 * rows if rows > 1 else 0)

    def reset(self) -> None:
        pass

    def watch(self, model: Any) -> None:
        """Note the model's steps, and refuse those that are too large."""
        original = model.run

        def run(tokens: torch.Tensor, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            self.steps.append((len(tokens), len(index)))
            if self.peak() > TOTAL - self.others:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return original(tokens[:4], positions[:4], index[:1] * 0)

        model.run = run


@pytest.fixture
def model(llama: Path) -> PagedModel:
    return PagedModel(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32, attn_implementation=NAME))


def test_what_is_left_is_the_share_less_weights_and_steps() -> None:
    memory = DeviceMemory(total=80 * GIB, others=0, weights=16 * GIB, step=2 * GIB, logits=GIB)
    assert memory.left(0.9) == 72 * GIB - 19 * GIB
    assert memory.explain(0.9) == (
        "80.00 GiB x engine.gpu_memory_utilization=0.9: weights 16.00 + step 2.00 + logits 1.00 + KV cache 53.00 GiB"
    )


def test_what_an_engine_holds_beside_them_is_in_the_sum() -> None:
    memory = DeviceMemory(80 * GIB, 0, 16 * GIB, 2 * GIB, GIB, GIB // 4, GIB // 8, GIB // 2, GIB)
    assert memory.left(0.9) == 72 * GIB - 19 * GIB - GIB // 8 * 15
    assert memory.explain(0.9).endswith(
        "logits 1.00 + penalty table 0.25 + attention workspace 0.12 + buffers of graphs 0.50 + "
        "graphs (estimated) 1.00 + KV cache 51.12 GiB"
    )


def test_without_triton_only_the_library_holds_more(model: PagedModel) -> None:
    config, memory = EngineConfig(block_size=16), DeviceMemory(TOTAL, 0, WEIGHTS, 20, 10)

    class Library(TorchAttention):
        name = "flashinfer"
        workspace_bytes = 99

    assert with_fixed(memory, model, TorchAttention, config, 64, records=False) == memory
    assert with_fixed(memory, model, Library, config, 64, records=False) == memory._replace(workspace=99)


def test_what_others_hold_is_not_promised_twice() -> None:
    memory = DeviceMemory(total=80 * GIB, others=20 * GIB, weights=16 * GIB, step=0, logits=0)
    assert memory.left(0.9) == 44 * GIB  # 60 are there at all
    assert memory.left(0.5) == 24 * GIB
    assert "; others hold 20.00: weights" in memory.explain(0.9)


def test_a_trial_step_is_measured(model: PagedModel) -> None:
    meter = FakeMeter(others=100)
    meter.watch(model)
    memory, tokens = measure_memory(model, meter, 200, 32)
    assert tokens == 200
    assert memory == DeviceMemory(TOTAL, 100, WEIGHTS, 200, 32 + 2 * 32)
    assert meter.steps == [(200, 1), (32, 32)]


def test_the_real_forward_takes_the_trial_step(model: PagedModel) -> None:
    meter = FakeMeter()
    meter.steps.append((0, 0))
    memory, _ = measure_memory(model, meter, 600, 3)  # more tokens than positions
    assert memory.weights == WEIGHTS


def test_out_of_memory_halves_the_tokens_of_a_step(model: PagedModel, caplog: pytest.LogCaptureFixture) -> None:
    meter = FakeMeter(each=6)
    meter.watch(model)
    memory, tokens = measure_memory(model, meter, 400, 8)
    assert tokens == 100  # 6 x 100 fit 700, 6 x 200 do not
    assert memory.step == 600
    assert "engine.max_batched_tokens=400 tokens does not fit the device: 100 are taken" in caplog.text


def test_a_device_without_room_for_a_small_step_is_refused(model: PagedModel) -> None:
    meter = FakeMeter(each=60)  # 11 tokens fit
    meter.watch(model)
    with pytest.raises(ConfigError, match=r"a step of a few tokens finds no room.*engine\.max_num_seqs=8"):
        measure_memory(model, meter, 400, 8)


def test_the_cache_gets_what_is_left_unless_it_is_configured(model: PagedModel) -> None:
    layout, left = model.kv_layout, 3 * 2**20
    arguments = layout, torch.float32, 4096, torch.device("cpu")
    assert kv_budget(EngineConfig(block_size=16), *arguments, left=left) == left
    assert kv_budget(EngineConfig(block_size=16, kv_cache_gib=0.001), *arguments, left=left) == 0.001 * GIB

"""Every adapter does the same work: the tokens of greedy decoding, and as many as are asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from batchrun.bench.adapters import (
    batchrun_engine,
    llama_cpp_engine,
    openvino_engine,
    transformers_continuous_engine,
    transformers_engine,
)
from tests.bench.conftest import spec_of

ROWS = [([(7 * i + j) % 250 + 4 for j in range(5 + 9 * i)], 3 + 2 * (i % 3)) for i in range(5)]
LABELS = [
    "batchrun:workers=1",
    "batchrun:workers=1:static=2",
    "transformers",
    "transformers:batch=2:sort=false",
    "transformers:tokens=100",
    "transformers:batch=1:use_cache=false",
    "transformers_continuous:max_num_seqs=2:max_batched_tokens=64:block_size=16",
]
MODULES: dict[str, Any] = {
    "batchrun": batchrun_engine,
    "transformers": transformers_engine,
    "transformers_continuous": transformers_continuous_engine,
}


def settings(label: str, model: Path, **more: Any) -> dict[str, Any]:
    spec = spec_of(label, str(model), models={"openvino": str(model), "llama_cpp": str(model)})
    common = {"dtype": "float32", "device": "cpu", "threads": 1, "cores": [0], "max_model_len": 64, "kv_cache_gib": 0.1}
    return {"model": spec.model, "settings": spec.settings, **common, **more}


@pytest.fixture(scope="module")
def greedy(tiny: Path) -> list[list[int]]:
    """Each row alone, by the model's own highest logits, without any cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    outputs = []
    for prompt, count in ROWS:
        ids = list(prompt)
        for _ in range(count):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        outputs.append(ids[len(prompt) :])
    return outputs


@pytest.mark.parametrize("label", LABELS)
def test_tokens_are_those_of_greedy_decoding_in_each_round(label: str, tiny: Path, greedy: list[list[int]]):
    engine = MODULES[label.partition(":")[0]].Engine(settings(label, tiny))
    assert engine.version
    assert engine.generate(ROWS) == greedy
    for rows, outputs in ((ROWS, greedy), (ROWS[:2], greedy[:2])):
        engine.reset(rows)
        assert engine.generate(rows) == outputs


def test_our_engine_keeps_no_prefix_from_an_earlier_run(tiny: Path):
    engine = batchrun_engine.Engine(settings("batchrun:workers=1", tiny))
    rows = [(list(range(4, 200)), 1)]
    for _ in range(3):
        engine.generate(rows)
        assert engine.engine.scheduler.cached_tokens == 0
        engine.reset(rows)
    engine.generate(rows)
    engine.generate(rows)
    assert engine.engine.scheduler.cached_tokens == 192


def test_our_engine_is_made_anew_for_another_number_of_rows(tiny: Path):
    engine = batchrun_engine.Engine(settings("batchrun:workers=1", tiny))
    engine.generate(ROWS)
    first = engine.engine
    engine.reset(ROWS)
    assert engine.engine is first
    engine.reset(ROWS[:2])
    assert engine.engine is not first


def test_a_row_that_our_engine_refuses_is_an_error(tiny: Path):
    engine = batchrun_engine.Engine(settings("batchrun:workers=1", tiny))
    with pytest.raises(RuntimeError, match="row 0: the prompt has no tokens"):
        engine.generate([([], 2)])


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ("batch=2:sort=false", [[0, 1], [2, 3], [4]]),
        ("batch=2", [[4, 3], [2, 1], [0]]),
        ("tokens=100", [[4, 3], [2, 1, 0]]),
    ],
)
def test_which_rows_share_a_static_batch(options: str, batches: list[list[int]], tiny: Path):
    engine = transformers_engine.Engine(settings(f"transformers:{options}", tiny))
    assert list(engine._batches(ROWS)) == batches


class Pipeline:
    """OpenVINO's pipeline as far as it is used: answers with the sums of prompts, and refuses a second run."""

    made: list[Any]

    def __init__(self, model: str, scheduler: Any, device: str, options: dict[str, Any]) -> None:
        self.arguments = (model, vars(scheduler), device, options)
        self.runs = 0
        Pipeline.made.append(self)

    def generate(self, prompts: list[np.ndarray], configs: list[Any]) -> list[Any]:
        self.runs += 1
        assert all(config.ignore_eos and not config.do_sample for config in configs)
        return [
            SimpleNamespace(m_generation_ids=[(int(prompt.sum()) + np.arange(config.max_new_tokens)).tolist()])
            for prompt, config in zip(prompts, configs, strict=True)
        ]


def test_openvino_runs_each_workload_in_a_pipeline_that_has_only_warmed_up(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    module: Any = ModuleType("openvino_genai")
    module.__version__, module.ContinuousBatchingPipeline = "9", Pipeline
    module.SchedulerConfig = module.GenerationConfig = SimpleNamespace
    monkeypatch.setitem(sys.modules, "openvino_genai", module)
    core = SimpleNamespace(get_property=lambda device, name: ["FP32", "BF16"])
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array, Core=lambda: core))
    Pipeline.made = []
    engine = openvino_engine.Engine(settings("openvino:max_num_seqs=8", tiny, dtype="bfloat16", kv_cache_gib=2.0))
    engine.generate(ROWS[:1])
    for _ in range(2):
        engine.reset(ROWS)
        assert engine.generate(ROWS) == [[sum(ids) + i for i in range(count)] for ids, count in ROWS]
    first, *others = Pipeline.made
    assert first.runs == 2  # the warm-up, and the first workload
    assert [pipeline.runs for pipeline in others] == [2]
    assert first.arguments == (
        str(tiny),
        {
            "cache_size": 2,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "enable_prefix_caching": True,
            "dynamic_split_fuse": True,
        },
        "CPU",
        {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 1, "KV_CACHE_PRECISION": "bf16"},
    )


class Llama:
    """llama-cpp-python's class as far as it is used: an endless generator of what the last reset has not cleared."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.seen = 0

    def generate(self, tokens: list[int], top_k: int, temp: float) -> Any:
        assert (top_k, temp) == (1, 0.0)
        self.seen += 1
        yield from (sum(tokens) + i for i in range(1000))

    def reset(self) -> None:
        self.seen = 0


def test_llama_cpp_takes_as_many_tokens_as_asked_and_forgets(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    module: Any = ModuleType("llama_cpp")
    module.__version__, module.Llama = "9", Llama
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    engine = llama_cpp_engine.Engine(settings("llama_cpp:max_batched_tokens=16", tiny))
    assert engine.generate(ROWS) == [[sum(ids) + i for i in range(count)] for ids, count in ROWS]
    engine.reset(ROWS)
    assert engine.llm.seen == 0
    assert engine.llm.options == {
        "model_path": str(tiny), "n_ctx": 64, "n_batch": 16, "n_threads": 1, "n_threads_batch": 1, "verbose": False,
    }  # fmt: skip

"""Stand-ins for engines that are not installed, importable by the processes that serve them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchrun.bench import measure
from batchrun.bench.engines import EngineSpec, parse_engine
from batchrun.bench.limits import Limits
from batchrun.bench.process import Surroundings
from batchrun.bench.tiny import save_tiny_model
from batchrun.config import BenchConfig, Config, EngineConfig, ModelConfig, OutputConfig

# Each token is the sum of the prompt and the token's place, so that every engine can agree on it.
VLLM = """
import os, signal, sys

__version__ = "9.vllm"
print("a line on stdout")


class SamplingParams:
    def __init__(self, temperature, ignore_eos, max_tokens, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0, True, False)
        self.max_tokens = max_tokens


class Output:
    def __init__(self, ids):
        self.outputs = [self]
        self.token_ids = tuple(ids)


class LLM:
    def __init__(self, **options):
        self.options = options
        self.calls = 0
        self.resets = 0
        if options["max_num_seqs"] == 13:
            raise MemoryError("no room for 13")

    def generate(self, prompts, params, use_tqdm):
        self.calls += 1
        assert self.calls == self.resets + 1, "a run over a full cache"
        behave = self.options["max_num_seqs"] if self.calls > 1 else 0
        if behave == 14:
            os._exit(7)
        if behave == 15:
            signal.pause()
        short = int(behave == 16)
        done = []
        for prompt, p in zip(prompts, params):
            total = sum(prompt["prompt_token_ids"])
            done.append(Output((total + i) % 251 for i in range(p.max_tokens - short)))
        return done

    def reset_prefix_cache(self):
        self.resets += 1
        return True
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with random weights that takes the rows of every fixed workload."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), positions=4096)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that processes import; it has a stand-in for vLLM.

    Engines that have `max_num_seqs` of 13 fail to load; from the second run on 14 dies, 15 hangs and 16 generates a
    token less than asked.
    """
    folder = tmp_path / "stand_ins"
    folder.mkdir()
    (folder / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def around(tmp_path: Path) -> Surroundings:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return Surroundings("float32", "cpu", [0], 512, kv_cache_gib=0.1, limit_seconds=120, scratch=scratch)


def spec_of(label: str, model: str = "a-model", **options: Any) -> EngineSpec:
    return parse_engine(label, Config(bench=BenchConfig(**options)), model)


def bench_config(model: Path, output: Path, **options: Any) -> Config:
    """A bench of one thread, with the rows of the fixed workloads cut to the first three."""
    return Config(
        mode="bench",
        offline=True,
        model=ModelConfig(path=str(model), dtype="float32", device="cpu"),
        engine=EngineConfig(num_threads=1),
        output=OutputConfig(path=str(output)),
        bench=BenchConfig(**{"rows": 3, "kv_cache_gib": 0.1, **options}),
    )


@pytest.fixture
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that need not be measured: 1 GFLOP/s, 1 GB/s."""
    monkeypatch.setattr(measure, "measure_limits", lambda *_: Limits(1e9, 1e9))

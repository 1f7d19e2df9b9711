"""Several engine processes behind one door: the same answers, and nothing lost when one dies."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchrun.config import EngineConfig, ModelConfig
from batchrun.engine import layer_calls
from batchrun.engine import worker as worker_module
from batchrun.engine.checkpoint import Checkpoint, open_checkpoint
from batchrun.engine.llm import LLM
from batchrun.engine.loading import load_engine
from batchrun.engine.model import UnsupportedModel
from batchrun.engine.params import Completion, Request, SamplingParams
from batchrun.engine.pool import EnginePool
from batchrun.engine.worker import Placement, place_workers
from batchrun.errors import BatchrunError, ConfigError
from tests.engine.families import load, make_model, random_prompt

CONFIG = EngineConfig(num_blocks=256, max_num_seqs=16, workers="2", num_threads=2)
PROMPTS = [random_prompt(i % 5, 20 + i % 30) for i in range(60)]


def open_folder(folder: Path, dtype: str = "float32") -> Checkpoint:
    return open_checkpoint(ModelConfig(path=str(folder), dtype=dtype, device="cpu"), offline=True)


def start(folder: Path) -> EnginePool:
    pool = load_engine(open_folder(folder), None, CONFIG)
    assert isinstance(pool, EnginePool)
    return pool


def finish(pool: EnginePool) -> dict[Any, Completion]:
    done = {}
    while pool.has_work():
        for completion in pool.step():
            assert completion.key not in done, "a row came twice"
            done[completion.key] = completion
    return done


@pytest.fixture(scope="module")
def pool(family_folder: Callable[[str], Path]) -> Iterator[EnginePool]:
    pool = start(family_folder("llama"))
    yield pool
    pool.check_integrity()
    pool.close()


def test_answers_are_those_of_one_engine(pool: EnginePool, llama: Path) -> None:
    params = [SamplingParams(max_tokens=1 + i % 20, temperature=i % 2, seed=i) for i in range(len(PROMPTS))]
    expected = load(llama).generate(PROMPTS, params)
    for i, prompt in enumerate(PROMPTS):
        pool.add(Request(i, prompt, params[i]))
    done = finish(pool)
    assert [done[i].token_ids for i in range(len(PROMPTS))] == [c.token_ids for c in expected]
    steps = pool.take_steps()
    assert sum(step.sampled for step in steps) == sum(len(c.token_ids) for c in expected)
    assert pool.take_steps() == []


def test_likelihoods_are_those_of_one_engine(pool: EnginePool, llama: Path) -> None:
    labels = ((7,), (8, 9), (8, 10, 11))
    requests = [Request(i, prompt, continuations=labels) for i, prompt in enumerate(PROMPTS)]
    expected = {done.key: done.likelihoods for done in load(llama).stream(requests)}
    for request in requests:
        pool.add(request)
    done = finish(pool)
    assert done.keys() == expected.keys()
    for key, likelihoods in expected.items():
        assert likelihoods is not None
        mine = done[key].likelihoods
        assert mine is not None
        for one, other in zip(mine, likelihoods, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_rows_that_cannot_run_come_back(pool: EnginePool) -> None:
    pool.add(Request("empty", []))
    pool.add(Request("long", [5] * 600))
    pool.add(Request("good", [5, 6, 7], SamplingParams(max_tokens=3)))
    done = finish(pool)
    assert {key: c.error_type for key, c in done.items()} == {
        "empty": "empty_prompt",
        "long": "prompt_too_long",
        "good": None,
    }


def test_aborted_and_dropped_rows_do_not_come_back(pool: EnginePool) -> None:
    for i, prompt in enumerate(PROMPTS):
        pool.add(Request(i, prompt, SamplingParams(max_tokens=200, ignore_eos=True)))
    first = pool.step()
    for key in range(0, 60, 2):
        pool.abort(key)
    dropped = pool.drop_waiting()
    done = finish(pool)
    assert set(done).isdisjoint(range(0, 60, 2))
    assert set(done).isdisjoint(dropped)
    assert not first
    assert len(done) < 30
    assert pool.room == 16


def test_prompts_that_begin_alike_go_to_one_worker_until_it_is_busy(pool: EnginePool) -> None:
    workers: list[Any] = [SimpleNamespace(load=0), SimpleNamespace(load=100)]
    alike = Request(0, random_prompt(9, 80))
    assert pool._route(alike, workers) is workers[0]
    workers[0].load = 900
    assert pool._route(Request(1, [*random_prompt(9, 80), 7]), workers) is workers[0]
    assert pool._route(Request(2, random_prompt(10, 80)), workers) is workers[1]
    workers[0].load = 20_000
    assert pool._route(alike, workers) is workers[1], "which has what they begin with from now on"
    workers[1].load = 20_001
    assert pool._route(alike, workers) is workers[0]
    workers[0].load = 20_002
    assert pool._route(alike, workers) is workers[1]
    assert pool._route(alike, workers[:1]) is workers[0]
    pool._owners.clear()


def test_rows_of_a_dead_worker_go_to_the_others(
    family_folder: Callable[[str], Path], llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = start(family_folder("llama"))
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = load(llama).generate(PROMPTS, params)
    for i, prompt in enumerate(PROMPTS):
        pool.add(Request(i, prompt, params))
    done = {completion.key: completion for completion in pool.step()}
    victim = max(pool._workers, key=lambda worker: len(worker.flying))
    assert victim.flying
    os.kill(victim.process.pid, signal.SIGKILL)
    with caplog.at_level(logging.WARNING):
        done |= finish(pool)
    assert [done[i].token_ids for i in range(len(PROMPTS))] == [c.token_ids for c in expected]
    assert "died" in caplog.text
    (last,) = pool._workers
    pool.add(Request("more", PROMPTS[0], params))
    pool.step()
    os.kill(last.process.pid, signal.SIGKILL)
    with pytest.raises(BatchrunError, match="every engine worker is dead"):
        finish(pool)


def test_a_row_that_kills_workers_is_given_up(family_folder: Callable[[str], Path]) -> None:
    pool = EnginePool(open_folder(family_folder("llama")), CONFIG, [Placement("cpu", (), 1)] * 3)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    for _ in range(2):
        if not pool.has_work():
            pool.add(Request("poison", PROMPTS[0], params))
        pool.step()
        (holder,) = [worker for worker in pool._workers if worker.flying]
        os.kill(holder.process.pid, signal.SIGKILL)
        while holder in pool._workers:
            done = pool.step()
    done = done or pool.step()
    assert [(c.key, c.error_type) for c in done] == [("poison", "engine_error")]
    assert not pool.has_work()
    pool.close()


def test_a_model_that_is_refused_is_refused_by_the_pool(tmp_path: Path) -> None:
    folder = make_model("bloom", tmp_path / "bloom")
    with pytest.raises(UnsupportedModel, match="bloom"):
        start(folder)


def test_where_workers_run(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_cores", lambda: (0, 1, 2, 3))
    checkpoint, auto = open_folder(llama), EngineConfig()
    one = [Placement("cpu", (0, 1, 2, 3), 4)]
    assert place_workers(checkpoint, auto, rows=1000) == [Placement("cpu", (i,), 1) for i in range(4)]
    assert place_workers(checkpoint, auto, rows=10) == one
    monkeypatch.setattr(layer_calls, "has_bfloat16_products", lambda: True)
    halves = open_folder(llama, dtype="bfloat16")
    pairs = [Placement("cpu", (0, 1), 2), Placement("cpu", (2, 3), 2)]
    assert place_workers(halves, auto, rows=1000) == pairs
    assert len(place_workers(halves, auto, rows=1000, encodes=True)) == 4
    assert place_workers(halves, auto, rows=10) == one
    assert place_workers(halves, replace(auto, num_threads=3), rows=1000) == [Placement("cpu", (0, 1, 2, 3), 3)]
    five = place_workers(halves, replace(auto, num_threads=5), rows=1000)
    assert five == [Placement("cpu", (0, 1), 2), Placement("cpu", (2, 3, 0), 3)]
    assert len(place_workers(halves, replace(auto, batch_invariant=True), rows=1000)) == 4
    assert len(place_workers(halves, replace(auto, kv_cache_dtype="int8"), rows=1000)) == 4
    assert place_workers(checkpoint, auto, rows=None) == one
    two = place_workers(checkpoint, replace(auto, workers="2"), rows=1)
    assert two == [Placement("cpu", (0, 1), 2), Placement("cpu", (2, 3), 2)]
    assert len(place_workers(checkpoint, replace(auto, workers="16"), rows=1)) == 16
    monkeypatch.setattr(worker_module, "SMALL_MODEL_BYTES", 10)
    assert place_workers(checkpoint, auto, rows=1000) == one


@pytest.mark.parametrize("change", [{"workers": "17"}, {"workers": "999999999999"}, {"num_threads": 17}])
def test_more_workers_or_threads_than_cores_can_serve_are_refused(
    change: dict[str, Any], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_cores", lambda: (0, 1, 2, 3))
    ((key, value),) = change.items()
    with pytest.raises(ConfigError, match=rf"engine\.{key}={value} is more than 4 for each of the 4 CPU cores"):
        place_workers(open_folder(llama), replace(EngineConfig(), **change), rows=1000)


def test_the_library_door_stays_in_its_process_unless_asked(llama: Path) -> None:
    assert not isinstance(LLM(str(llama), device="cpu", num_blocks=64).engine, EnginePool)


FORGOTTEN = """
import sys
from pathlib import Path
from batchrun.engine.llm import LLM
if __name__ == "__main__":
    llm = LLM(sys.argv[1], device="cpu", num_blocks=64, workers="2", offline=True)
    print(llm.generate([[5, 6, 7]])[0].finish_reason)
"""


def test_a_pool_that_nobody_closes_ends_with_its_process(llama: Path, tmp_path: Path) -> None:
    script = tmp_path / "forgotten.py"
    script.write_text(FORGOTTEN)
    command = [sys.executable, str(script), str(llama)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("stop", "length")

"""Which products of float32 the engine's kernels are launched with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchrun import SamplingParams
from batchrun.engine import model, precision
from batchrun_kernels import paged_decode, paged_prefill
from tests.engine.families import load, make_model, random_prompt


@pytest.mark.parametrize(("dtype", "expected"), [("tf32", "tf32"), ("float32", "ieee")])
def test_attention_multiplies_as_the_model_does(
    dtype: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "check_tf32", lambda device: None)
    monkeypatch.setitem(precision.SETTINGS, "cpu", (torch.backends.cuda.matmul,))
    folder = make_model("llama", tmp_path, num_hidden_layers=1)
    with load(folder, dtype=dtype, attention="triton", fused_layers=False) as llm:
        launched: dict[str, set[str]] = {"decode": set(), "prefill": set()}
        for name, kernels in (("decode", paged_decode), ("prefill", paged_prefill)):
            choose = kernels.product_precision

            def noted(dtype: torch.dtype, name: str = name, choose: object = choose) -> str:
                found: str = choose(dtype)  # type: ignore[operator]
                launched[name].add(found)
                return found

            monkeypatch.setattr(kernels, "product_precision", noted)
        llm.generate([random_prompt(1, 12)], SamplingParams(max_tokens=2, ignore_eos=True))
    assert launched == {"decode": {expected}, "prefill": {expected}}

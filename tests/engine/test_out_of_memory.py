"""A step that finds no memory is made smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchrun.engine.params import SamplingParams
from batchrun.errors import BatchrunError
from tests.engine.families import engine_of, load, random_prompt


def test_a_step_that_runs_out_of_memory_is_made_smaller(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(i, length) for i, length in enumerate((40, 25, 90, 3))]
    params = SamplingParams(temperature=0, max_tokens=5)
    with load(llama) as llm:
        expected = [list(c.token_ids) for c in llm.generate(prompts, params)]
    sizes: list[int] = []
    with load(llama) as llm:
        engine = engine_of(llm)
        hidden = engine.model.hidden

        def limited(batch: Any) -> torch.Tensor:
            sizes.append(batch.num_tokens)
            if batch.num_tokens > 40:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return hidden(batch)

        monkeypatch.setattr(engine.model, "hidden", limited)
        assert [list(c.token_ids) for c in llm.generate(prompts, params)] == expected
        engine.check_integrity()
    assert sizes[:3] == [158, 79, 39]
    assert max(sizes[3:]) <= 39


def test_a_step_of_one_token_without_memory_ends_the_engine(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(llama) as llm:

        def never(batch: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(engine_of(llm).model, "hidden", never)
        with pytest.raises(BatchrunError, match="CUDA out of memory"):
            llm.generate([np.arange(4, 9).tolist()], SamplingParams(max_tokens=2))

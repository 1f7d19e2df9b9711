"""`engine.attention=flash_attn` and `flashinfer` with the packages themselves, where they are installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.engine.acceptance import paged_logits
from batchrun.engine.attention.registry import LIBRARIES, attention_backend
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.hook import NAME
from batchrun.engine.model import PagedModel
from batchrun.errors import ConfigError
from tests.engine.families import make_model, random_prompt

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_are_those_of_torch(name: str, family: str, tmp_path: Path) -> None:
    device = torch.device("cuda")
    try:
        backend = attention_backend(name, device)
    except ConfigError as error:
        pytest.skip(str(error))
    folder = make_model(family, tmp_path, head_dim=64)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=NAME)
    model = PagedModel(module.to(device))
    prompts = [np.array(random_prompt(i, length), dtype=np.int32) for i, length in enumerate((5, 36, 300))]
    for chunk in (7, 400):
        expected, found = (paged_logits(model, each, prompts, chunk) for each in (TorchAttention, backend))
        assert (found - expected).norm() < 0.05 * expected.norm()

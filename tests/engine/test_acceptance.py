"""The check at load passes what is right and refuses what is wrong, each fault by the step that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchrun.config import ModelConfig
from batchrun.engine import hook
from batchrun.engine.acceptance import check_model
from batchrun.engine.attention.base import LayerCall
from batchrun.engine.attention.torch import TorchAttention
from batchrun.engine.batch import Batch
from batchrun.engine.checkpoint import open_checkpoint
from batchrun.engine.model import PagedModel, UnsupportedModel, load_model
from batchrun.engine.staging import Staging
from tests.engine.families import make_model

Folder = Callable[[str], Path]


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> PagedModel:
    return load_model(open_checkpoint(ModelConfig(path=str(folder))), torch.device("cpu"), dtype)


def test_leaves_the_model_ready_for_a_backend(llama: Path) -> None:
    model = loaded(llama)
    assert check_model(model, TorchAttention) < 1e-5
    assert model.backend is None
    assert model.module.config._attn_implementation == hook.NAME


@pytest.mark.parametrize("window", [8, 4096])
def test_windows_are_tried_whatever_their_size_and_stay_as_they_are(window: int, tmp_path: Path) -> None:
    make_model("mistral", tmp_path, sliding_window=window)
    model = loaded(tmp_path)
    assert check_model(model, TorchAttention) < 1e-5
    with pytest.raises(UnsupportedModel, match="mistral: logits differ"):
        check_model(model, WithoutWindow)
    assert model.module.config.sliding_window == window


def test_layers_that_share_kv_are_found_and_cost_no_memory(family_folder: Folder) -> None:
    layers = loaded(family_folder("gemma4_text")).layers
    assert [layer.source for layer in layers] == [None, None, 0, 1]
    assert [layer.key_dim for layer in layers] == [8, 16, 8, 16]
    assert [layer.bytes_per_token(torch.float32) for layer in layers] == [2 * 16 * 4, 2 * 32 * 4, 0, 0]


def test_half_precision_passes(llama: Path) -> None:
    assert 0 < check_model(loaded(llama, torch.bfloat16), TorchAttention) < 0.25


class WithoutWindow(TorchAttention):
    def attend(self, call: LayerCall, *qkv: torch.Tensor) -> torch.Tensor:
        return super().attend(replace(call, window=None), *qkv)


class WithoutSoftcap(TorchAttention):
    def attend(self, call: LayerCall, *qkv: torch.Tensor) -> torch.Tensor:
        return super().attend(replace(call, softcap=None), *qkv)


class WithoutSinks(TorchAttention):
    def attend(self, call: LayerCall, *qkv: torch.Tensor) -> torch.Tensor:
        return super().attend(replace(call, sinks=None), *qkv)


class WithoutScale(TorchAttention):
    def attend(self, call: LayerCall, *qkv: torch.Tensor) -> torch.Tensor:
        return super().attend(replace(call, scale=1.0), *qkv)


class LosesThePast(TorchAttention):
    """Reads nothing that an earlier step wrote, as a backend does that attends to the batch alone."""

    def begin(self, batch: Batch, staging: Staging | None = None) -> None:
        for pages in self.pages:
            for page in pages or ():
                page.zero_()
        super().begin(batch, staging)


class NextBlock(TorchAttention):
    """Writes and reads each row's blocks as if they lay one after another, which other rows then overwrite."""

    def begin(self, batch: Batch, staging: Staging | None = None) -> None:
        width = batch.block_tables.shape[2]
        tables = (batch.block_tables[:, :, :1] + np.arange(width, dtype=np.int32)) % len(self.pages[0][0])
        owner = np.repeat(np.arange(len(batch.slots)), np.diff(batch.query_starts))
        size = self.block_size
        places = tables[:, owner, batch.positions // size].astype(np.int64) * size + batch.positions % size
        super().begin(replace(batch, block_tables=tables, slot_mapping=places), staging)


@pytest.mark.parametrize(
    ("family", "backend", "steps"),
    [
        ("llama", WithoutScale, 36),
        ("mistral", WithoutWindow, 36),
        ("gemma2", WithoutSoftcap, 36),
        ("gpt_oss", WithoutSinks, 36),
        ("llama", NextBlock, 36),
        ("llama", LosesThePast, 7),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_refuses_a_wrong_attention(
    family: str, backend: type[TorchAttention], steps: int, family_folder: Folder
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{family}: logits differ .* in steps of {steps} tokens"):
        check_model(loaded(family_folder(family)), backend)


def sabotaged(model: PagedModel, change: Callable[[dict[str, Any]], None]) -> PagedModel:
    """The model with `change` applied to the keyword arguments of every paged forward pass."""
    forward = model.module.forward

    def changed(**arguments: Any) -> Any:
        if model.module.config._attn_implementation == hook.NAME:
            change(arguments)
        return forward(**arguments)

    model.module.forward = changed
    return model


def test_refuses_a_model_that_counts_positions_by_itself(llama: Path) -> None:
    def ignore_positions(arguments: dict[str, Any]) -> None:
        arguments["position_ids"] = torch.arange(arguments["input_ids"].shape[1])[None]

    with pytest.raises(UnsupportedModel, match="llama: logits differ"):
        check_model(sabotaged(loaded(llama), ignore_positions), TorchAttention)


def test_refuses_a_model_that_is_right_only_in_whole_prompts(llama: Path) -> None:
    def restart_in_chunks(arguments: dict[str, Any]) -> None:
        places = arguments["position_ids"]
        starts = torch.cat([torch.ones(1, dtype=torch.bool), places[0, 1:] != places[0, :-1] + 1])
        first = places[0][starts][starts.long().cumsum(0) - 1]
        arguments["position_ids"] = places - first[None]

    with pytest.raises(UnsupportedModel, match="in steps of 7 tokens"):
        check_model(sabotaged(loaded(llama), restart_in_chunks), TorchAttention)


def test_refuses_logits_that_are_not_numbers(llama: Path) -> None:
    class NotNumbers(TorchAttention):
        def attend(self, call: LayerCall, *qkv: torch.Tensor) -> torch.Tensor:
            return super().attend(call, *qkv) * float("nan")

    with pytest.raises(UnsupportedModel, match="llama: logits differ"):
        check_model(loaded(llama), NotNumbers)


def test_a_model_that_overflows_by_itself_is_told_from_a_wrong_attention(llama: Path) -> None:
    model = loaded(llama)
    model.module.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(UnsupportedModel, match=r"llama: its own logits are not finite in torch\.float32"):
        check_model(model, TorchAttention)

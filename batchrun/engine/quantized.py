"""Products in int8 for the CPU: half the weights to read, and twice the arithmetic in an instruction.

Weights are rounded once, symmetrically, with a scale for each output; activations for each call, with a scale for
each token, so that a row's numbers do not depend on its batch mates. Sums are exact integers.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from batchrun.engine.layers import decoder_layers, dry_logits
from batchrun.engine.linear import PackedLinear
from batchrun.errors import ConfigError
from batchrun_kernels.cpu.quantized import (
    ZERO,
    has_matrix_unit,
    has_vnni,
    multiply,
    pack,
    quantize_rows,
    scale_rows,
)
from batchrun_kernels.cpu.scalar import elements

log = logging.getLogger(__name__)

FEW_ROWS = 8  # up to here a matrix unit waits for its weights, and vectors read them faster
WORTH_THREADS = 2**20  # weights of a product that is shared between threads
LIBRARY_MULTIPLE = 64  # oneDNN's tiles are ours with K rounded up to this
LARGE_CHANGE = 0.1  # of the logits: more than the rounding of bfloat16 makes
NONE = np.empty(0, dtype=np.float32)


class QuantizedLinear(torch.nn.Module):
    """y [..., N] = x [..., K] W^T + b with int8 weights, in the type of x.

    Processors with vector instructions for int8 but no matrix unit use our kernel. With a matrix unit oneDNN's is
    used, and ours for few rows where it can read oneDNN's layout; without either, oneDNN's alone.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, sources: Sequence[tuple[str, int]] = ()
    ) -> None:
        super().__init__()
        self.sources = sources
        self.out_features, self.in_features = weight.shape
        self.scales = (weight.abs().amax(dim=1).float() / 127).clamp_min(1e-30)
        rounded = (weight.float() / self.scales[:, None]).round().to(torch.int8)
        self.bias = NONE if bias is None else bias.float().numpy()
        self.offsets = (ZERO * rounded.sum(dim=1, dtype=torch.int32)).numpy()
        self.packed: torch.Tensor | None = None
        self.tiles: np.ndarray | None = None
        if has_vnni() and not has_matrix_unit():
            self.tiles = pack(rounded.numpy())
        else:
            self.use_library(rounded)

    def use_library(self, rounded: torch.Tensor) -> None:
        """Hold int8 weights [N, K] as oneDNN wants them, and as tiles of ours if these are the same bytes."""
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self.zero_points = torch.zeros(self.out_features, dtype=torch.int64)
        self.tiles = None
        if has_vnni():
            tiles = pack(rounded.numpy(), LIBRARY_MULTIPLE)
            bytes_there = int(torch.ops.mkldnn._nbytes(self.packed))
            if bytes_there >= tiles.nbytes:
                address = torch.ops.mkldnn.data_ptr(self.packed)
                theirs = np.ctypeslib.as_array((ctypes.c_int8 * tiles.nbytes).from_address(address)).reshape(
                    tiles.shape
                )
                self.tiles = theirs if np.array_equal(theirs, tiles) else None

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`add` [..., N] is added before the result is rounded."""
        rows = x.reshape(-1, self.in_features)
        out = x.new_empty(*x.shape[:-1], self.out_features)
        y = elements(out.view(-1, self.out_features))
        more = y[:0] if add is None else elements(add.reshape(-1, self.out_features))
        scales = np.empty(len(rows), dtype=np.float32)
        if self.tiles is not None and (self.packed is None or len(rows) <= FEW_ROWS):
            quantized = np.empty((len(rows), 4 * self.tiles.shape[1]), dtype=np.uint8)
            quantize_rows(elements(rows), quantized, scales)
            self._multiply(quantized, scales, self.tiles, more, y)
        else:
            quantized = np.empty((len(rows), self.in_features), dtype=np.uint8)
            quantize_rows(elements(rows), quantized, scales)
            sums = torch.ops.onednn.qlinear_pointwise(
                torch.from_numpy(quantized), 1.0, ZERO, self.packed, self.scales, self.zero_points,
                None, 1.0, 0, torch.float32, "none", [], "",
            )  # fmt: skip
            scale_rows(sums.numpy(), scales, self.bias, more, y)
        return out

    def gated(self, x: torch.Tensor, kind: int) -> torch.Tensor | None:
        """None: the activation after this product is a pass of its own."""

    def _multiply(self, x: np.ndarray, x_scales: np.ndarray, tiles: np.ndarray, add: np.ndarray, y: np.ndarray) -> None:
        scales, threads = self.scales.numpy(), torch.get_num_threads()

        def part(begin: int, end: int) -> None:
            multiply(x, x_scales, tiles, scales, self.offsets, self.bias, add, y, begin, end)

        if threads == 1 or tiles.size < WORTH_THREADS:
            part(0, len(tiles))
        else:
            bounds = np.linspace(0, len(tiles), threads + 1).astype(int).tolist()
            list(_pool(threads).map(part, bounds[:-1], bounds[1:]))


def check_int8(device: torch.device, fused_layers: bool) -> None:
    """Raise ConfigError where `model.quantization=int8` cannot be had, before any weights are loaded."""
    setting = "model.quantization=int8"
    if device.type != "cpu":
        raise ConfigError(f"{setting} is there for the CPU only, and the device is {device}: set model.device=cpu")
    if not fused_layers:
        raise ConfigError(f"{setting} needs engine.fused_layers=true: it rounds the weights of fused layers")
    if not has_vnni() and not _library_is_exact():
        raise ConfigError(f"{setting}: this processor's 8-bit products are not exact: set model.quantization=none")


@torch.inference_mode()
def quantize_model(model: Any) -> int:
    """Put int8 weights in the place of all packed ones of a PagedModel; returns how many products were replaced.

    Raises ConfigError if none of its layers has any.
    """
    before = dry_logits(model)
    replaced = 0
    for parent in list(model.module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                setattr(parent, name, QuantizedLinear(child.dense(), child.bias, child.sources))
                replaced += 1
    layers = decoder_layers(model.module) or []
    whole = sum(not any(isinstance(part, QuantizedLinear) for part in layer.modules()) for layer in layers)
    if whole == len(layers):
        raise ConfigError(
            f"model.quantization=int8: none of the layers of {model.module.config.model_type} has a shape whose "
            "products can be rounded: set model.quantization=none"
        )
    try:
        change = float((dry_logits(model) - before).norm() / before.norm())
    except AttributeError as error:
        raise ConfigError(
            f"model.quantization=int8: {model.module.config.model_type} reads weights by other ways than products "
            f"({error}): set model.quantization=none"
        ) from error
    log.info("int8 weights in %d products; logits change by %.1f%%", replaced, 100 * change)
    if whole:
        log.warning("model.quantization=int8: %d of %d layers stay in %s", whole, len(layers), model.dtype)
    if not change < LARGE_CHANGE:
        log.warning("int8 weights change this model's logits by %.0f%%: compare its answers first", 100 * change)
    return replaced


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="int8")


@lru_cache
def _library_is_exact() -> bool:
    """Whether oneDNN sums the largest 8-bit numbers without saturating between them, as old instructions do."""
    weight = torch.full((64, 64), 127, dtype=torch.int8)
    try:
        y = torch.ops.onednn.qlinear_pointwise(
            torch.full((4, 64), 255, dtype=torch.uint8), 1.0, ZERO, torch.ops.onednn.qlinear_prepack(weight, None),
            torch.ones(64), torch.zeros(64, dtype=torch.int64), None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
    except (RuntimeError, AttributeError):
        return False
    return bool((y == 64 * 127 * (255 - ZERO)).all())

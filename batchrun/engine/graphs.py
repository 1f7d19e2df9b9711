"""Decode steps as graphs: recorded once for each of some numbers of rows, and then launched as one.

A step of a small model is a few hundred launches, each of which costs the host more than the device needs for it. A
step whose rows all have one query is padded to the next number of rows that was recorded, from embedding to token.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch

from batchrun.engine import hook
from batchrun.engine.attention.base import LayerGeometry
from batchrun.engine.attention.fixed import FixedDecode
from batchrun.engine.attention.prefix import shared_prefixes
from batchrun.engine.attention.triton import MIN_GROUP_ROWS, TritonAttention
from batchrun.engine.batch import Batch
from batchrun.engine.feedback import Feedback
from batchrun.engine.fixed_inputs import Field, FixedInputs
from batchrun.engine.model import PagedModel
from batchrun.engine.recorder import Outputs, Recorded, Recorder
from batchrun.engine.slots import Slots
from batchrun.errors import ConfigError
from batchrun_kernels.sample import sample

log = logging.getLogger(__name__)

FORCED, REMEDY = "engine.cuda_graphs=on works where the engine", "set engine.cuda_graphs=auto"

# Estimated, not measured: what it takes to record a step, and what the host saves with each that is replayed.
RECORD_S = 0.25
SAVED_S = 0.002
# Estimated, not measured: in a step that takes 2 ms less, 32 layers can read so many pages of 64 positions, 8 heads and
# 128 dimensions at 4.3 TB/s, instead of reading them once for the rows that share them.
MIN_SAVED_BLOCKS = 1024

FIELDS = {  # of each row, with what stands in rows of padding
    "token_ids": (torch.int64, 0),
    "fed": (torch.int64, -1),
    "positions": (torch.int64, 0),
    "slots": (torch.int64, None),  # there, the place of `newest` that belongs to none
    "temperature": (torch.float32, 0),
    "top_k": (torch.int64, 0),
    "top_p": (torch.float32, 1),
    "min_p": (torch.float32, 0),
    "seeds": (torch.int64, 0),
    "places": (torch.int64, 0),  # tokens before the drawn one
}


def buckets(most: int) -> list[int]:
    """Numbers of rows that are recorded: 1, 2, 4, 8, 16, 32, 48 and so on, up to `most`."""
    return [*(rows for rows in (1, 2, 4, 8) if rows < most), *range(16, most, 16), most]


def graph_bytes(
    backend: type[TritonAttention],
    layers: list[LayerGeometry],
    shape: GraphShape,
    step: int,
) -> tuple[int, int]:
    """Bytes of a device that DecodeGraphs will hold: its buffers, and an estimate of what the recorded steps do.

    `step` is what a step of the most rows was found to take. Its memory stays with the recorded one, smaller ones fit
    into it, and the outputs of each are kept.
    """
    rows, sizes = shape.rows, buckets(shape.rows)
    pages = backend(layers, 1, shape.block_size, shape.dtype, torch.device("meta"))
    pages.num_sms = shape.num_sms
    attention = FixedDecode(pages, rows, -(-shape.max_model_len // shape.block_size))
    attention.prepare(layers)
    inputs = FixedInputs(_fields(rows), torch.device("meta"))
    buffers = attention.num_bytes + inputs.num_bytes + rows * torch.int64.itemsize
    outputs = sum(sizes[:-1]) * (shape.vocabulary * shape.dtype.itemsize + torch.int64.itemsize)
    return buffers, step + outputs


class GraphShape(NamedTuple):
    """What the memory of DecodeGraphs depends on, beside the layers."""

    rows: int
    block_size: int
    max_model_len: int
    vocabulary: int
    dtype: torch.dtype
    num_sms: int


def _fields(rows: int) -> dict[str, Field]:
    return {name: Field((rows,), dtype) for name, (dtype, _) in FIELDS.items()}


class DecodeGraphs:
    """The recorded steps of a model that attends with Triton's kernels. Unless `at_once`, they are recorded when the
    steps that have been, and `expected_steps` to come, are worth it."""

    def __init__(
        self,
        model: PagedModel,
        slots: Slots,
        max_model_len: int,
        recorder: Recorder,
        expected_steps: Callable[[], float],
        at_once: bool = False,
    ) -> None:
        backend, feedback = model.backend, model.feedback
        if not isinstance(backend, TritonAttention):
            raise ConfigError(f"{FORCED} attends with engine.attention=triton, which is not in use: {REMEDY}")
        assert feedback is not None
        self.sizes = buckets(slots.capacity)
        self._model = model
        self._slots = slots
        self._feedback: Feedback = feedback
        self._recorder = recorder
        self._expected_steps = expected_steps
        self._block_size = backend.block_size
        self._whole = [group.window is None for group in backend.layout.groups for _ in range(group.tables)]
        self._attention = FixedDecode(backend, slots.capacity, -(-max_model_len // backend.block_size))
        self._inputs = FixedInputs(_fields(slots.capacity), model.device)
        self._every = torch.arange(slots.capacity, device=model.device)
        self._recorded: dict[int, Recorded] = {}
        self._steps = 0
        self._failed = False
        if at_once:
            try:
                self._record_all()
            except (RuntimeError, NotImplementedError) as error:
                raise ConfigError(f"{FORCED} can record the model's steps, and not these: {error}; {REMEDY}") from error

    def take(self, batch: Batch) -> bool:
        """Whether the step is one of them. Called once for each step."""
        rows, slots = len(batch.slots), self._slots
        decodes = rows == batch.num_tokens == len(batch.sampled)
        if self._failed or not decodes or batch.adapters is not None or slots.scoring[batch.slots].any():
            return False
        self._steps += 1
        if not self._recorded:
            if (self._steps + self._expected_steps()) * SAVED_S < len(self.sizes) * RECORD_S:
                return False
            self._try_to_record()
        return bool(self._recorded) and not self._shares(batch)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Outputs:
        """Logits [R, vocabulary], in the model's type, and tokens int64 [R] of the step, which are noted as newest.

        Both are valid until the next step is run.
        """
        rows = len(batch.slots)
        size = self.sizes[bisect_left(self.sizes, rows)]
        self._fill(batch, size)
        recorded = self._recorded[size]
        recorded.replay()
        logits, tokens = recorded.outputs
        return logits[:rows], tokens[:rows]

    def _shares(self, batch: Batch) -> bool:
        """Whether rows share pages enough that reading them once saves more."""
        return any(
            shared_prefixes(batch.seq_lens - 1, tables, self._block_size, MIN_GROUP_ROWS, MIN_SAVED_BLOCKS)
            for tables, whole in zip(batch.block_tables, self._whole, strict=True)
            if whole
        )

    def _try_to_record(self) -> None:
        try:
            self._record_all()
        except (RuntimeError, NotImplementedError) as error:
            log.warning("decode steps are not recorded, as this model's cannot be: %s", str(error).partition("\n")[0])
            self._recorded, self._failed = {}, True

    @torch.inference_mode()
    def _record_all(self) -> None:
        """Largest first: the others fit into its memory."""
        before = self._recorder.reserved()
        for size in reversed(self.sizes):
            self._fill(None, size)
            self._recorded[size] = self._recorder.record(lambda size=size: self._compute(size))  # type: ignore[misc]
        taken = (self._recorder.reserved() - before) / 2**30
        log.info("decode steps of %s rows are recorded, in %.2f GiB", ", ".join(map(str, self.sizes)), taken)

    def _fill(self, batch: Batch | None, size: int) -> None:
        arrays, count = self._inputs.open(), 0 if batch is None else len(batch.slots)
        for name, (_, padding) in FIELDS.items():
            arrays[name][count:size] = self._slots.capacity if padding is None else padding
        if batch is not None:
            slots, rows = self._slots, batch.slots
            arrays["token_ids"][:count], arrays["positions"][:count] = batch.token_ids, batch.positions
            arrays["fed"][:count] = -1 if batch.fed is None else batch.fed
            arrays["slots"][:count] = rows
            arrays["temperature"][:count], arrays["top_k"][:count] = slots.temperature[rows], slots.top_k[rows]
            arrays["top_p"][:count], arrays["min_p"][:count] = slots.top_p[rows], slots.min_p[rows]
            arrays["seeds"][:count], arrays["places"][:count] = slots.seed[rows], slots.num_tokens[rows]
            arrays["places"][:count] += slots.unread[rows]
        self._inputs.send()
        self._attention.fill(batch, size)

    def _compute(self, size: int) -> Outputs:
        at = {name: view[:size] for name, view in self._inputs.device.items()}
        attention = self._attention
        attention.aim(size)
        self._feedback.feed(at["token_ids"], at["fed"])
        with hook.forward_context(lambda call, q, k, v, _: attention.attend(call, q, k, v), attention):
            logits = self._model.run(at["token_ids"], at["positions"], self._every[:size])
        tokens = sample(logits, *(at[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "places")))
        self._feedback.note(tokens, at["slots"])
        return logits, tokens

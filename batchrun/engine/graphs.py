"""Decode steps as graphs: recorded once for each of some numbers of rows, and then launched as one.

A step of a small model is a few hundred launches, each of which costs the host more than the device needs for it. A
step whose rows all have one query is padded to the next number of rows that was recorded, from embedding to token.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch

from batchrun.engine import hook
from batchrun.engine.adapted import adapted, adapter_bytes
from batchrun.engine.attention.base import LayerGeometry
from batchrun.engine.attention.fixed import FixedTables
from batchrun.engine.attention.prefix import Sharing
from batchrun.engine.attention.triton import TritonAttention, most_groups
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
# A recorded step reads the factors of all adapters there are, which takes a quarter of that at 4.3 TB/s; others read
# those of the adapters that are in the step.
MOST_ADAPTER_BYTES = 2**31

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
    "adapters": (torch.int64, 0),
}


def buckets(most: int) -> list[int]:
    """Numbers of rows that are recorded: 1, 2, 4, 8, 16, 32, 48 and so on, up to `most`."""
    return [*(rows for rows in (1, 2, 4, 8) if rows < most), *range(16, most, 16), most]


class Form(NamedTuple):
    """What is launched in a step beside the model: steps of each form are recorded apart, if such steps come."""

    grouped: bool  # for rows that read shared pages together
    adapted: bool  # for rows with adapters

    def sizes(self, most: int) -> list[int]:
        """Numbers of rows that are recorded of it."""
        return [rows for rows in buckets(most) if most_groups(rows) or not self.grouped]


def forms(shares: bool, adapts: bool) -> list[Form]:
    """All that there may be, for rows that may share pages and have adapters."""
    with_groups, with_adapters = ((False, True) if some else (False,) for some in (shares, adapts))
    return [Form(*each) for each in product(with_groups, with_adapters)]


def adapts(module: torch.nn.Module) -> bool:
    """Whether steps with the adapters in the model are recorded."""
    return 0 < adapter_bytes(module) <= MOST_ADAPTER_BYTES


class GraphShape(NamedTuple):
    """What the memory of DecodeGraphs depends on, beside the layers."""

    rows: int
    block_size: int
    max_model_len: int
    vocabulary: int
    dtype: torch.dtype
    num_sms: int
    adapts: bool = False


def graph_bytes(
    backend: type[TritonAttention], layers: list[LayerGeometry], shape: GraphShape, step: int
) -> tuple[int, int]:
    """Bytes of a device that DecodeGraphs will hold: its buffers, and an estimate of what the recorded steps do.

    `step` is what a step of the most rows was found to take. Its memory stays with the one recorded first, the others
    fit into it, and the outputs of each are kept.
    """
    rows = shape.rows
    pages = backend(layers, 1, shape.block_size, shape.dtype, torch.device("meta"))
    pages.num_sms = shape.num_sms
    tables = FixedTables(pages, rows, -(-shape.max_model_len // shape.block_size))
    tables.prepare(layers)
    inputs = FixedInputs(_fields(rows), torch.device("meta"))
    buffers = tables.num_bytes + inputs.num_bytes + rows * torch.int64.itemsize
    kept = sum(sum(form.sizes(rows)) for form in forms(pages.shares, shape.adapts)) - rows
    return buffers, step + kept * (shape.vocabulary * shape.dtype.itemsize + torch.int64.itemsize)


def _fields(rows: int) -> dict[str, Field]:
    return {name: Field((rows,), dtype) for name, (dtype, _) in FIELDS.items()}


class DecodeGraphs:
    """The recorded steps of a model that attends with Triton's kernels. Unless `at_once`, those of a form are recorded
    when the steps of it that have been, and `expected_steps` to come, are worth it."""

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
        self._backend = backend
        self._feedback: Feedback = feedback
        self._recorder = recorder
        self._expected_steps = expected_steps
        self._tables = FixedTables(backend, slots.capacity, -(-max_model_len // backend.block_size))
        self._inputs = FixedInputs(_fields(slots.capacity), model.device)
        self._adapts, num_bytes = adapts(model.module), adapter_bytes(model.module)
        if num_bytes and not self._adapts:
            log.info("steps with adapters are not recorded: all of them together are %.1f GB", num_bytes / 1e9)
        self._every = torch.arange(slots.capacity, device=model.device)
        self._recorded: dict[Form, dict[int, Recorded]] = {}  # by number of rows; none of those that cannot be
        self._steps: Counter[Form] = Counter()
        self._form = Form(grouped=False, adapted=False)  # of the last step that could be one of them
        if at_once:
            try:
                for form in forms(backend.shares, self._adapts):
                    self._record(form)
            except (RuntimeError, NotImplementedError) as error:
                raise ConfigError(f"{FORCED} can record the model's steps, and not these: {error}; {REMEDY}") from error

    @torch.inference_mode()
    def run(self, batch: Batch) -> Outputs | None:
        """Logits [R, vocabulary], in the model's type, and tokens int64 [R] of the step, which are noted as newest;
        None: it is not one of those that are recorded, and nothing was done. To be called once for each step.

        Both are valid until the next step is run.
        """
        rows, slots = len(batch.slots), self._slots
        decodes = rows == batch.num_tokens == len(batch.sampled) and not slots.scoring[batch.slots].any()
        has_adapters = batch.adapters is not None
        if not decodes or (has_adapters and not self._adapts):
            return None
        sharing = self._backend.step_of(batch).sharing
        recorded = self._ready(Form(sharing is not None, has_adapters))
        if not recorded:
            return None
        size = self.sizes[bisect_left(self.sizes, rows)]
        self._fill(batch, size, sharing)
        recorded[size].replay()
        logits, tokens = recorded[size].outputs
        return logits[:rows], tokens[:rows]

    def replays(self) -> bool:
        """Whether a step in which the rows that run all decode would be replayed, if it is like the last such one."""
        if not self._adapts and self._slots.adapter[self._slots.order].any():
            return False
        return bool(self._recorded.get(self._form, self._pays(self._form)))

    def _pays(self, form: Form) -> bool:
        """Whether the steps of a form that have been and are expected are worth the time that recording takes."""
        steps, sizes = self._steps[form] + self._expected_steps(), form.sizes(self._slots.capacity)
        return steps * SAVED_S >= len(sizes) * RECORD_S

    def _ready(self, form: Form) -> dict[int, Recorded]:
        """The steps of a form, recorded now if that is worth it; none if it is not yet, or they cannot be."""
        self._form = form
        self._steps[form] += 1
        if form not in self._recorded:
            if not self._pays(form):
                return {}
            try:
                self._record(form)
            except (RuntimeError, NotImplementedError) as error:
                reason = str(error).partition("\n")[0]
                log.warning("decode steps are not recorded, as this model's cannot be: %s", reason)
                self._recorded[form] = {}
        return self._recorded[form]

    def _record(self, form: Form) -> None:
        """Largest first: the others fit into its memory."""
        recorded, before = {}, self._recorder.reserved()
        for size in reversed(form.sizes(self._slots.capacity)):
            self._fill(None, size, Sharing.none() if form.grouped else None)
            recorded[size] = self._recorder.record(lambda size=size: self._compute(size, form))  # type: ignore[misc]
        self._recorded[form] = recorded
        kind = f"decode steps{' with shared pages' * form.grouped}{' with adapters' * form.adapted}"
        taken = (self._recorder.reserved() - before) / 2**30
        log.info("%s of %s rows are recorded, in %.2f GiB", kind, ", ".join(map(str, reversed(recorded))), taken)

    @torch.inference_mode()
    def _fill(self, batch: Batch | None, size: int, sharing: Sharing | None) -> None:
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
            arrays["adapters"][:count] = 0 if batch.adapters is None else batch.adapters
        self._inputs.send()
        self._tables.fill(batch, size, sharing)

    @torch.inference_mode()
    def _compute(self, size: int, form: Form) -> Outputs:
        at = {name: view[:size] for name, view in self._inputs.device.items()}
        backend = self._backend
        self._tables.aim(size, form.grouped)
        self._feedback.feed(at["token_ids"], at["fed"])
        attention = hook.forward_context(lambda call, q, k, v, _: backend.attend(call, q, k, v), backend)
        with attention, adapted(at["adapters"] if form.adapted else None, self._model.device):
            logits = self._model.run(at["token_ids"], at["positions"], self._every[:size])
        tokens = sample(logits, *(at[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "places")))
        self._feedback.note(tokens, at["slots"])
        return logits, tokens

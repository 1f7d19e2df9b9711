"""What a device that fails says, with the step that it failed in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from batchrun.engine.batch import Batch
from batchrun.engine.slots import Slots
from batchrun.errors import StepError

NAMED_ROWS = 5
MARKS = ("CUDA error", "HIP error", "[CUDA]", "[HIP]")  # of torch's messages, and of Triton's


@contextmanager
def naming_step(number: int, batch: Batch, slots: Slots) -> Iterator[None]:
    """Raise StepError for what the device says meanwhile; a want of memory, which smaller steps may cure, stays."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not isinstance(error, torch.AcceleratorError) and not any(mark in str(error) for mark in MARKS):
            raise
        raise StepError(_message(number, batch, slots, error)) from error


def _message(number: int, batch: Batch, slots: Slots, error: RuntimeError) -> str:
    there = batch.slots[slots.tenant[batch.slots] == batch.tenants]
    names = ", ".join(repr(slots.sequence(slot).request.key) for slot in there[:NAMED_ROWS])
    others = len(batch.slots) - min(len(there), NAMED_ROWS)
    longest = int(np.max(batch.seq_lens))
    rows = f"{names} and {others} others" if others else names
    return (
        f"the device failed in step {number}, or in the one before: {str(error).partition(chr(10))[0]}. The step has "
        f"{batch.num_tokens} tokens of {len(batch.slots)} rows, {batch.num_decodes} of which have one; the longest row "
        f"is of {longest} tokens. Rows: {rows}. With CUDA_LAUNCH_BLOCKING=1 in the environment, engine.overlap=off and "
        "engine.cuda_graphs=off the stack shows what failed"
    )

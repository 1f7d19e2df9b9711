"""What Triton's kernels are told of a step: rows and their pages for each block table, and plans for layers that are
alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from batchrun_kernels.decode_plan import DecodePlan
from batchrun_kernels.paged import KvPages, Rows
from batchrun_kernels.paged_prefill import PrefillPlan
from batchrun_kernels.prefix_group import Groups
from batchrun_kernels.prefix_plan import PrefixPlan


class Kind(NamedTuple):
    """Layers that are alike have the same plans."""

    window: int | None
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


class Plans(NamedTuple):
    """For the parts of a table that are there."""

    short: DecodePlan | None
    long: PrefillPlan | None = None
    groups: PrefixPlan | None = None


@dataclass(slots=True)
class Table:
    """What the layers of one block table attend to, on the device. Of `short` rows, each of which has few queries,
    those of `groups` read their first pages together."""

    slot_mapping: torch.Tensor  # int64 [T]
    short: Rows | None
    long: Rows | None = None
    groups: Groups | None = None
    plans: dict[Kind, Plans] = field(default_factory=dict)


# Plans for layers that are the first of their kind to attend, with these pages, to the table of this number.
Planner = Callable[[int, Kind, KvPages], Plans]

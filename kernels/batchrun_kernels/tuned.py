"""Launch options that were measured to be the fastest on a GPU; where none was, a kernel's own rule decides.

The table is tuned.json: GPU name -> kernel -> shape -> options. `python -m batchrun_kernels.tune` renews it on the GPU
that it runs on. A run only reads it, once.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

TABLE = Path(__file__).with_name("tuned.json")
Options = dict[str, int]


class Key(NamedTuple):
    """What options were measured for."""

    gpu: str
    kernel: str
    shape: str


def tuned(kernel: str, shape: str, device: torch.device | str, **rule: int) -> Options:
    """The options of `rule`, with the values that the table has for this kernel, shape and device."""
    found = entries().get(Key(gpu_name(device), kernel, shape))
    return rule if found is None else {name: found.get(name, value) for name, value in rule.items()}


@cache
def entries() -> dict[Key, Options]:
    """The table, as read at the first use."""
    return read_table(TABLE)


def read_table(path: Path) -> dict[Key, Options]:
    """The entries of a table file; raises OSError if it is not there."""
    nested = json.loads(path.read_text("utf-8"))
    return {
        Key(gpu, kernel, shape): options
        for gpu, kernels in nested.items()
        for kernel, shapes in kernels.items()
        for shape, options in shapes.items()
    }


def write_table(path: Path, table: dict[Key, Options]) -> None:
    """Write entries as `read_table` reads them, in order of their keys."""
    nested: dict[str, dict[str, dict[str, Options]]] = {}
    for key in sorted(table):
        nested.setdefault(key.gpu, {}).setdefault(key.kernel, {})[key.shape] = table[key]
    path.write_text(json.dumps(nested, indent=1) + "\n", "utf-8")


@cache
def gpu_name(device: torch.device | str) -> str:
    """The name of a GPU as its driver has it; empty for other devices, which have no entries."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""

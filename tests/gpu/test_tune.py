"""The command that times candidates, with the GPU's own clock."""

from __future__ import annotations

import torch

from batchrun_kernels.tune import Layer, cuda_seconds, decode_case, expert_cases, prefill_case, prefix_case, tune
from batchrun_kernels.tuned import gpu_name

CUDA = torch.device("cuda")


def test_finds_options_for_every_kernel() -> None:
    layer = Layer(8, 2, 64, CUDA)
    chosen = [
        decode_case(layer, [300, 40]),
        prefill_case(layer, [200]),
        prefix_case(layer, 256, 40),
        *expert_cases(40, 2, 4, 64, 64, CUDA, torch.bfloat16),
    ]
    few = [case._replace(candidates=case.candidates[:3]) for case in chosen]
    found = dict(tune(few, gpu_name(CUDA), cuda_seconds))
    assert [key.kernel for key in found] == [case.kernel for case in chosen]
    assert all(options in case.candidates for options, case in zip(found.values(), few, strict=True))


def test_a_kernel_that_does_nothing_takes_less_than_a_copy_of_a_gigabyte() -> None:
    small, large = (torch.empty(n, dtype=torch.uint8, device=CUDA) for n in (1, 2**30))
    assert 0 < cuda_seconds(small.clone) < cuda_seconds(large.clone)

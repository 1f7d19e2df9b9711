"""Compiles kernels for GPUs that need not be present, and reads from the binaries what they will use.

A call of a kernel's own launcher on meta tensors is recorded instead of run, and compiled with the specialisation that
the launch would have had: what is inspected is what will run. Everything needed comes with the Triton wheel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_POINTER = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_CUDA_WIDE = r"ld\.global\S*\.(?:v4\.b32|v2\.b64)|cp\.async\.c[ag]\.\S+ \[[^]]+\], \[[^]]+\], (?:0x10|16)\b"
_CUDA_NARROW = r"ld\.global\S*\.[bus](?:8|16)\b"
_CUDA_MATRIX = r"\bmma\.sync|wgmma\.mma_async"
_HIP_WIDE = r"(?:global|buffer)_load_dwordx4"
_HIP_NARROW = r"(?:global|buffer)_load_(?:ushort|ubyte|sshort|sbyte|short_d16|ubyte_d16)"
_HIP_MATRIX = r"\bv_mfma"


class Launch(NamedTuple):
    """One recorded kernel launch: every argument by name, and the compile options."""

    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    options: dict[str, Any]


class Resources(NamedTuple):
    """What one compiled kernel uses on one target. Instruction counts are of the program text, not of its run."""

    kernel: str
    target: str
    registers: int  # per thread (AMD: vector registers)
    spilled: int  # bytes of local memory per thread (AMD: spilled vector registers and bytes of scratch)
    shared: int  # bytes of shared memory per block
    wide_loads: int  # 16-byte loads from global memory, asynchronous copies included
    narrow_loads: int  # loads of 1 or 2 bytes: elements that were not vectorised
    matrix_ops: int  # tensor-core instructions


def record(call: Callable[[], object]) -> list[Launch]:
    """Runs `call` with every kernel launch recorded instead of executed; its tensors may be on the meta device."""
    launches: list[Launch] = []

    def keep(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bound = dict(zip(kernel.arg_names, args, strict=False))
        bound |= {name: kwargs.pop(name) for name in kernel.arg_names if name in kwargs}
        launches.append(Launch(kernel, bound, kwargs))

    original = JITFunction.run
    JITFunction.run = keep
    try:
        call()
    finally:
        JITFunction.run = original
    return launches


def compile_launch(launch: Launch, target: str) -> Resources:
    """Compiles a recorded launch for one of TARGETS with the specialisation Triton would choose, pointers aligned."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        is_known = isinstance(value, int) and not isinstance(value, bool) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_known and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTER[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (is_known and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=TARGETS[target], options=launch.options)
    read = _read_cuda if TARGETS[target].backend == "cuda" else _read_hip
    return read(launch.kernel.__name__, target, compiled)


def _read_cuda(name: str, target: str, compiled: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage for {name} on {target}: {usage!r}")
    registers, stack, local = map(int, found.groups())
    counts = _count(compiled.asm["ptx"], _CUDA_WIDE, _CUDA_NARROW, _CUDA_MATRIX)
    return Resources(name, target, registers, stack + local, compiled.metadata.shared, *counts)


def _read_hip(name: str, target: str, compiled: Any) -> Resources:
    text = compiled.asm["amdgcn"]
    fields = ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    registers, spills, scratch = (int(re.findall(rf"\.{field}: +(\d+)", text)[0]) for field in fields)
    counts = _count(text, _HIP_WIDE, _HIP_NARROW, _HIP_MATRIX)
    return Resources(name, target, registers, spills + scratch, compiled.metadata.shared, *counts)


def _count(text: str, *patterns: str) -> tuple[int, ...]:
    return tuple(len(re.findall(pattern, text)) for pattern in patterns)

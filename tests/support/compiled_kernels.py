"""Compile kernels for GPUs that are not here, exactly as an operation would start them.

`recorded` calls an operation with CPU tensors and notes its launches instead of making them. Each
is then specialised as Triton does at run time (addresses and numbers divisible by 16, ones) and
compiled down to machine code, of which the cost is read: registers, shared memory, spills.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dispatch.kernels.operands import kernels_on_cpu

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What an operation asked Triton for."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one program takes.

    Attributes:
        registers: Of a thread; on AMD the vector registers.
        shared_bytes: Of a program.
        spilled_bytes: Of a thread, or registers on AMD: any is too many.
        code: PTX or AMD assembly, to look for instructions.
    """

    registers: int
    shared_bytes: int
    spilled_bytes: int
    code: str = field(repr=False)


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> Iterator[list[Launch]]:
    """Note the launches that operations of `modules` make, without making them."""
    launches: list[Launch] = []

    def note(kernel: Any, grid: Any, *arguments: Any, device: Any, **options: Any) -> None:
        if 0 not in grid:
            launches.append(Launch(kernel=kernel, grid=grid, arguments=arguments, options=options))

    with monkeypatch.context() as patch, kernels_on_cpu():
        for module in modules:
            patch.setattr(module, "launch", note)
        yield launches


def recorded(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], *modules: Any
) -> list[Launch]:
    with recording(monkeypatch, *modules) as launches:
        call()
    return launches


def _specialised(launch: Launch) -> ASTSource:
    names = launch.kernel.arg_names
    given = dict(zip(names, launch.arguments, strict=False)) | launch.options
    constants = {p.name for p in launch.kernel.params if p.is_constexpr}
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(names):
        value = given[name]
        if name in constants or value is None or (isinstance(value, int) and value == 1):
            signature[name], values[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            # Allocations on a GPU are aligned to 256 bytes at least; a view's offset is not.
            if value.storage_offset() * value.itemsize % 16 == 0:
                attributes[(index,)] = DIVISIBLE
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = DIVISIBLE
        else:
            signature[name] = "fp32"
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=values, attrs=attributes)


def compiled(launch: Launch, target_name: str, folder: Path) -> Cost:
    """Compile a launch for a target of `TARGETS`; `folder` takes the assembler's files."""
    target = TARGETS[target_name]
    options = {key: value for key, value in launch.options.items() if key in OPTIONS}
    found = triton.compile(_specialised(launch), target=target, options=options)
    shared = int(found.metadata.shared)
    if target.backend == "hip":
        code = found.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{key}:\s+(\d+)", code)[1])  # type: ignore[index]
            for key in ("vgpr_count", "vgpr_spill_count")
        )
        return Cost(registers=registers, shared_bytes=shared, spilled_bytes=spilled, code=code)
    code = found.asm["ptx"]
    architecture = re.search(r"\.target (sm_\w+)", code)[1]  # type: ignore[index]
    source = folder / "kernel.ptx"
    source.write_text(code, encoding="utf-8")
    command = [get_ptxas(target.arch).path, "-v", f"--gpu-name={architecture}"]
    report = subprocess.run(
        [*command, str(source), "-o", str(folder / "kernel.cubin")],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stderr
    registers = int(re.search(r"Used (\d+) registers", report)[1])  # type: ignore[index]
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    return Cost(
        registers=registers,
        shared_bytes=shared,
        spilled_bytes=int(spills[1]) + int(spills[2]),  # type: ignore[index]
        code=code,
    )

"""Triton where it is installed, and how a kernel is started.

Every kernel file can be imported without Triton: its torch reference is what runs on the CPU. A
kernel that is started without Triton says so in a typed error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dispatch.errors import KernelsUnavailable

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

__all__ = ["cdiv", "jit", "launch", "power_of_two", "tl"]


class _AbsentKernel:
    """Stands where a compiled kernel would be."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: object) -> NoReturn:
        raise KernelsUnavailable(operation=self.name, reason="Triton is not installed")


def jit(body: Callable[..., Any]) -> Any:
    """Return `body` as a Triton kernel or device function."""
    if triton is None:
        return _AbsentKernel(body.__name__)
    return triton.jit(body)


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: object, device: torch.device, **options: object
) -> None:
    """Start a kernel on the device of its tensors; an empty grid starts nothing.

    Args:
        kernel: From `jit`.
        grid: Programs per axis.
        *arguments: Of the kernel, in order.
        device: Where the tensors are. Triton itself would take the current device.
        **options: Constants of the kernel, and `num_warps`, `num_stages`.

    Raises:
        KernelsUnavailable: Triton is not installed.
    """
    if 0 in grid:
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options)


def cdiv(dividend: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-dividend // divisor)


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value`, and at least 1."""
    return 1 << max(0, value - 1).bit_length()

"""What an operation accepts, checked before anything is started, and what it then runs on.

The device of the tensors decides: the torch reference for CPU tensors, the Triton kernel for a
GPU's. `kernels_on_cpu` sends CPU tensors through the kernels as well, which only Triton's
interpreter can do; the tests use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from dispatch.errors import InputInvalid, KernelsUnavailable
from dispatch.kernels.language import tl

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
IDS = (torch.int64, torch.int32)
FP8_CAPABILITY = (8, 9)  # of a CUDA device

_kernels_on_cpu: ContextVar[bool] = ContextVar("kernels_on_cpu", default=False)


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Run the kernels for CPU tensors too, in this thread, until left."""
    token = _kernels_on_cpu.set(True)
    try:
        yield
    finally:
        _kernels_on_cpu.reset(token)


def runs_kernel(device: torch.device, *, converts_fp8: bool = False) -> bool:
    """Return whether tensors of this device are given to the kernel, not to the reference.

    Args:
        device: Of the operation's tensors.
        converts_fp8: Whether the kernel converts to e4m3 or back.

    Raises:
        KernelsUnavailable: They should be, but Triton is not installed; or the device is neither
            a CPU nor one that Triton compiles such a kernel for.
    """
    if device.type == "cpu" and not _kernels_on_cpu.get():
        return False
    if device.type not in ("cpu", "cuda"):
        raise KernelsUnavailable(operation="kernel", reason=f"no kernels for {device.type}")
    if tl is None:
        raise KernelsUnavailable(operation="kernel", reason="Triton is not installed")
    if converts_fp8 and device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            reason = f"compute capability {capability} cannot convert to e4m3"
            raise KernelsUnavailable(operation="fp8 kernel", reason=reason)
    return True


def check_operand(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    *,
    device: torch.device | None = None,
) -> None:
    """Accept a contiguous tensor of this shape, of one of these types.

    Args:
        name: As the caller knows it.
        tensor: What was handed over.
        shape: Sizes; None stands for any.
        dtypes: What is accepted.
        device: Where the operation's first tensor is; None accepts any.

    Raises:
        InputInvalid: Names the first property that differs.
    """
    sizes = tuple(tensor.shape)
    if len(sizes) != len(shape) or any(
        due not in (None, seen) for seen, due in zip(sizes, shape, strict=True)
    ):
        expected = ", ".join("any" if due is None else str(due) for due in shape)
        raise InputInvalid(
            name=f"shape of {name}", observed=str(list(sizes)), expected=f"[{expected}]"
        )
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise InputInvalid(name=f"dtype of {name}", observed=str(tensor.dtype), expected=expected)
    if device is not None and tensor.device != device:
        raise InputInvalid(
            name=f"device of {name}", observed=str(tensor.device), expected=str(device)
        )
    if not tensor.is_contiguous():
        raise InputInvalid(
            name=f"stride of {name}", observed=str(tensor.stride()), expected="contiguous"
        )


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Accept a number of `[low, high]`.

    Raises:
        InputInvalid: It is another one.
    """
    if not low <= value <= high:
        raise InputInvalid(name=name, observed=str(value), expected=f"{low}..{high}")


def check_member(name: str, value: object, accepted: tuple[object, ...]) -> None:
    """Accept one of some values.

    Raises:
        InputInvalid: It is another one.
    """
    if value not in accepted:
        expected = " or ".join(map(str, accepted))
        raise InputInvalid(name=name, observed=str(value), expected=expected)

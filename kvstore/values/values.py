"""What can be stored, and what can be read into: anything that is contiguous bytes.

bytes, bytearray, memoryview, numpy arrays, torch tensors, pieces of registered regions,
and lists or tuples of those: their bytes one after the other are one value
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.errors import InvalidValue

if TYPE_CHECKING:
    from transfer import Region

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RegionPiece:
    """`[offset, offset + nbytes)` of a region that the engine knows already."""

    region: Region
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.nbytes <= 0 or self.nbytes > self.region.nbytes - self.offset:
            raise InvalidValue(
                problem=f"[{self.offset}, {self.offset + self.nbytes}) is not inside a region of "
                f"{self.region.nbytes} bytes"
            )


Part = Bytes | RegionPiece
Value = Any  # see the module


def parts_of(value: Value) -> list[Part]:
    """Return the bytes of a value, without copying them where that can be avoided.

    Tensors on other devices and what is not contiguous are copied to host memory.

    Raises:
        InvalidValue: None, no bytes at all, or something that has none.
    """
    if type(value) is bytes and value:  # most are: the shortest way
        return [np.frombuffer(value, dtype=np.uint8)]
    if isinstance(value, list | tuple):
        parts = [part for item in value for part in parts_of(item)]
        if not parts:
            raise _refused("an empty list")
        return parts
    if isinstance(value, RegionPiece):
        return [value]
    array = _as_bytes(value)
    if not len(array):
        raise _refused("an empty value")
    return [array]


def target_of(target: Value) -> Part:
    """Return the bytes of a target that can be written.

    Raises:
        InvalidValue: Read-only, not contiguous, not in host memory, or without bytes.
    """
    if isinstance(target, RegionPiece):
        return target
    if isinstance(target, torch.Tensor):
        if target.device.type != "cpu" or not target.is_contiguous():
            raise _refused("a target tensor that is not contiguous host memory")
        array = _tensor_bytes(target)
    elif isinstance(target, np.ndarray):
        if target.dtype.hasobject or not target.flags.c_contiguous or not target.flags.writeable:
            raise _refused("a target array of objects, not contiguous, or read-only")
        array = target.reshape(-1).view(np.uint8)
    else:
        array = _as_bytes(target)
        if not array.flags.writeable:
            raise _refused("a target that is read-only")
    if not len(array):
        raise _refused("a target without bytes")
    return array


def nbytes_of(parts: Sequence[Part]) -> int:
    """Bytes of all parts."""
    return sum(part.nbytes for part in parts)


def as_tensor(array: Bytes) -> torch.Tensor:
    """View bytes as a tensor, read-only ones too; the array must outlive it."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    memory = (ctypes.c_uint8 * len(array)).from_address(array.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(memory))


def _as_bytes(value: Value) -> Bytes:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            raise _refused(f"a tensor of {value.layout} on {value.device}: no bytes in a row")
        return _tensor_bytes(value.detach().cpu().contiguous())
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise _refused("an array of objects")
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    if isinstance(value, str):
        raise _refused("text; encode it")
    try:
        view = memoryview(value)
    except TypeError as error:
        raise _refused(f"a {type(value).__name__}, which has no bytes") from error
    if not view.contiguous:
        return np.frombuffer(view.tobytes(), dtype=np.uint8)
    if not view.nbytes:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(view.cast("B"), dtype=np.uint8)


def _tensor_bytes(tensor: torch.Tensor) -> Bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _refused(what: str) -> InvalidValue:
    return InvalidValue(problem=what)

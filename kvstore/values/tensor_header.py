"""What a stored tensor says of itself.

    0               256                                   256 + nbytes
    [ MessagePack of dtype and shape, padded )[ elements, contiguous )

So that a tensor can be had without knowing its shape, and is never read as another one.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.errors import InvalidValue

HEADER_BYTES: Final = 256
DIMENSIONS_MAX: Final = 16

_NAMES: Final = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
    " complex64 complex128"
)
_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in _NAMES.split()}


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """Element type and shape."""

    magic: Literal["tensor"]
    dtype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=16)]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorHeader:
        """Describe a tensor.

        Raises:
            InvalidValue: No tensor, without elements, of too many dimensions, or of a type that is
                not kept.
        """
        if not isinstance(tensor, torch.Tensor):
            raise InvalidValue(problem=f"a {type(tensor).__name__}, which is no tensor")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES or tensor.ndim > DIMENSIONS_MAX or not tensor.numel():
            raise InvalidValue(problem=f"a tensor of {tuple(tensor.shape)} {dtype}")
        return cls("tensor", dtype, list(tensor.shape))

    @classmethod
    def read(cls, data: NDArray[np.uint8]) -> TensorHeader:
        """Undo `encode`.

        Raises:
            InvalidValue: The block is no tensor.
        """
        used = int.from_bytes(data[:2].tobytes(), "little")
        try:
            header = _decoder.decode(data[2 : 2 + used].tobytes())
        except msgspec.MsgspecError as error:
            raise InvalidValue(problem=f"the block is no tensor: {error}") from error
        if header.dtype not in _DTYPES:
            raise InvalidValue(problem=f"a tensor of {header.dtype}")
        return header

    def encode(self) -> NDArray[np.uint8]:
        """Return [HEADER_BYTES] uint8."""
        payload = _encoder.encode(self)
        assert len(payload) <= HEADER_BYTES - 2, self
        data = np.zeros(HEADER_BYTES, dtype=np.uint8)
        framed = len(payload).to_bytes(2, "little") + payload
        data[: len(framed)] = np.frombuffer(framed, dtype=np.uint8)
        return data

    def shaped(self, elements: torch.Tensor) -> torch.Tensor:
        """View [nbytes] uint8 as this tensor.

        Raises:
            InvalidValue: There are more or fewer bytes.
        """
        dtype = _DTYPES[self.dtype]
        count = 1
        for size in self.shape:
            count *= size
        if count * dtype.itemsize != elements.numel():
            raise InvalidValue(problem=f"{elements.numel()} bytes are no {self}")
        return elements.view(dtype).reshape(self.shape)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TensorHeader)

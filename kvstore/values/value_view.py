"""One value, read where it lies in the pool if that can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.checksum import lies_right, table_bytes
from kvstore.client.lease import Lease
from kvstore.client.place import Place
from kvstore.client.view import View, release_all
from kvstore.errors import InvalidValue
from kvstore.values.tensor_header import HEADER_BYTES, TensorHeader

if TYPE_CHECKING:
    from kvstore.client.lease_keeper import LeaseKeeper
    from kvstore.values.hot_places import HotPlaces
    from transfer.memory.copy_on_write import CopyOnWrite


class Origin(NamedTuple):  # made for each view: a tuple is made fastest
    """Where a value lies, and whose its place is.

    Attributes:
        key: Not salted.
        place: With the lease, which is the view's.
        segment: [.] uint8, the memory that it lies in.
        hot: Gets the place when it is not viewed any more.
        removals: Of `hot`, when the place was had.
        was_hot: It was had from there.
        until_s: End of the lease then.
        guard: Keeps what is written into the segment's memory from the pool; None if nobody can.
    """

    key: bytes
    place: Place
    segment: NDArray[np.uint8]
    hot: HotPlaces
    removals: int
    was_hot: bool
    until_s: float
    guard: CopyOnWrite | None = None


class PlacedView(View):
    """What views of one value share.

    Args:
        keeper: Renews the lease.
        seen: See `View`.
        origin: Where the value lies in the pool; None if it was copied.
    """

    __slots__ = ("_origin",)

    def __init__(self, keeper: LeaseKeeper, seen: object, origin: Origin | None) -> None:
        super().__init__(None if origin is None else origin.place.lease, keeper, seen)
        self._origin = origin

    def lies_right(self) -> bool:
        """See `View`."""
        return self._origin is None or is_right(self._origin)

    def _give_back(self, lease: Lease) -> None:
        assert self._origin is not None, lease.lease_id
        give_back(self._origin, self._keeper)


class ValueView(PlacedView):
    """A value's bytes, verified and read-only. Made by `Store.view`; see `View`.

    Args:
        value: The bytes; of an array, nobody else has this object.
        keeper: Renews the lease.
        origin: Where they lie in the pool; None if these are a copy.

    Attributes:
        nbytes: How many.
    """

    __slots__ = ("_memory", "nbytes")

    def __init__(
        self, value: NDArray[np.uint8] | bytes, keeper: LeaseKeeper, origin: Origin | None = None
    ) -> None:
        super().__init__(keeper, None if origin is None else value, origin)
        if isinstance(value, bytes):
            self._memory = memoryview(value)
        else:
            value.flags.writeable = False  # nor is there a way by `memory.obj`
            self._memory = value.data
        self.nbytes = len(value)

    @property
    def memory(self) -> memoryview:
        """The bytes: read-only, contiguous, of format "B".

        Raises:
            StoreClosed: The view was closed. What was taken before raises ValueError then.
        """
        self._check_open()
        return self._memory

    def __len__(self) -> int:
        return self.nbytes

    def _let_go(self) -> None:
        release_all([self._memory])
        del self._memory


class TensorView(PlacedView):
    """A stored tensor, verified, with its shape and type. Made by `Store.view_tensor`; see `View`.

    PyTorch knows no read-only tensors. This one is not to be written to; else this process gets
    pages of its own, the pool keeps what it has, and what was written may be undone at any time.

    Args:
        value: The bytes with their header, of which nobody else has this object; or a copy.
        keeper: Renews the lease.
        origin: Where they lie in the pool; None if this is a copy.

    Raises:
        InvalidValue: It is no tensor.
    """

    __slots__ = ("_tensor",)

    def __init__(
        self,
        value: NDArray[np.uint8] | torch.Tensor,
        keeper: LeaseKeeper,
        origin: Origin | None = None,
    ) -> None:
        super().__init__(keeper, None if origin is None else value, origin)
        self._tensor = value if isinstance(value, torch.Tensor) else _tensor_of(value)

    @property
    def tensor(self) -> torch.Tensor:
        """In host memory, contiguous.

        Raises:
            StoreClosed: The view was closed. What was taken before keeps the lease.
        """
        self._check_open()
        return self._tensor

    def _let_go(self) -> None:
        del self._tensor


def _tensor_of(value: NDArray[np.uint8]) -> torch.Tensor:
    if len(value) <= HEADER_BYTES:
        raise InvalidValue(problem=f"a value of {len(value)} bytes is no tensor")
    # Of the whole object, which the tensor keeps: numpy would cut through to what is below it.
    return TensorHeader.read(value[:HEADER_BYTES]).shaped(torch.from_numpy(value)[HEADER_BYTES:])


def is_right(origin: Origin) -> bool:
    """Sum a value up where it lies."""
    place = origin.place
    return lies_right(origin.segment, place.offset, place.nbytes, place.checksum, place.chunk_bytes)


def verified(origin: Origin) -> bool:
    """As `is_right`, after what was written here, if anything, is undone."""
    if is_right(origin):
        return True
    place, guard = origin.place, origin.guard
    if guard is None:
        return False
    try:
        stored_bytes = place.nbytes + table_bytes(place.nbytes, place.chunk_bytes)
        guard.forget(place.offset, stored_bytes)
    except OSError:
        return False  # then it is copied
    return is_right(origin)


def give_back(origin: Origin, keeper: LeaseKeeper) -> None:
    """Let others read the value under the same lease, if it is read again and again.

    Not under one that was renewed: what somebody else removed would be found for ever.
    """
    lease, key, place = origin.place.lease, origin.key, origin.place
    if lease.lost or lease.deadline_s != origin.until_s:
        keeper.drop(lease)
    elif origin.was_hot:  # its time may be over: while no master answers, known places are read on
        origin.hot.bring_back(key, place, origin.removals)
    else:
        origin.hot.offer(key, place, removals=origin.removals)

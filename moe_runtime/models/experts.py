"""The expert weights that one rank holds, in memory that peers can read.

One expert is one *blob*: its gate, up and down matrices in one contiguous piece, so that it moves
between ranks, the pool and the disk with one offset and one length.

    blob    [ gate [I, H] | up [I, H] | down [H, I] ]      the first two together: gate_up [2I, H]
    slab    [ blob 0 | blob 1 | ... ]                      one registered memory

Life of a blob:  free -> reserved (being filled) -> resident -> released (cached) -> free
A released expert stays usable until its memory is needed, so a view change that gives an expert
back soon costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

import torch

from moe_runtime.errors import ExpertNotResident
from moe_runtime.models.paged_kv import Buffer
from moe_runtime.models.spec import ModelSpec

BLOB_ALIGNMENT = 64
SLAB_BYTES = 8 << 20

Prepared = TypeVar("Prepared")


class ExpertKey(NamedTuple):
    """Which expert: ordinal of its layer among those with experts, and its logical id."""

    moe_layer: int
    logical_expert: int


class BlobLocation(NamedTuple):
    """Where a blob lies: index into `memories()`, and the bytes of it."""

    slab: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Blob:
    """A place in a slab. `prepared` is what `prepared()` made of the present weights."""

    location: BlobLocation
    ready: bool = False
    prepared: object = field(default=None)


class ExpertBank:
    """Resident experts of one rank. Used from the rank loop only: not thread-safe.

    Memory is obtained through `allocate` and never given back before `close()`; a peer may hold a
    key to it, so a blob that a peer was offered must be withdrawn before it is released.

    Args:
        spec: Sizes.
        dtype: Type of the weights in the bank.
        allocate: Makes a buffer of so many bytes (`transfer.allocate` in the runtime).
        slab_bytes: Least size of a slab.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        allocate: Callable[[int], Buffer],
        *,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.blob_bytes = spec.expert_bytes(dtype)
        self._stride = -(-self.blob_bytes // BLOB_ALIGNMENT) * BLOB_ALIGNMENT
        self._blobs_per_slab = max(1, slab_bytes // self._stride)
        self._allocate = allocate
        self._slabs: list[Buffer] = []
        self._free: list[BlobLocation] = []
        self._blobs: dict[ExpertKey, _Blob] = {}
        self._released: OrderedDict[ExpertKey, None] = OrderedDict()

    def has(self, moe_layer: int, logical_expert: int) -> bool:
        """Whether the weights are here and complete (released ones included)."""
        blob = self._blobs.get(ExpertKey(moe_layer, logical_expert))
        return blob is not None and blob.ready

    def reserve(self, moe_layer: int, logical_expert: int) -> torch.Tensor:
        """Give an expert a blob to be filled: uint8 [blob_bytes], of unknown content.

        It is not usable before `ready`. An expert that is here already keeps its place.
        """
        key = ExpertKey(moe_layer, logical_expert)
        self._released.pop(key, None)
        if key not in self._blobs:
            self._blobs[key] = _Blob(location=self._take())
        blob = self._blobs[key]
        blob.ready, blob.prepared = False, None
        return self._bytes(blob.location)

    def ready(self, moe_layer: int, logical_expert: int) -> None:
        """Declare a reserved blob complete."""
        key = ExpertKey(moe_layer, logical_expert)
        assert key in self._blobs, "reserve() first"
        self._blobs[key].ready = True

    def release(self, moe_layer: int, logical_expert: int) -> None:
        """Allow the blob to be reused; an incomplete one is freed at once. Unknown: no effect."""
        key = ExpertKey(moe_layer, logical_expert)
        blob = self._blobs.get(key)
        if blob is None:
            return
        if blob.ready:
            self._released[key] = None
            self._released.move_to_end(key)
        else:
            self._drop(key)

    def retain(self, experts: Iterable[tuple[int, int]]) -> tuple[ExpertKey, ...]:
        """Keep exactly these: release all others, take back the released among them.

        Returns:
            Those that are not here, in the order given: to be reserved and filled.
        """
        wanted = dict.fromkeys(ExpertKey(*expert) for expert in experts)
        for key in [key for key in self._blobs if key not in wanted]:
            if key not in self._released:
                self.release(*key)
        for key in wanted:
            self._released.pop(key, None)
        return tuple(key for key in wanted if not self.has(*key))

    def resident(self) -> tuple[ExpertKey, ...]:
        """Complete and not released, ascending."""
        return tuple(
            sorted(k for k, blob in self._blobs.items() if blob.ready and k not in self._released)
        )

    def blob(self, moe_layer: int, logical_expert: int) -> torch.Tensor:
        """The bytes of a complete expert: uint8 [blob_bytes], a view of its slab.

        Raises:
            ExpertNotResident: Not here, or not complete.
        """
        return self._bytes(self._complete(moe_layer, logical_expert).location)

    def weights(self, moe_layer: int, logical_expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices of a complete expert: gate_up [2I, H] and down [H, I], views of its blob.

        Raises:
            ExpertNotResident: Not here, or not complete.
        """
        inner, hidden = self.spec.moe_intermediate_size, self.spec.hidden_size
        matrices = self.as_matrices(self.blob(moe_layer, logical_expert))
        return matrices[:2].view(2 * inner, hidden), matrices[2].view(hidden, inner)

    def as_matrices(self, blob: torch.Tensor) -> torch.Tensor:
        """View a blob [blob_bytes] uint8 as [3, I, H] of the bank's dtype."""
        inner, hidden = self.spec.moe_intermediate_size, self.spec.hidden_size
        return blob.view(self.dtype).view(3, inner, hidden)

    def prepared(
        self,
        moe_layer: int,
        logical_expert: int,
        prepare: Callable[[torch.Tensor, torch.Tensor], Prepared],
    ) -> Prepared:
        """What `prepare(gate_up, down)` makes of an expert's weights, kept as long as they are.

        Raises:
            ExpertNotResident: Not here, or not complete.
        """
        blob = self._complete(moe_layer, logical_expert)
        if blob.prepared is None:
            blob.prepared = prepare(*self.weights(moe_layer, logical_expert))
        return cast("Prepared", blob.prepared)

    def memories(self) -> tuple[Buffer, ...]:
        """All slabs, oldest first; the tuple only ever grows at its end."""
        return tuple(self._slabs)

    def location(self, moe_layer: int, logical_expert: int) -> BlobLocation:
        """Where an expert's blob lies, complete or only reserved.

        Raises:
            ExpertNotResident: It has no blob.
        """
        blob = self._blobs.get(ExpertKey(moe_layer, logical_expert))
        if blob is None:
            raise ExpertNotResident(layer=moe_layer, logical_expert=logical_expert)
        return blob.location

    def close(self) -> None:
        """Forget all experts and close the slabs that can be closed."""
        self._blobs.clear()
        self._released.clear()
        self._free.clear()
        slabs, self._slabs = self._slabs, []
        for slab in slabs:
            close = getattr(slab, "close", None)
            if close is not None:
                close()

    def _complete(self, moe_layer: int, logical_expert: int) -> _Blob:
        blob = self._blobs.get(ExpertKey(moe_layer, logical_expert))
        if blob is None or not blob.ready:
            raise ExpertNotResident(layer=moe_layer, logical_expert=logical_expert)
        return blob

    def _bytes(self, location: BlobLocation) -> torch.Tensor:
        slab, offset, nbytes = location
        return self._slabs[slab].tensor[offset : offset + nbytes]

    def _take(self) -> BlobLocation:
        """A free place: a free one, else that of the longest released, else one of a new slab."""
        if not self._free and self._released:
            self._drop(next(iter(self._released)))
        if not self._free:
            slab = len(self._slabs)
            self._slabs.append(self._allocate(self._blobs_per_slab * self._stride))
            self._free = [
                BlobLocation(slab, index * self._stride, self.blob_bytes)
                for index in reversed(range(self._blobs_per_slab))
            ]
        return self._free.pop()

    def _drop(self, key: ExpertKey) -> None:
        self._released.pop(key, None)
        self._free.append(self._blobs.pop(key).location)

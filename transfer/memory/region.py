"""Regions (memory the engine may touch) and keys (a window of a region, offered to one peer).

How they lie in one another::

    memory   |-----------------------------------------------|
    region          [0 .................... nbytes)              registered with this engine
    window                 [offset, offset + nbytes)             offered to one peer by a key
    piece                      [t, t + length)                   offsets count from the window

All intervals are half-open.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from transfer.arguments import check_integer, check_type
from transfer.errors import PeerUnknown, ProtocolViolation
from transfer.memory.memory import Memory, memory_of

TOKEN_BYTES: Final = 16
BUFFER_HINT: Final = ": `allocate` makes memory, and `torch.frombuffer` a tensor of a buffer"

Bytes = npt.NDArray[np.uint8]


class Access(Flag):
    """What the holder of a key may do."""

    READ = 1
    WRITE = 2


class RegionKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A window of a peer's memory, offered to one named peer. A plain value: send it anywhere.

    Knowing a key is not enough to use it: the owner checks who asks.

    Attributes:
        owner: name of the peer whose memory it is.
        token: 16 random bytes.
        nbytes: size of the window.
        rights: `Access` as an integer.
        shareable: whether same-host peers can map it.
        kind: of memory: "host", "file", "cuda:0".
    """

    owner: str
    token: bytes
    nbytes: int
    rights: int
    shareable: bool
    kind: str = "host"

    def __post_init__(self) -> None:
        check_type("owner", self.owner, str)
        check_type("token", self.token, bytes)
        check_integer("nbytes", self.nbytes, 0, 2**63 - 1)
        check_integer("rights", self.rights, 1, 3)
        if len(self.token) != TOKEN_BYTES:
            raise ValueError(f"a token has {TOKEN_BYTES} bytes, got {len(self.token)}")
        check_type("kind", self.kind, str)

    @property
    def access(self) -> Access:
        """The rights as a flag."""
        return Access(self.rights)

    def encode(self) -> bytes:
        """Return the key as about 60 bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> RegionKey:
        """Undo `encode`.

        Raises:
            ProtocolViolation: the bytes are no key.
        """
        try:
            return _key_decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise ProtocolViolation(f"region key: {error}") from error


_key_decoder = msgspec.msgpack.Decoder(RegionKey)


class Region:
    """Memory that the engine may read and write; made by `TransferEngine.register`.

    The engine does not own the memory, but keeps it alive as long as the region lives.

    Attributes:
        tensor: [nbytes] uint8 view of the memory.
        nbytes: its size.
        shareable: whether same-host peers can map it (it lies in a `Memory`).
        kind: "host"; of a `StorageRegion`, "file" or "cuda:0".
        writable: whether this process may write to it; see `ReadOnlyRegion`.
    """

    kind: str = "host"
    writable: bool = True

    def __init__(self, memory: Memory | torch.Tensor) -> None:
        if isinstance(memory, Memory) and memory.fd < 0:
            raise ValueError("the memory is closed")
        self.tensor = memory.tensor if isinstance(memory, Memory) else as_bytes(memory)
        self.nbytes = self.tensor.numel()
        self.array: Bytes = self.tensor.numpy()
        self.start = self.tensor.data_ptr()
        found = memory_of(self.start, self.nbytes) if self.nbytes else None
        self.memory = found[0] if found else None
        self.memory_offset = found[1] if found else 0

    @property
    def shareable(self) -> bool:
        """Whether same-host peers can map it."""
        return self.memory is not None


class ReadOnlyRegion(Region):
    """Memory that this process may only read, as it is mapped.

    It can be written from, and offered for reading. A class of its own, so that the short way of
    small messages need not ask.
    """

    writable = False


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous host tensor as [nbytes] uint8.

    Raises:
        ValueError: not contiguous, or not host memory.
    """
    check_type("memory", tensor, torch.Tensor, hint=BUFFER_HINT)
    if tensor.device.type != "cpu":
        raise ValueError(f"only host memory can be registered, got a tensor on {tensor.device}")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError("only contiguous tensors can be registered")
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise ValueError("only tensors whose memory holds their values can be registered")
    return tensor.detach().reshape(-1).view(torch.uint8)


@dataclass(slots=True, kw_only=True)
class Offer:
    """What a token stands for at its owner. `live` turns False once and for all.

    `standing_for`: the region with whose release it ends too, if that is not `region` itself.
    """

    region: Region
    to: str
    access: Access
    offset: int
    nbytes: int
    live: bool = field(default=True)
    standing_for: weakref.ref[Region] | None = None

    @property
    def window(self) -> Bytes:
        """[nbytes] uint8: the offered bytes."""
        return self.region.array[self.offset : self.offset + self.nbytes]


class OfferServer(Protocol):
    """Who lets peers access what is offered. After `withdraw_offer` has returned, it does not."""

    def add_offer(self, token: bytes, to: str, address: int, nbytes: int, rights: int, /) -> None:
        """Serve an offer."""

    def withdraw_offer(self, token: bytes, /) -> None:
        """Serve it no more."""


class OfferTable:
    """Everything this process has offered. Thread-safe.

    `landing` is held while bytes from a peer are copied into offered memory. Who withdraws
    takes it too, so after `withdraw` returned, nothing lands under that key over a socket.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._offers: dict[bytes, Offer] = {}
        self._server: OfferServer | None = None
        self.landing = threading.RLock()

    def add(self, offer: Offer) -> RegionKey:
        """Make a key for `offer`."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with self.landing:
            self._offers[token] = offer
            if self._server is not None:
                self._serve(self._server, token, offer)
        return RegionKey(
            owner=self._owner,
            token=token,
            nbytes=offer.nbytes,
            rights=offer.access.value,
            shareable=offer.region.shareable,
            kind=offer.region.kind,
        )

    def bind(self, server: OfferServer) -> None:
        """Let a server serve what is offered, now and from now on."""
        with self.landing:
            self._server = server
            for token, offer in self._offers.items():
                self._serve(server, token, offer)

    def unbind(self) -> None:
        """Let it not be served any more, because the server closes."""
        with self.landing:
            self._server = None

    @staticmethod
    def _serve(server: OfferServer, token: bytes, offer: Offer) -> None:
        if offer.region.kind != "host":
            return  # it has no address; see `staging`
        address = offer.region.start + offer.offset
        server.add_offer(token, offer.to, address, offer.nbytes, offer.access.value)

    def find(self, token: bytes, *, to: str) -> Offer | None:
        """Return the offer if it is live and was made to the peer that asks."""
        offer = self._offers.get(token)
        return offer if offer is not None and offer.to == to else None

    def withdraw(self, token: bytes) -> Offer | None:
        """Forget one offer; None if it is already gone."""
        with self.landing:
            offer = self._offers.pop(token, None)
            if offer is not None:
                offer.live = False
                if self._server is not None:
                    self._server.withdraw_offer(token)
            return offer

    def withdraw_region(self, region: Region) -> list[tuple[bytes, Offer]]:
        """Forget all offers of a region."""
        return self._withdraw_if(
            lambda offer: (
                offer.region is region
                or (offer.standing_for is not None and offer.standing_for() is region)
            )
        )

    def withdraw_peer(self, name: str) -> list[tuple[bytes, Offer]]:
        """Forget everything offered to a peer."""
        return self._withdraw_if(lambda offer: offer.to == name)

    def withdraw_all(self) -> None:
        """Forget everything."""
        self._withdraw_if(lambda offer: True)

    def _withdraw_if(self, matches: Callable[[Offer], bool]) -> list[tuple[bytes, Offer]]:
        with self.landing:
            found = [(token, offer) for token, offer in self._offers.items() if matches(offer)]
            for token, _ in found:
                self.withdraw(token)
            return found

    def __len__(self) -> int:
        return len(self._offers)


def make_offer(
    region: Region, *, to: str, access: Access, offset: int, nbytes: int | None
) -> Offer:
    """Check the window of an offer.

    Raises:
        ValueError: the window is not inside the region, gives no right, or the right to write to
            memory that is read-only.
        PeerUnknown: `to` is empty.
    """
    check_type("region", region, Region)
    check_type("to", to, str)
    check_type("access", access, Access)
    check_integer("offset", offset, -(2**63), 2**63)
    size = region.nbytes - offset if nbytes is None else nbytes
    check_integer("nbytes", size, -(2**64), 2**64)
    if offset < 0 or size < 0 or offset + size > region.nbytes:
        raise ValueError(
            f"window [{offset}, {offset + size}) is not inside the region of {region.nbytes} bytes"
        )
    if not access:
        raise ValueError("an offer without any right is no offer")
    if Access.WRITE in access and not region.writable:
        raise ValueError("memory that is mapped read-only can be offered for reading only")
    if not to:
        raise PeerUnknown(to)
    return Offer(region=region, to=to, access=access, offset=offset, nbytes=size)

"""Registering memory, and giving peers rights to it: the part of an engine that hands out keys."""

from __future__ import annotations

from typing import Final

import torch

from transfer.arguments import check_type
from transfer.connections.links import Links
from transfer.errors import PeerLost
from transfer.event_loop import EventLoop
from transfer.memory.memory import Memory
from transfer.memory.region import Access, OfferTable, Region, RegionKey, make_offer
from transfer.peer import PeerTable
from transfer.storage.staging import Staging
from transfer.storage.storage import Storage

# How long a peer that knows addresses of ours is waited for when they are withdrawn.
RETIRE_S: Final = 1.0


class Offering:
    """The regions and keys of a `TransferEngine`. Thread-safe."""

    _table: PeerTable
    _offers: OfferTable
    _loop: EventLoop
    _links: Links
    _staging: Staging

    def register(self, memory: Memory | torch.Tensor | Storage) -> Region:
        """Let the engine use memory, which stays the caller's.

        Args:
            memory: a `Memory`, a contiguous tensor of any shape and type on the host or a CUDA
                device, or a `Storage` such as an open `FileSlab`. Views of a `Memory` are as
                shareable as the whole.

        Raises:
            ValueError: not contiguous, or on a device that is not supported.
            DeviceUnavailable: this process cannot use that device.
        """
        return self._staging.register(memory)

    def release(self, region: Region) -> bool:
        """Withdraw every key of a region; idempotent. The memory is not touched.

        Returns:
            As `withdraw`, for all of them.
        """
        found = self._offers.withdraw_region(check_type("region", region, Region))
        for token, offer in found:
            self._tell_withdrawn(token, offer.to)
        self._links.rdma.release(region)
        return self._await_retired([token for token, _ in found])

    def offer(
        self,
        region: Region,
        *,
        to: str,
        access: Access,
        offset: int = 0,
        nbytes: int | None = None,
    ) -> RegionKey:
        """Give a named peer the right to a window of a region. The peer need not be connected.

        What is offered for writing to a same-host peer is that incarnation's alone until its
        process is known to be dead: nobody can unmap it over there.

        Raises:
            ValueError: the window is not inside the region, or `access` is empty.
            PeerLost: the name is fenced.
        """
        offer = make_offer(region, to=to, access=access, offset=offset, nbytes=nbytes)
        key = self._offers.add(offer)
        if (evidence := self._table.fenced(to)) is not None:
            self._offers.withdraw(key.token)
            raise PeerLost(to, evidence)
        return key

    def withdraw(self, key: RegionKey) -> bool:
        """Make a key void; idempotent. After the return nothing lands under it over a socket.

        A same-host peer is told, and forgets its mapping; until then it can still write. A peer
        that copies to and from our memory by its address (it lies in no `Memory`) is waited for,
        but not for longer than a second, and not on the engine's own thread. So is a storage of
        ours that is still moving what a peer has asked for.

        Returns:
            False if such a peer may still be copying, a stopped one for example. The memory is
            quarantined then: kept alive until that peer has answered or its process has ended,
            and not to be reused before. Also if such a storage is not done, a disk that hangs for
            example. Ask again to find out; after True nothing of either comes any more.
        """
        offer = self._offers.withdraw(check_type("key", key, RegionKey).token)
        if offer is not None:
            self._tell_withdrawn(key.token, offer.to)
        # The engine's own thread takes the answers, and hands the asks of a storage on.
        wait_s = 0.0 if self._loop.is_current else RETIRE_S
        is_still = self._staging.withdrawn(key.token, wait_s)
        return self._links.told.wait([key.token], wait_s) and is_still

    def _withdraw_addresses(self) -> None:
        """Make void, and wait a while for, whatever is written to and read by its address."""
        tokens = self._links.told.tokens()
        for token in tokens:
            if (offer := self._offers.withdraw(token)) is not None:
                self._tell_withdrawn(token, offer.to)
        self._await_retired(tokens)

    def _tell_withdrawn(self, token: bytes, name: str) -> None:
        if (link := self._table.get(name)) is not None:
            self._links.tell_withdrawn(link, token)

    def _await_retired(self, tokens: list[bytes]) -> bool:
        # The engine's own thread takes the answers.
        return self._links.told.wait(tokens, 0.0 if self._loop.is_current else RETIRE_S)

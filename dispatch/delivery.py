"""How the messages of one epoch travel: writes out, waits in.

What a failure is called, and how long is waited, says `dispatch.waiting`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dispatch.carrier import Size, Write
from dispatch.exchange import Exchange
from dispatch.growth import append_grant, read_grant, read_note, with_grant, write_note
from dispatch.layout import Bytes
from dispatch.message import GRANT, SPILLED, Stamp, marks_of
from dispatch.statistics import Counters
from dispatch.waiting import PEER_ERRORS, Waiting
from dispatch.windows import ReceiveWindow, SendWindow, StagedPart, Staging
from transfer import Access

if TYPE_CHECKING:
    from transfer import RegionKey, TransferEngine

logger = logging.getLogger(__name__)


class Route(NamedTuple):
    """One peer, and where messages to and from it are.

    Attributes:
        position: Among the members.
        rank: Its rank.
        name: Its peer name.
        i: Its position in the staging.
        target: Its windows for this rank.
        windows: This rank's windows for it.
    """

    position: int
    rank: int
    name: str
    i: int
    target: SendWindow
    windows: ReceiveWindow


class Delivery:
    """Sends one message to every peer and waits for one of every peer. Not thread-safe.

    Args:
        engine: Not owned.
        exchange: For the positions of the members.
        epoch: Of all messages.
        timeout_s: Longest time without any message that is due.
        peers: Rank -> name of all other members.
        windows: Rank -> where its messages land.
        targets: Rank -> where messages to it go.
        staging: Where messages are assembled.
        counters: Where to count bytes and time.
        num_windows: Windows of each peer: two per microbatch.
    """

    def __init__(
        self,
        engine: TransferEngine,
        exchange: Exchange,
        *,
        epoch: int,
        timeout_s: float,
        peers: Mapping[int, str],
        windows: Mapping[int, ReceiveWindow],
        targets: Mapping[int, SendWindow],
        staging: Staging,
        counters: Counters,
        num_windows: int = 2,
    ) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._counters = counters
        self._staging = staging
        position = {rank: i for i, rank in enumerate(exchange.members)}
        # Everybody starts with the next rank, so that no rank is everybody's first.
        rotated = sorted(peers, key=lambda rank: (position[rank] - exchange.me) % len(position))
        self._routes = [
            Route(position[rank], rank, peers[rank], i, targets[rank], windows[rank])
            for i, rank in enumerate(rotated)
        ]
        # Keys of grown windows, for the next message of the same microbatch to that rank.
        self._grants: dict[tuple[int, int], RegionKey] = {}  # (rank, window of that message)
        numbers = range(num_windows)
        self._waiting = Waiting(
            engine, epoch=epoch, timeout_s=timeout_s, peers=peers, num_windows=num_windows
        )
        self._buffers: list[dict[int, Bytes]] = [
            {position[rank]: mine.parts[window] for rank, mine in windows.items()}
            for window in numbers
        ]

    def first_messages(self) -> list[tuple[str, int]]:
        """Return (peer, immediate) of the messages that may begin a pass."""
        return self._waiting.first_messages()

    def send(self, stamp: Stamp, size: Size, write: Write, *, due: Size | None = None) -> None:
        """See `Carrier.send`; a write says its own size."""
        self._waiting.settle(stamp)
        for route in self._routes:
            self._send(stamp, route, size(route.position), write)

    def receive(
        self, stamp: Stamp, shared: bytes, timeout_s: float | None = None
    ) -> Mapping[int, Bytes]:
        """See `Carrier.receive`; also raises `transfer.Interrupted`."""
        if not self._routes:
            return {}
        start = time.monotonic()
        self._waiting.arrive(stamp, timeout_s)
        self._counters.waited_s += time.monotonic() - start
        buffers = self._buffers[stamp.window]
        for route in self._routes:
            marks, _ = marks_of(buffers[route.position])
            if marks:
                self._follow(stamp, shared, route, marks)
        return buffers

    def _send(self, stamp: Stamp, route: Route, nbytes: int, write: Write) -> None:
        window, target = stamp.window, route.target
        grant = self._grants.pop((route.rank, window), None) if self._grants else None
        room = nbytes if grant is None else with_grant(nbytes)
        try:
            if room <= target.sizes[window] and (
                mapped := self._engine.in_place(route.name, target.keys[window])
            ):
                part = mapped.array[target.offsets[window] :]
                nbytes = self._assemble(part, route, nbytes, write, grant)
                transfer = mapped.announce(
                    nbytes, self._waiting.immediates[window], timeout_s=self._timeout_s
                )
            else:
                staged, nbytes = self._stage(window, route, nbytes, room, write, grant)
                transfer = self._engine.write(
                    route.name,
                    staged.region,
                    target.keys[window],
                    staged.offset,
                    target.offsets[window],
                    nbytes,
                    immediate=self._waiting.immediates[window],
                    timeout_s=self._timeout_s,
                )
        except PEER_ERRORS as error:
            raise self._waiting.failed(stamp, error, route.rank) from error
        self._waiting.transfers[window].append((route.rank, transfer))

    def _assemble(
        self, part: Bytes, route: Route, nbytes: int, write: Write, grant: RegionKey | None
    ) -> int:
        """Write a message and perhaps a grant; return the size of both."""
        written = write(route.position, part)
        assert written == nbytes, "the size was told before the message was written"
        if grant is not None:
            nbytes = append_grant(part, nbytes, grant)
        self._counters.sent_bytes += nbytes
        return nbytes

    def _stage(
        self,
        window: int,
        route: Route,
        nbytes: int,
        room: int,
        write: Write,
        grant: RegionKey | None,
    ) -> tuple[StagedPart, int]:
        """Assemble a message in our memory; return what is to be sent, and its size."""
        base, window_bytes = self._staging.parts[route.i][window], route.target.sizes[window]
        if room <= len(base.part) and room <= window_bytes:
            return base, self._assemble(base.part, route, nbytes, write, grant)
        own = self._staging.own(route.i, window, room)
        nbytes = self._assemble(own.part, route, nbytes, write, grant)
        if nbytes <= window_bytes:
            return StagedPart(own.region, 0, own.part), nbytes
        key = own.key(route.name, Access.READ)
        nbytes = write_note(base.part, own.part, nbytes, key)
        self._counters.sent_bytes += nbytes
        return base, nbytes

    def _follow(self, stamp: Stamp, shared: bytes, route: Route, marks: int) -> None:
        """Do what a marked message says (see `dispatch.growth`)."""
        window, rank, name = stamp.window, route.rank, route.name
        buffers = self._buffers[window]
        if marks & SPILLED:
            largest = route.windows.largest[window]
            buffer = buffers[route.position]
            note = read_note(buffer, shared, source=rank, owner=name, largest=largest)
            region = route.windows.grow(window, note.nbytes)
            try:
                reading = self._engine.read(
                    name, region, note.key, 0, 0, note.nbytes, timeout_s=self._timeout_s
                )
                reading.wait()
            except PEER_ERRORS as error:
                raise self._waiting.failed(stamp, error, rank) from error
            buffers[route.position] = route.windows.parts[window]
            # The answer of this microbatch: the peer reads it before it writes here again.
            self._grants[rank, window ^ 1] = route.windows.grant(window)
            self._counters.grown_windows += 1
            logger.debug("window %d for rank %d grew for %d bytes", window, rank, note.nbytes)
            marks, _ = marks_of(buffers[route.position])
        if marks & GRANT:
            key = read_grant(buffers[route.position], shared, source=rank, owner=name)
            route.target.accept(window ^ 1, key)

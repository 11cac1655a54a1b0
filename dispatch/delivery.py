"""How the messages of one epoch travel: writes out, waits in, and what a failure is called.

    lost peer                      -> PassFailed, suspect: that rank
    no message for pass_timeout_s  -> PassFailed, suspects: the ranks whose message is missing
    refused write                  -> PassFailed, no suspects: the peer has left this epoch
    transfer.Interrupted           -> passes through

A wait is extended as long as messages arrive: it is cut into looks, and only so many of them in a
row without a message are silence. A look during which this process itself was stopped does not
count, once: who did not look cannot say that nothing came.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from dispatch.errors import DispatchError, PassFailed
from dispatch.exchange import Exchange
from dispatch.growth import append_grant, read_grant, read_note, with_grant, write_note
from dispatch.layout import Bytes
from dispatch.message import GRANT, SPILLED, Stamp, marks_of
from dispatch.statistics import Counters
from dispatch.windows import ReceiveWindow, SendWindow, StagedPart, Staging
from transfer import (
    Access,
    AccessRefused,
    ImmediateTimeout,
    PeerLost,
    PeerUnknown,
    TransferError,
    TransferTimeout,
)

if TYPE_CHECKING:
    from transfer import RegionKey, Transfer, TransferEngine

logger = logging.getLogger(__name__)

EPOCH_MASK = 0xFF_FFFF
WINDOW_BITS = 3
LOOKS = 4  # a message may come just after a look began: silence is noticed within 5/4 of its time
STALL_FACTOR = 0.5  # a look that took so much of that time too long was not ours to judge

# What one peer's state can do to a write. Anything else (the engine was closed) is not its doing.
PEER_ERRORS = (PeerLost, PeerUnknown, AccessRefused, TransferTimeout)

Size = Callable[[int], int]  # position of a member -> bytes of the message for it
Write = Callable[[int, Bytes], int]  # position of a member, buffer -> bytes written


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


def immediate_of(epoch: int, window: int) -> int:
    """Return the immediate that announces a message: 24 bits of the epoch, 3 of the window."""
    return (epoch & EPOCH_MASK) << WINDOW_BITS | window


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
        self._rank_of = {name: rank for rank, name in peers.items()}
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
        self._immediates = [immediate_of(epoch, window) for window in numbers]
        self._due = [
            {(name, immediate): 1 for name in peers.values()} for immediate in self._immediates
        ]
        self._buffers: list[dict[int, Bytes]] = [
            {position[rank]: mine.parts[window] for rank, mine in windows.items()}
            for window in numbers
        ]
        self._transfers: list[list[tuple[int, Transfer]]] = [[] for _ in numbers]

    def first_messages(self) -> list[tuple[str, int]]:
        """Return (peer, immediate) of the messages that may begin a pass."""
        return [key for due in self._due[::2] for key in due]

    def send(self, stamp: Stamp, size: Size, write: Write) -> None:
        """Send one message to every peer.

        Args:
            stamp: Of the messages.
            size: Tells the size of the message for the member at a position.
            write: Assembles it.

        Raises:
            PassFailed.
        """
        self._settle(stamp)
        for route in self._routes:
            self._send(stamp, route, size(route.position), write)

    def receive(
        self, stamp: Stamp, shared: bytes, timeout_s: float | None = None
    ) -> Mapping[int, Bytes]:
        """Wait for the message of every peer.

        Args:
            stamp: Of the messages.
            shared: What their headers have in common.
            timeout_s: Longest time to wait in all; default: as long as messages keep arriving.

        Returns:
            Position of each other member -> its message; valid until the next phase of this
            microbatch has been sent.

        Raises:
            PassFailed, transfer.Interrupted.
            MessageMismatch: A note or a grant is not as it should be.
        """
        if not self._routes:
            return {}
        start = time.monotonic()
        self._receive(stamp, timeout_s)
        self._counters.waited_s += time.monotonic() - start
        buffers = self._buffers[stamp.window]
        for route in self._routes:
            marks, _ = marks_of(buffers[route.position])
            if marks:
                self._follow(stamp, shared, route, marks)
        return buffers

    def _settle(self, stamp: Stamp) -> None:
        """Finish the writes of two phases ago, whose staging is needed now.

        They have arrived, as the peers' later messages show; what is awaited here is only the
        engine's own account of it.
        """
        transfers = self._transfers[stamp.window]
        for rank, transfer in transfers:
            try:
                transfer.wait(self._timeout_s)
            except PEER_ERRORS as error:
                raise self._failed(stamp, error, rank) from error
        transfers.clear()

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
                    nbytes, self._immediates[window], timeout_s=self._timeout_s
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
                    immediate=self._immediates[window],
                    timeout_s=self._timeout_s,
                )
        except PEER_ERRORS as error:
            raise self._failed(stamp, error, route.rank) from error
        self._transfers[window].append((route.rank, transfer))

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
                raise self._failed(stamp, error, rank) from error
            buffers[route.position] = route.windows.parts[window]
            # The answer of this microbatch: the peer reads it before it writes here again.
            self._grants[rank, window ^ 1] = route.windows.grant(window)
            self._counters.grown_windows += 1
            logger.debug("window %d for rank %d grew for %d bytes", window, rank, note.nbytes)
            marks, _ = marks_of(buffers[route.position])
        if marks & GRANT:
            key = read_grant(buffers[route.position], shared, source=rank, owner=name)
            route.target.accept(window ^ 1, key)

    def _receive(self, stamp: Stamp, timeout_s: float | None) -> None:
        due = self._due[stamp.window]
        missing: frozenset[tuple[str, int]] = frozenset(due)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        silent_looks, stalled = 0, False
        while True:
            start = time.monotonic()
            look_s = min(self._timeout_s / LOOKS, max(deadline - start, 0.0))
            try:
                self._engine.expect(due, timeout_s=look_s)
            except ImmediateTimeout as error:
                still_missing = frozenset(error.missing)
                now = time.monotonic()
                if now - start - look_s > self._timeout_s * STALL_FACTOR and not stalled:
                    stalled = True
                    continue
                silent_looks = 0 if still_missing < missing else silent_looks + 1
                missing = still_missing
                if silent_looks < LOOKS and now < deadline:
                    continue
                silence_s = (
                    self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
                )
                raise self._silent(stamp, missing, silence_s) from error
            except PeerLost as error:
                raise self._failed(stamp, error, self._rank_of.get(error.peer)) from error
            return

    def _silent(
        self, stamp: Stamp, missing: frozenset[tuple[str, int]], timeout_s: float
    ) -> DispatchError:
        """Name the reason for silence: a write that failed, or ranks that sent nothing."""
        for rank, transfer in self._transfers[stamp.window]:
            if transfer.done():
                try:
                    transfer.wait(0)
                except PEER_ERRORS as error:
                    return self._failed(stamp, error, rank)
        ranks = tuple(sorted(self._rank_of[name] for name, _ in missing))
        evidence = f"no {stamp.phase} message for {timeout_s:.3g} s"
        return self._pass_failed(stamp, ranks, evidence)

    def _failed(self, stamp: Stamp, error: TransferError, rank: int | None) -> PassFailed:
        # A refused write is no sign of death: the peer has withdrawn its windows and gone on.
        suspects = () if rank is None or isinstance(error, AccessRefused) else (rank,)
        return self._pass_failed(stamp, suspects, f"{type(error).__name__}: {error}")

    def _pass_failed(self, stamp: Stamp, suspects: tuple[int, ...], evidence: str) -> PassFailed:
        return PassFailed(
            epoch=stamp.epoch,
            pass_id=stamp.pass_id,
            layer=stamp.layer,
            phase=stamp.phase.value,
            suspects=suspects,
            evidence=evidence,
        )

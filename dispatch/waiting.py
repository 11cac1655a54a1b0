"""How long is waited for messages, and what a failure is called.

    lost peer                      -> PassFailed, suspect: that rank
    no message for pass_timeout_s  -> PassFailed, suspects: the ranks whose message is missing
    refused write                  -> PassFailed, no suspects: the peer has left this epoch
    transfer.Interrupted           -> passes through

A wait is extended as long as messages arrive: it is cut into looks, and only so many of them in a
row without a message are silence. A look during which this process itself was stopped does not
count, once: who did not look cannot say that nothing came.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dispatch.errors import DispatchError, PassFailed
from dispatch.message import Stamp
from transfer import (
    AccessRefused,
    ImmediateTimeout,
    PeerLost,
    PeerUnknown,
    TransferError,
    TransferTimeout,
)

if TYPE_CHECKING:
    from transfer import Transfer, TransferEngine

EPOCH_MASK = 0xFF_FFFF
WINDOW_BITS = 3
LOOKS = 4  # a message may come just after a look began: silence is noticed within 5/4 of its time
STALL_FACTOR = 0.5  # a look that took so much of that time too long was not ours to judge

# What one peer's state can do to a write. Anything else (the engine was closed) is not its doing.
PEER_ERRORS = (PeerLost, PeerUnknown, AccessRefused, TransferTimeout)


def immediate_of(epoch: int, window: int) -> int:
    """Return the immediate that announces a message: 24 bits of the epoch, 3 of the window."""
    return (epoch & EPOCH_MASK) << WINDOW_BITS | window


class Waiting:
    """What is under way in one epoch, and due. Not thread-safe.

    Args:
        engine: Not owned.
        epoch: Of all messages.
        timeout_s: Longest time without any message that is due.
        peers: Rank -> name of all other members.
        num_windows: Windows of each peer: two per microbatch.

    Attributes:
        immediates: By number of the window, what announces a message in it.
        transfers: By number of the window, (rank, write) of this rank's messages.
    """

    def __init__(
        self,
        engine: TransferEngine,
        *,
        epoch: int,
        timeout_s: float,
        peers: Mapping[int, str],
        num_windows: int,
    ) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._rank_of = {name: rank for rank, name in peers.items()}
        self.immediates = [immediate_of(epoch, window) for window in range(num_windows)]
        self._due = [
            {(name, immediate): 1 for name in peers.values()} for immediate in self.immediates
        ]
        self.transfers: list[list[tuple[int, Transfer]]] = [[] for _ in self.immediates]

    def first_messages(self) -> list[tuple[str, int]]:
        """Return (peer, immediate) of the messages that may begin a pass."""
        return [key for due in self._due[::2] for key in due]

    def settle(self, stamp: Stamp) -> None:
        """Finish the writes of two phases ago, whose staging is needed now.

        They have arrived, as the peers' later messages show; what is awaited here is only the
        engine's own account of it.

        Raises:
            PassFailed.
        """
        transfers = self.transfers[stamp.window]
        for rank, transfer in transfers:
            try:
                transfer.wait(self._timeout_s)
            except PEER_ERRORS as error:
                raise self.failed(stamp, error, rank) from error
        transfers.clear()

    def arrive(self, stamp: Stamp, timeout_s: float | None) -> None:
        """Wait until the message of every peer is in its window.

        Args:
            stamp: Of the messages.
            timeout_s: Longest time to wait in all; None: as long as messages keep arriving.

        Raises:
            PassFailed, transfer.Interrupted.
        """
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
                raise self.failed(stamp, error, self._rank_of.get(error.peer)) from error
            return

    def _silent(
        self, stamp: Stamp, missing: frozenset[tuple[str, int]], timeout_s: float
    ) -> DispatchError:
        """Name the reason for silence: a write that failed, or ranks that sent nothing."""
        for rank, transfer in self.transfers[stamp.window]:
            if transfer.done():
                try:
                    transfer.wait(0)
                except PEER_ERRORS as error:
                    return self.failed(stamp, error, rank)
        ranks = tuple(sorted(self._rank_of[name] for name, _ in missing))
        evidence = f"no {stamp.phase} message for {timeout_s:.3g} s"
        return self._pass_failed(stamp, ranks, evidence)

    def failed(self, stamp: Stamp, error: TransferError, rank: int | None) -> PassFailed:
        """Return what to raise because of an error of one peer."""
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

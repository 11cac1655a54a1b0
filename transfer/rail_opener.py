"""Opens links over rails: which addresses are paired, and what is dialled over them.

Our rails and a peer's are lists of addresses. The i-th of ours is paired with the i-th of the
peer's, and with what is left over where one list is longer: every address of both is in use.
Runs on the engine's thread.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial

from configs.schema import TransferConfig
from transfer.backends.tcp import TcpRail
from transfer.event_loop import EventLoop
from transfer.handshake import Facts, Purpose
from transfer.peer import LinkState, PeerLink
from transfer.rail import RailLink, RailName, SliceSink
from transfer.rdma import Rdma
from transfer.rendezvous import Greeted, Outcome, Rendezvous
from transfer.statistics import Tally

logger = logging.getLogger(__name__)


class RailOpener:
    """Opens the data connections of all peers of an engine."""

    def __init__(
        self,
        config: TransferConfig,
        rdma: Rdma,
        tally: Tally,
        loop: EventLoop,
        rendezvous: Rendezvous,
    ) -> None:
        self._config = config
        self._rdma = rdma
        self._tally = tally
        self._loop = loop
        self._rendezvous = rendezvous

    def rails(self, backend: str, facts: Facts) -> list[RailName]:
        """Return the rails that lead to a peer: by a unix socket on the same host."""
        if backend == "verbs":
            return self._rdma.rails(facts.verbs)
        if backend != "tcp":
            return [RailName("unix", "", f"@{facts.local_socket}")]
        ours = self._config.rails or (self._config.host,)
        theirs = facts.rails or (facts.address,)
        count = max(len(ours), len(theirs))
        return [RailName("tcp", ours[i % len(ours)], theirs[i % len(theirs)]) for i in range(count)]

    def open(
        self,
        peer: PeerLink,
        rail: RailName,
        idx: int,
        sink: SliceSink,
        done: Callable[[RailLink | None], None],
    ) -> None:
        """Make a link over the `idx`-th rail; the callback gets it, or None."""
        if peer.rdma is not None:
            peer.rdma.open_rail(rail, idx, sink, done)
            return

        def dialed(sock: socket.socket | None) -> None:
            if sock is None:
                done(None)
                return
            done(TcpRail(
                rail, sock, self._loop, sink, self._tally,
                num_bulk=self._config.tcp_connections,
                dial=partial(self._dial, peer, rail),
            ))  # fmt: skip

        self._dial(peer, rail, dialed)

    def _dial(
        self, peer: PeerLink, rail: RailName, done: Callable[[socket.socket | None], None]
    ) -> None:
        if peer.state is LinkState.LOST or peer.evidence is not None:
            done(None)
            return

        def dialed(outcome: Outcome) -> None:
            if isinstance(outcome, Greeted):
                done(outcome.sock)
            else:
                logger.debug("no data connection to %s: %s", peer.name, outcome.reason)
                done(None)

        # With a single address the routing decides where we call from.
        source = rail.local if self._config.rails and rail.backend == "tcp" else None
        self._rendezvous.dial(
            rail.remote, Purpose.DATA, name=peer.name, source=source, on_outcome=dialed
        )

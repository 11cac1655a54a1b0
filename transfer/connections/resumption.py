"""Bringing a control connection back over any address of the peer, or finding out that it is dead.

    whole --broken, or silent--> resuming --over another socket, or heard again--> whole
                                    |
                                    +--refused, or not in time--> the peer is lost

Who made the connection calls all addresses that the peer has told, and goes on over the first
that answers. Who was called cannot, but calls too: that tells the other side that its connection
is missed, and itself whether there still is another side. Where nobody listens any more the
process has ended: a killed peer is so found out in one round trip, as the kernel refuses for it.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from transfer.connections.handshake import Purpose
from transfer.connections.negotiation import HANG_UP, Greeted, Outcome
from transfer.connections.rendezvous import Rendezvous
from transfer.connections.stream import Stream
from transfer.errors import HandshakeRefused, PeerUnreachable
from transfer.event_loop import EventLoop
from transfer.peer import LinkState, PeerLink
from transfer.statistics import Tally

logger = logging.getLogger(__name__)

# What was sent is confirmed at the next tick; a stopped peer is called in vain, which is harmless.
SILENT_S: Final = 1.0
# Where one address refuses, the others have so long to answer.
GRACE_S: Final = 0.25
# The peer has answered: what other addresses say does not count for so long.
MET_S: Final = 2.0
# How long the other side may take to go on over a socket that was made.
AGREE_S: Final = 1.0
RETRY_S: Final = 0.01
RETRY_S_MAX: Final = 1.0
# A call of the peer just after all was well again is a late one.
LATE_S: Final = 0.5
REFUSED: Final = errno.errorcode[errno.ECONNREFUSED]


@dataclass(frozen=True, slots=True)
class Way:
    """An address of the peer, and the local address from which it is called; None = any."""

    source: str | None
    target: str


@dataclass(slots=True, kw_only=True)
class _WayState:
    way: Way
    calling: bool = False
    refused_at: float | None = None
    closed: bool = False
    retry_at: float = 0.0
    backoff_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Resumption:
    """What is known about the ways to one peer while its connection is missed. Pure.

    Attributes:
        evidence: what became of the connection.
        broken: whether there is none; if not it is silent, or the peer says that it misses it.
        wanted: the peer has called.
        deadline: when a peer whose connection is broken is lost.
    """

    evidence: str
    timeout_s: float
    broken: bool = False
    wanted: bool = False
    deadline: float = float("inf")
    _ways: list[_WayState] = field(default_factory=list)
    _met_until: float = 0.0
    _agree_until: float = 0.0
    _refusal: str = ""

    def add(self, ways: Sequence[Way]) -> None:
        """Say where the peer may be found."""
        self._ways = [_WayState(way=way) for way in dict.fromkeys(ways)]

    def become_broken(self, evidence: str, now: float) -> None:
        """There is no connection any more."""
        if not self.broken:
            self.broken, self.evidence = True, evidence
            self.deadline = now + self.timeout_s
        self._agree_until = 0.0

    def due(self, now: float) -> list[tuple[int, Way]]:
        """Return the ways to be called now, which count as being called from here on."""
        if now < self._agree_until:
            return []
        found = [
            (i, state.way)
            for i, state in enumerate(self._ways)
            if not state.calling and state.retry_at <= now
        ]
        for i, _ in found:
            self._ways[i].calling = True
        return found

    def failed(self, idx: int, reason: str, now: float, *, refused: bool) -> None:
        """A call came to nothing; `refused` by who is there, be it the kernel."""
        state = self._ways[idx]
        state.calling = False
        state.closed = reason == REFUSED
        # The first time at once: a dying process resets a call as it closes, then it refuses.
        state.retry_at = now + state.backoff_s
        state.backoff_s = min(max(2 * state.backoff_s, RETRY_S), RETRY_S_MAX)
        if not refused:
            state.refused_at = None
        elif state.refused_at is None:
            state.refused_at = now
            self._refusal = f"{state.way.target}: {reason}"

    def met(self, idx: int, now: float) -> None:
        """The peer has answered over this way: it lives."""
        state = self._ways[idx]
        state.calling, state.refused_at, state.closed = False, None, False
        state.retry_at = now + AGREE_S
        self._met_until = now + MET_S

    def agreeing(self, now: float) -> None:
        """A socket was made, and waits for the peer's word."""
        self._agree_until = now + AGREE_S

    def progressed(self, now: float) -> None:
        """Bytes are moved by other rails, so the peer lives."""
        self.deadline = max(self.deadline, now + self.timeout_s)

    def verdict(self, now: float) -> str | None:
        """Say why the peer is lost; None while there is hope."""
        refusals = [s.refused_at for s in self._ways if s.refused_at is not None]
        nobody_listens = all(s.closed for s in self._ways)
        settled = nobody_listens or min(refusals, default=now) + GRACE_S <= now
        if refusals and settled and now >= self._met_until:
            return f"{self.evidence} ({self._refusal})"
        if self.broken and now >= self.deadline:
            return f"{self.evidence}, and no way leads to it since {self.timeout_s:g} s"
        return None


class Resumptions:
    """All of an engine. On the engine's thread.

    Args:
        ways: addresses of a peer.
        lose: ends a link, with the evidence.
    """

    def __init__(
        self,
        loop: EventLoop,
        rendezvous: Rendezvous,
        tally: Tally,
        *,
        timeout_s: float,
        ways: Callable[[PeerLink], Sequence[Way]],
        lose: Callable[[PeerLink, str], None],
    ) -> None:
        self._loop = loop
        self._rendezvous = rendezvous
        self._tally = tally
        self._timeout_s = timeout_s
        self._ways = ways
        self._lose = lose
        self._open: dict[PeerLink, Resumption] = {}
        self._resumed_at: dict[PeerLink, float] = {}
        self._num_done: dict[PeerLink, int] = {}
        self._num_failures: dict[PeerLink, int] = {}

    def on_broken(self, link: PeerLink, evidence: str) -> None:
        """A link's control connection is over."""
        if link.ending or link.state is LinkState.LOST:
            return
        if link.state is LinkState.CONNECTING or link.evidence is not None:
            self._lose(link, evidence)
            return
        resumption = self._begin(link, evidence)
        resumption.become_broken(evidence, time.monotonic())
        self._go_on(link, resumption, time.monotonic())

    def on_call(self, link: PeerLink, greeted: Greeted) -> None:
        """The peer calls about its control connection."""
        if not link.dialed:
            link.control.offer(greeted)
            return
        # Once the last word of the handshake is out.
        self._loop.call(lambda: Stream.discard(greeted.sock))
        now = time.monotonic()
        if link not in self._open and self._resumed_at.get(link, 0.0) + LATE_S <= now:
            self._begin(link, "control connection missed by the peer").wanted = True
            self._loop.call(partial(self._look, link))

    def on_resumed(self, link: PeerLink) -> None:
        """A link's control connection goes on over another socket."""
        self.forget(link)
        self._resumed_at[link] = time.monotonic()
        self._tally.count("control_resumes")
        logger.info("the control connection with %s goes on over another socket", link.name)

    def forget(self, link: PeerLink) -> None:
        """A link has ended, or is whole again."""
        self._open.pop(link, None)
        self._resumed_at.pop(link, None)
        self._num_done.pop(link, None)
        self._num_failures.pop(link, None)

    @property
    def is_busy(self) -> bool:
        """Whether a control connection is missed."""
        return bool(self._open)

    def tick(self, link: PeerLink, now: float) -> None:
        """Look after a link's control connection. At every tick."""
        link.control.tick(now)
        resumption = self._open.get(link)
        if resumption is not None:
            self._go_on(link, resumption, now)
        elif link.alive and link.control.is_silent(now, SILENT_S):
            self._begin(link, "control connection silent")
        elif link.alive:
            self._ask_after_failures(link)

    def _ask_after_failures(self, link: PeerLink) -> None:
        """What a rail has met may have met an idle control connection too."""
        num_failures = link.num_failures
        if self._num_failures.setdefault(link, num_failures) != num_failures:
            self._num_failures[link] = num_failures
            link.control.nudge()

    def _begin(self, link: PeerLink, evidence: str) -> Resumption:
        found = self._open.get(link)
        if found is None:
            logger.info("the %s with %s", evidence, link.name)
            found = Resumption(evidence=evidence, timeout_s=self._timeout_s)
            found.add(self._ways(link))
            self._open[link] = found
        return found

    def _look(self, link: PeerLink) -> None:
        resumption = self._open.get(link)
        if resumption is not None:
            self._go_on(link, resumption, time.monotonic())

    def _go_on(self, link: PeerLink, resumption: Resumption, now: float) -> None:
        if not self._is_missed(link, resumption, now):
            self.forget(link)
            return
        num_done = link.num_slices_done
        if self._num_done.setdefault(link, num_done) != num_done:
            self._num_done[link] = num_done
            resumption.progressed(now)
        for idx, way in resumption.due(now):
            if self._open.get(link) is not resumption:
                return  # what was said at once was enough
            self._rendezvous.dial(
                way.target,
                Purpose.RESUME,
                name=link.name,
                source=way.source,
                on_outcome=partial(self._on_outcome, link, resumption, idx),
            )
        self._judge(link, resumption)

    def _on_outcome(
        self, link: PeerLink, resumption: Resumption, idx: int, outcome: Outcome
    ) -> None:
        now = time.monotonic()
        is_open = self._open.get(link) is resumption
        if not isinstance(outcome, Greeted):
            refused = _is_refusal(outcome)
            resumption.failed(idx, outcome.reason, now, refused=refused)
            if is_open and refused:
                self._judge(link, resumption)
            elif is_open:
                self._loop.call(partial(self._look, link))
            return
        resumption.met(idx, now)
        if is_open and link.dialed and self._is_missed(link, resumption, now):
            resumption.agreeing(now)
            link.control.resume(outcome)
        else:
            Stream.discard(outcome.sock)

    def _is_missed(self, link: PeerLink, resumption: Resumption, now: float) -> bool:
        return (
            resumption.broken
            or resumption.wanted
            or not link.control.stands
            or link.control.is_silent(now, SILENT_S)
        )

    def _judge(self, link: PeerLink, resumption: Resumption) -> None:
        verdict = resumption.verdict(time.monotonic())
        if verdict is not None and self._open.get(link) is resumption:
            self._lose(link, verdict)


def _is_refusal(outcome: HandshakeRefused) -> bool:
    """Whether nobody listens, or who listens says no.

    A peer that does not know us any more hangs up, after it has told its name.
    """
    if isinstance(outcome, PeerUnreachable):
        return outcome.reason == REFUSED
    return outcome.reason != HANG_UP or bool(outcome.peer)

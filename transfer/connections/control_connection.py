"""The control connection of a link, which outlives the sockets it runs on.

    dialer (made the first connection)                 acceptor
      | -- a handshake with purpose `resume` ----------> |   a candidate: nothing changes yet
      | -- RESUMED(frames received) -------------------> |   takes it, leaves the old socket
      | <------------------- RESUMED(frames received) -- |
      | <== both send again what the other has missed ==>|

The handshake is proved with the session key of the first one, so who knows the cluster secret and
the name, but did not take part in that, cannot take over a link. An acceptor that misses its
connection calls too, see `transfer.connections.resumption`.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from transfer.connections.control_log import ControlLog, Frame
from transfer.connections.keepalive import keep_alive
from transfer.connections.negotiation import Greeted
from transfer.connections.stream import Stream
from transfer.errors import ProtocolViolation
from transfer.event_loop import EventLoop
from transfer.statistics import Tally
from transfer.wire import ControlKind, ControlParser, encode_control

RECEIVE_BYTES: Final = 256 << 10
# What a peer sent before its end, or before a change of sockets, is read in up to so many reads.
LAST_READS_MAX: Final = 64
CANDIDATES_MAX: Final = 16
CANDIDATE_S: Final = 5.0
COUNT: Final = struct.Struct("<Q")


class _Wire:
    """One socket, with what was read of its next frame."""

    def __init__(self, stream: Stream, parser: ControlParser) -> None:
        self.stream = stream
        self.parser = parser
        self.opened_at = time.monotonic()


class ControlConnection:
    """Frames both ways, in order, each exactly once. On the engine's thread, but for `send`.

    Args:
        greeted: the first socket.
        frame_bytes_max: of the content of a frame, and of what may wait before `send` does.
        on_frame: gets the frames, (kind, content).
        on_broken: the socket is over, with the evidence; `resume` or `offer` another one.
        on_nonsense: the peer sends what no peer sends; the connection is of no use any more.
        on_resumed: goes on over another socket.

    Attributes:
        closed: it is over for good.
    """

    def __init__(
        self,
        greeted: Greeted,
        loop: EventLoop,
        tally: Tally,
        *,
        frame_bytes_max: int,
        on_frame: Callable[[ControlKind, bytes], None],
        on_broken: Callable[[str], None],
        on_nonsense: Callable[[str], None],
        on_resumed: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._tally = tally
        self._frame_bytes_max = frame_bytes_max
        self._on_frame = on_frame
        self._on_broken = on_broken
        self._on_nonsense = on_nonsense
        self._on_resumed = on_resumed
        self._changed = threading.Condition()
        self._log = ControlLog(frame_bytes_max)
        # The one that carries frames; the one that waits for the acceptor's word; those offered.
        self._wire: _Wire | None = self._make_wire(greeted)
        self._pending: _Wire | None = None
        self._candidates: list[_Wire] = []
        self._leaving = False
        self.closed = False

    def open(self) -> None:
        """Start to receive."""
        assert self._wire is not None, "opened once, at first"
        self._wire.stream.open()

    @property
    def stands(self) -> bool:
        """Whether there is a socket that carries frames."""
        return self._wire is not None

    @property
    def full(self) -> bool:
        """Whether the peer is far behind with confirming what was sent."""
        return self._log.is_full

    @property
    def flooded(self) -> bool:
        """Whether it is so far behind that nothing more can be kept for it."""
        return self._log.is_flooded

    def send(self, frame: Frame, *, deadline: float | None = None) -> bool:
        """Send a frame now, or over the next socket. Any thread.

        With a `deadline` (`time.monotonic`) the call waits while the peer is far behind;
        without one it never waits.

        Returns:
            False if the connection is over, or the peer was too far behind: nothing is sent.
        """
        with self._changed:
            while deadline is not None and self._log.is_full and not self.closed:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    return False
            if self.closed:
                return False
            self._log.append(frame, time.monotonic())
            self._loop.stir()
            if self._wire is not None:
                self._wire.stream.send(frame)
            return True

    @property
    def is_busy(self) -> bool:
        """Whether something is not confirmed, or the connection is being made again."""
        log = self._log
        return log.is_waiting or log.owes_word or bool(self._candidates) or not self.stands

    def tick(self, now: float) -> None:
        """Confirm what has come, forget candidates that say nothing. At every tick."""
        self._confirm()
        for wire in [w for w in self._candidates if w.opened_at + CANDIDATE_S <= now]:
            self._drop(wire)

    def nudge(self) -> None:
        """Let the peer have something to confirm, so that silence will tell."""
        if not self._log.is_waiting:
            self.send(encode_control(ControlKind.NUDGE, b""))

    def is_silent(self, now: float, patience_s: float) -> bool:
        """Whether the peer has confirmed nothing for so long, of what was sent to it."""
        return self._log.is_silent(now, patience_s)

    def resume(self, greeted: Greeted) -> None:
        """Go on over a socket that we have made, once the peer agrees."""
        self._leave()
        if self.closed:
            Stream.discard(greeted.sock)
            return
        if self._pending is not None:
            self._pending.stream.close()
        wire = self._pending = self._make_wire(greeted)
        wire.stream.open()
        self._say_resumed(wire)

    def offer(self, greeted: Greeted) -> None:
        """Let the peer go on over a socket that it has made, if it says that it will."""
        while len(self._candidates) >= CANDIDATES_MAX:
            self._drop(self._candidates[0])
        wire = self._make_wire(greeted)
        self._candidates.append(wire)
        # Once the last word of the handshake is out.
        self._loop.call(lambda: self._open(wire))

    def read_to_the_end(self) -> None:
        """Take what the peer has sent before its end."""
        for _ in range(LAST_READS_MAX):
            if self._wire is None or not self._read(self._wire):
                break

    def close(self) -> None:
        """Close; idempotent. Whoever waits in `send` returns."""
        with self._changed:
            self.closed = True
            wires = self._wires()
            self._wire = self._pending = None
            self._candidates.clear()
            self._changed.notify_all()
        for wire in wires:
            wire.stream.close()

    def abandon(self) -> None:
        """Close the descriptors only: the way out after a fork."""
        for wire in self._wires():
            wire.stream.sock.close()

    def _wires(self) -> list[_Wire]:
        return [w for w in (self._wire, self._pending, *self._candidates) if w is not None]

    def _make_wire(self, greeted: Greeted) -> _Wire:
        keep_alive(greeted.sock)
        stream = Stream(
            greeted.sock,
            self._loop,
            on_readable=lambda: self._read_some(wire),
            on_broken=lambda evidence: self._on_wire_broken(wire, evidence),
            outbox_bytes_max=self._frame_bytes_max,
        )
        wire = _Wire(stream, ControlParser(self._frame_bytes_max))
        return wire

    def _open(self, wire: _Wire) -> None:
        if wire in self._candidates:
            wire.stream.open()

    def _read_some(self, wire: _Wire) -> None:
        self._read(wire)

    def _read(self, wire: _Wire) -> bool:
        """Read once; whether there was something."""
        stream = wire.stream
        if stream.closed:
            return False
        try:
            data = stream.sock.recv(RECEIVE_BYTES)
            if not data:
                stream.broken("closed by the other side")
                return False
            for kind, content in wire.parser.feed(data):
                self._take(wire, kind, content)
        except BlockingIOError:
            return False
        except ProtocolViolation as error:
            self._refuse(wire, error.problem)
            return False
        except OSError as error:
            stream.broken(f"broke: {error.strerror or error}")
            return False
        return True

    def _take(self, wire: _Wire, kind: ControlKind, content: bytes) -> None:
        if kind is ControlKind.RESUMED:
            self._take_over(wire, content)
        elif wire is not self._wire:
            if not self.closed:
                raise ProtocolViolation(f"{kind.name.lower()} on a socket that is not in use")
        elif kind is ControlKind.CONFIRMED:
            with self._changed:
                self._log.confirm(_parse_count(content), time.monotonic())
                self._changed.notify_all()
        else:
            self._log.receive(len(content))
            if kind is not ControlKind.NUDGE:
                self._on_frame(kind, content)
            if self._log.owes_word_soon:
                self._confirm()

    def _confirm(self) -> None:
        wire = self._wire
        # Who takes none of our words is told again at the next tick.
        if wire is not None and self._log.owes_word and not wire.stream.outbox_bytes:
            count = COUNT.pack(self._log.tell())
            wire.stream.send(encode_control(ControlKind.CONFIRMED, count))

    def _take_over(self, wire: _Wire, content: bytes) -> None:
        if wire is not self._pending and wire not in self._candidates:
            raise ProtocolViolation("resumed twice")
        num_received = _parse_count(content)
        if wire in self._candidates:
            self._leave()
            if self.closed:
                return
            self._candidates.remove(wire)
            self._say_resumed(wire)
        self._pending = None
        with self._changed:
            self._log.confirm(num_received, time.monotonic())
            self._wire = wire
            for frame in self._log.unconfirmed():
                wire.stream.send(frame)
            self._changed.notify_all()
        self._on_resumed()

    def _say_resumed(self, wire: _Wire) -> None:
        count = COUNT.pack(self._log.tell())
        wire.stream.send(encode_control(ControlKind.RESUMED, count))

    def _leave(self) -> None:
        """Take what has come over the old socket, and close it: what comes later comes again."""
        self._leaving = True
        self.read_to_the_end()
        self._leaving = False
        with self._changed:
            wire, self._wire = self._wire, None
        if wire is not None:
            wire.stream.close()

    def _drop(self, wire: _Wire) -> None:
        self._candidates.remove(wire)
        wire.stream.close()

    def _refuse(self, wire: _Wire, problem: str) -> None:
        """Nonsense ends the connection, but only if it comes from whom it is with."""
        self._tally.count("malformed")
        if wire in self._candidates:
            self._drop(wire)
        else:
            self._on_nonsense(problem)

    def _on_wire_broken(self, wire: _Wire, evidence: str) -> None:
        with self._changed:
            in_use = wire is self._wire or wire is self._pending
            self._wire = None if wire is self._wire else self._wire
            self._pending = None if wire is self._pending else self._pending
        if wire in self._candidates:
            self._candidates.remove(wire)
        if in_use and not self._leaving:
            self._on_broken(evidence)


def _parse_count(content: bytes) -> int:
    if len(content) != COUNT.size:
        raise ProtocolViolation(f"a count of {len(content)} bytes")
    count: int = COUNT.unpack(content)[0]
    return count

"""Lanes: the requester's end of one data connection, compiled or in Python.

A lane sends requests in order and takes the replies, which come in the same order. It knows
nothing of peers and retries. `PythonLane` and the compiled `Lane` pass the same tests.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, cast

from transfer import native
from transfer.backends.python_lane import Finished, PythonLane, python_progress
from transfer.connections.congestion import UNPACED, set_congestion
from transfer.connections.tls_socket import TlsSocket
from transfer.pieces import Ints

LOCAL_BUFFER_BYTES: Final = 1 << 20


class LaneLike(Protocol):
    """What `PythonLane` and the compiled lane have in common. Thread-safe.

    Attributes:
        urgent: whether bulk gives way to its requests, where it is compiled. Set before the first.
    """

    urgent: bool

    @property
    def evidence(self) -> str | None:
        """Why it can be used no more; None if it can."""

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""

    @property
    def leader(self) -> int:
        """Identity of the thread that leads it, 0 = none."""

    @property
    def unsent(self) -> bool:
        """Whether something waits until the kernel takes it."""

    def post(
        self,
        item: object,
        header: bytes,
        writes: bool,
        base: int,
        ours: Ints,
        theirs: Ints,
        lengths: Ints,
        note: bytes = b"",
        /,
    ) -> bool:
        """Send a request; never blocks.

        Args:
            item: comes back when it is answered.
            header: `REQUEST`.
            writes: whether the pieces are sent, or received with the reply.
            base: address that `ours` count from; the memory is the caller's.
            ours: [N] int64.
            theirs: [N] int64, offsets in the peer's window.
            lengths: [N] int64, the header's `nbytes` in all.
            note: follows the pieces of a write.

        Returns:
            False if the lane is broken or closed: nothing was sent.

        Raises:
            ValueError: the pieces or the note are not those of the header.
        """

    def bind(self, epoll: int, change: Callable[[int], None], /) -> None:
        """The epoll waits for it to be readable; `change` makes it wait for something else."""

    def unbind(self) -> None:
        """No epoll waits for it any more."""

    def claim(self) -> bool:
        """Begin to lead, in the calling thread; False if another one does, or nothing is under way.

        The epoll waits for nothing then.
        """

    def leave(self, leader: int, /) -> bool:
        """End this lead (0: nobody's): the engine's thread sees to what is under way.

        Returns:
            True if it does not yet, but should soon: most likely the next one to wait will.
        """

    def attend(self) -> None:
        """Have the engine's thread see to it, if nobody leads."""

    def gives_way(self) -> bool:
        """Whether it carries bulk that should leave the core to what is urgent now.

        Then nobody sees to it until `attend`.
        """

    def watch_all(self) -> None:
        """Have the engine's thread see to it."""

    def attend_to_posted(self) -> bool:
        """Something was posted; returns whether the engine's thread should see to it soon."""

    def close(self) -> list[object]:
        """Reset the connection; idempotent. No memory is touched after the return.

        Returns:
            Items that were not answered.
        """

    def abandon(self) -> None:
        """Close the descriptor only, touching no lock: the way out after a fork."""

    def fileno(self) -> int:
        """The socket; -1 once closed."""


def tune(sock: socket.socket) -> None:
    """Suit a connection within this host to it; one over a network is left as the system has it.

    What is in flight between two processes of a host should fit into its cache, and a message of
    1 MiB into what is in flight: then it is sent by one call. So the kernel, which doubles what is
    asked for, has 2 MiB for each direction. Over a network that would cut the window.

    Where the system's algorithm is BBR, its model and its pacing cost a third of the processor
    time of a transfer; what it is here was chosen before it was connected (`congestion.py`).
    """
    local = sock.family == socket.AF_UNIX
    if not local:
        peer = sock.getpeername()[0]
        local = peer == sock.getsockname()[0] or peer.startswith("127.") or peer == "::1"
    if local:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_BUFFER_BYTES)
    if local and sock.family != socket.AF_UNIX:
        set_congestion(sock, UNPACED)


Progress = Callable[[Sequence[LaneLike], float], list[Finished]]


class LaneKind(NamedTuple):
    """A kind of lanes: `progress` moves the bytes of those that `make` has made, and no others."""

    make: Callable[[socket.socket], LaneLike]
    progress: Progress


def _python_lane(sock: socket.socket) -> LaneLike:
    return PythonLane(sock if isinstance(sock, TlsSocket) else sock.detach())


def _compiled_lane(sock: socket.socket) -> LaneLike:
    assert native.compiled is not None
    return cast("LaneLike", native.compiled.Lane(sock.detach()))


PYTHON: Final = LaneKind(_python_lane, cast("Progress", python_progress))
COMPILED: Final = (
    PYTHON if native.compiled is None else LaneKind(_compiled_lane, native.compiled.progress)
)


def lane_kind(sock: socket.socket) -> LaneKind:
    """Return the lanes for a socket and others like it: encrypted ones are read in Python."""
    return PYTHON if isinstance(sock, TlsSocket) else COMPILED

"""What a control connection owes its peer, over all the sockets it has run on. Pure.

Both sides count the frames that are to be kept, from 1 on, in either direction; the number of a
frame is its place in that order and is never sent. The receiver confirms how many it has. When
one socket takes over from another, each side says so once more, and the other sends again what
is missing:

    sent        1 2 3 4 5 6 7 8 9
    confirmed   |-----|                     3: forgotten
    log               |---------|           4 to 9: kept for the next socket
    received    |---------|                 5, as told over the new socket
    sent again            |-----|           6 to 9

So no frame is lost and none is delivered twice. The log is bounded by who asks `is_full`.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from transfer.errors import ProtocolViolation

Frame = tuple[bytes, bytes]


class ControlLog:
    """Frames that the other side has not confirmed, and how many of its own have come.

    Not thread-safe; `now` in seconds, monotonic.

    Args:
        bytes_max: what may wait before `is_full`; one frame more is taken.

    Attributes:
        num_received: frames that have come, over all sockets.
        progressed_at: when the other side last confirmed something, or the first frame of an
            empty log was sent.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._num_confirmed = 0
        self._bytes_received = 0
        self._num_told = 0
        self.num_received = 0
        self.progressed_at = 0.0

    @property
    def num_sent(self) -> int:
        """Frames that were sent, over all sockets."""
        return self._num_confirmed + len(self._frames)

    @property
    def is_full(self) -> bool:
        """Whether who can wait should."""
        return self._bytes > self._bytes_max

    @property
    def is_flooded(self) -> bool:
        """Whether even what cannot wait is too much: the other side takes nothing."""
        return self._bytes > 2 * self._bytes_max + (1 << 20)

    def append(self, frame: Frame, now: float) -> None:
        """Keep a frame that is sent now, or as soon as there is a socket."""
        if not self._frames:
            self.progressed_at = now
        self._frames.append(frame)
        self._bytes += sum(map(len, frame))

    def confirm(self, num_received: int, now: float) -> None:
        """The other side has so many frames of ours.

        Raises:
            ProtocolViolation: it cannot.
        """
        if not self._num_confirmed <= num_received <= self.num_sent:
            raise ProtocolViolation(
                f"{num_received} frames confirmed, of {self._num_confirmed} to {self.num_sent}"
            )
        if num_received > self._num_confirmed:
            self.progressed_at = now
        for frame in islice(self._frames, num_received - self._num_confirmed):
            self._bytes -= sum(map(len, frame))
        for _ in range(num_received - self._num_confirmed):
            self._frames.popleft()
        self._num_confirmed = num_received

    def unconfirmed(self) -> list[Frame]:
        """Return what the next socket has to carry first."""
        return list(self._frames)

    def receive(self, nbytes: int) -> None:
        """Count a frame of the other side's, just before it is acted upon."""
        self.num_received += 1
        self._bytes_received += nbytes

    @property
    def owes_word(self) -> bool:
        """Whether the other side does not know about all that has come."""
        return self._num_told < self.num_received

    @property
    def owes_word_soon(self) -> bool:
        """Whether it may be waiting for room because of that."""
        return self._bytes_received > self._bytes_max // 4

    def tell(self) -> int:
        """Return what is to be confirmed to the other side now."""
        self._bytes_received = 0
        self._num_told = self.num_received
        return self.num_received

    @property
    def is_waiting(self) -> bool:
        """Whether something is unconfirmed."""
        return bool(self._frames)

    def is_silent(self, now: float, patience_s: float) -> bool:
        """Whether the other side has not confirmed anything for too long."""
        return bool(self._frames) and now - self.progressed_at > patience_s

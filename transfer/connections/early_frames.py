"""Frames of a peer that is ready for us before we are for it.

    dialer                                        acceptor
      | -- signal connection: its last proof -----> |   ready: its own `connect` returns, if it
      | <-- the last word of the handshake -------- |   called us at once, and it may send
      | <-- NOTIFY, over the control connection --- |
    ready, once it has read the last word

Nothing orders the two connections, so what comes first waits here for the other.
"""

from __future__ import annotations

from typing import Final

from transfer.wire import ControlKind

EARLY_BYTES_MAX: Final = 16 << 20
# What belongs to becoming ready, and the end: they are heard at once.
AT_ONCE: Final = (ControlKind.VERBS, ControlKind.GOODBYE)
FRAME_BYTES: Final = 128  # counted for each, beside its content


class EarlyFrames:
    """Keeps them in order, up to a bound. On the engine's thread."""

    __slots__ = ("_frames", "_nbytes")

    def __init__(self) -> None:
        self._frames: list[tuple[ControlKind, bytes]] = []
        self._nbytes = 0

    def keep(self, kind: ControlKind, content: bytes) -> bool:
        """Keep a frame for later; False if it is too much."""
        self._nbytes += len(content) + FRAME_BYTES
        if self._nbytes > EARLY_BYTES_MAX:
            return False
        self._frames.append((kind, content))
        return True

    def take_all(self) -> list[tuple[ControlKind, bytes]]:
        """Return what was kept, and keep it no more."""
        frames, self._frames, self._nbytes = self._frames, [], 0
        return frames

"""What takes the messages of an exchange from member to member."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from dispatch.layout import Bytes
from dispatch.message import Stamp

Size = Callable[[int], int]  # position of a member -> bytes
Write = Callable[[int, Bytes], int]  # position of a member, its part of a buffer -> bytes


class Carrier(Protocol):
    """Takes the messages of one phase to the other members, and theirs to this one."""

    def send(self, stamp: Stamp, size: Size, write: Write, *, due: Size | None = None) -> None:
        """Send one message to every other member.

        Args:
            stamp: Of the messages.
            size: Tells the size of the message for the member at a position.
            write: Assembles it.
            due: Tells the size of the message from a member, where it is known beforehand.

        Raises:
            PassFailed.
        """
        ...

    def receive(
        self, stamp: Stamp, shared: bytes, timeout_s: float | None = None
    ) -> Mapping[int, Bytes]:
        """Wait for the message of every other member.

        Args:
            stamp: Of the messages.
            shared: What their headers have in common.
            timeout_s: Longest time to wait in all; default: as long as messages keep arriving.

        Returns:
            Position of each other member -> its message; valid until the next phase of this
            microbatch has been sent.

        Raises:
            PassFailed.
            MessageMismatch: A message is not as it should be.
        """
        ...

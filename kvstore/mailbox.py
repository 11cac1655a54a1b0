"""Notes from a client to a node of the same host without waking the node.

    client                             node
      │ note ─▶ mailbox (node's memory)  │        a copy; the node's processor takes no part
      │ Store ─▶ master                  │
      │                                  ├─ somebody looks at its index: takes all notes first

The memory is the node's: what was left there stays if the client is killed at once. Each client has
a mailbox of its own, and notes have stamps, so that the node takes those of all in their order.
Stamps are compared only between processes with one clock (see `clock_name`). Without the compiled
part (`kvstore/compiled/mailbox.c`) there are no mailboxes, and notes are sent.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kvstore import copying

if TYPE_CHECKING:
    from transfer.prepared import InPlace

MAILBOX_BYTES: Final = 1 << 20  # some 25,000 blocks of batches, or 14,000 single ones
GREETING_OFFSET: Final = 136  # bytes that mean nothing: writing them maps the mailbox
GREETING_BYTES: Final = 8
_CLOCK: Final = "/proc/self/ns/time"


def is_available() -> bool:
    """Tell whether this process can leave and take notes."""
    return copying.compiled is not None


def clock_name() -> str:
    """Name the monotonic clock; processes of one host that call it the same share it."""
    try:
        return os.readlink(_CLOCK)
    except FileNotFoundError:  # a kernel without time namespaces
        return ""


class Outbox:
    """A client's end of a mailbox. Thread-safe.

    Args:
        mapped: The mailbox.

    Attributes:
        address: Of the mailbox here.
        nbytes: Its size.
    """

    def __init__(self, mapped: InPlace) -> None:
        assert copying.compiled is not None
        self._mapped = mapped
        self._leave = copying.compiled.mailbox_leave
        self.address = mapped.array.ctypes.data
        self.nbytes = len(mapped.array)

    @property
    def live(self) -> bool:
        """Whether the node is there."""
        return self._mapped.live

    def leave(self, note: bytes) -> bool:
        """Leave a note; False if it has to be sent, as there is no room or the node is gone."""
        if not self._mapped.live:
            return False
        left: bool = self._leave(self.address, self.nbytes, note)
        return left

"""What masters say of pins that came or went after their blocks were written."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from kvstore.wire.messages import PinChanges

logger = logging.getLogger(__name__)

NUMBERS_MAX: Final = 64  # more than masters: each is to find its last one


class PinnedSegment(Protocol):
    """Where blocks are pinned."""

    def set_pinned(self, offset: int, key: bytes, *, pinned: bool) -> None:
        """Remember so of a block, if it is still there."""


class HeardPins:
    """Not thread-safe.

    Attributes:
        segments: The node's, by number.
    """

    def __init__(self) -> None:
        self.segments: Sequence[PinnedSegment] = ()
        self._numbers: deque[int] = deque(maxlen=NUMBERS_MAX)

    @property
    def numbers(self) -> list[int]:
        """Name what was heard, for the masters to say no more."""
        return list(self._numbers)

    def heed(self, changes: PinChanges | None) -> None:
        """Remember which blocks are pinned now; what makes no sense is left out."""
        if changes is None:
            return
        self._numbers.append(changes.number)
        columns = (changes.segments, changes.offsets, changes.keys, changes.hard)
        for segment, offset, key, hard in zip(*columns, strict=False):
            if 0 <= segment < len(self.segments):
                self.segments[segment].set_pinned(offset, key, pinned=hard)
            else:
                logger.warning("a pin in segment %s, which there is not", segment)

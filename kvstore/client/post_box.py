"""A client's end of posted puts: stored as soon as they are in memory that the master reads.

    put ─▶ claim the key ─▶ copy, checksum, note to the node ─▶ post ─▶ stored
             │ taken, or may be                                  │ the master decides itself
             └────────────────────────▶ ask the master ◀─────────┘

The master of this host lends the memory (`kvstore/master/posts.py` says why a post counts). Without
it, as on another host or without a compiled part, all puts are asked for.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvstore import copying
from kvstore.mailbox import clock_name
from transfer import TransferError

if TYPE_CHECKING:
    from kvstore._native import PostBox

logger = logging.getLogger(__name__)

BORROW_S: Final = 0.1  # a master is not waited for longer
AGAIN_S: Final = 1.0  # after a loan that was over, or one that there was not
LENT: Final = 4  # taken keys, posts, an eventfd, the master's process
NEVER: Final = 0  # as a generation, as `kvstore/compiled/post_box.c` has it: not posted to


class PostBoxes:
    """The box at the master that leads now, if there is one. Thread-safe.

    Args:
        borrow: Returns the descriptors that the master lends, within so many seconds; none if it
            lends nothing. May raise TransferError.

    Attributes:
        box: What puts are posted to; None: they are asked for.
    """

    def __init__(self, borrow: Callable[[float], list[int]]) -> None:
        self._borrow = borrow
        self._lock = threading.Lock()
        self._serials = itertools.count(1)  # a place of an earlier box is not posted to a later one
        self._next_try_s = 0.0
        self._closed = copying.compiled is None
        self.box: PostBox | None = None

    def known_generation(self) -> int:
        """As `generation`, without asking for a box."""
        box = self.box
        return NEVER if box is None else box.generation()

    def generation(self) -> int:
        """Return of what generation places are that the master is asked for after this.

        Asks for a box first if there is none, now and then.
        """
        found = self.known_generation()
        if found != NEVER or self._closed or time.monotonic() < self._next_try_s:
            return found
        if not self._lock.acquire(blocking=False):
            return NEVER  # another thread is at it
        try:
            self._next_try_s = time.monotonic() + AGAIN_S
            self.box = None if self._closed else self._open()
            return NEVER if self.box is None else self.box.generation()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Post nothing more. What was posted counts. Idempotent."""
        with self._lock:
            self._closed = True
            self.box = None

    def _open(self) -> PostBox | None:
        compiled = copying.compiled
        assert compiled is not None
        try:
            lent = self._borrow(BORROW_S)
        except TransferError as error:
            logger.debug("nothing is lent: %s", error)
            return None
        try:
            if len(lent) != LENT:
                return None
            box: PostBox = compiled.PostBox(*lent, clock_name().encode(), next(self._serials))
            return box
        except (OSError, ValueError) as error:
            logger.warning("what the master lent is of no use: %s", error)
            return None
        finally:
            for descriptor in lent:
                os.close(descriptor)

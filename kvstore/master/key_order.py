"""The keys of an index in their order, page by page, without sorting all of them at once.

    keys   |------- told -------|==== window, sorted ====|.... not looked at ....|
                                ^ after                  ^ end

One pass over the index picks the keys of a window behind `after`, and only these are sorted; the
pages in it cost nothing more. Keys are hashes, so a window's end is guessed from how many there
are, and widened if it was guessed too near.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Collection
from typing import Final

from kvstore.keys import KEY_BYTES

WINDOW_KEYS: Final = 1 << 15
_SPACE: Final = 1 << (8 * KEY_BYTES)
_WIDENINGS_MAX: Final = 4


class KeyOrder:
    """A sorted window over the keys of an index. Not thread-safe.

    What came into the index since its window was made is not told (a later listing tells it); what
    left is not told either, as the caller looks up each key.

    Args:
        keys: Returns all keys, in no order.
        window_keys: About how many are sorted at once.
    """

    def __init__(
        self, keys: Callable[[], Collection[bytes]], *, window_keys: int = WINDOW_KEYS
    ) -> None:
        self._keys = keys
        self._window_keys = window_keys
        self._window: list[bytes] = []
        self._start = b""  # the window has all keys in (start, end] that there were
        self._end = b""
        self._is_last = False

    def after(self, key: bytes, limit: int) -> tuple[list[bytes], bool]:
        """Return the next keys behind one, at most `limit`, and whether there are more.

        Args:
            key: b"" is before all; a listing from there sees the index as it is now.
            limit: At least 1.
        """
        assert limit > 0, limit
        first = bisect_right(self._window, key)
        in_window = self._start <= key <= self._end and key != b""
        if not in_window or (len(self._window) - first < limit and not self._is_last):
            self._look(key, limit)
            first = 0
        page = self._window[first : first + limit]
        return page, not self._is_last or first + limit < len(self._window)

    def forget(self) -> None:
        """Free the window."""
        self._window, self._start, self._end, self._is_last = [], b"", b"", False

    def _look(self, key: bytes, limit: int) -> None:
        keys = self._keys()
        wanted = max(self._window_keys, limit)
        start = int.from_bytes(key, "big") if key else 0
        span = min(_SPACE, _SPACE * wanted // max(1, len(keys)) + 1)
        for _ in range(_WIDENINGS_MAX):
            end = min(start + span, _SPACE - 1).to_bytes(KEY_BYTES, "big")
            found = [name for name in keys if key < name <= end]
            is_last = start + span >= _SPACE - 1
            if is_last or len(found) >= limit:
                break
            span *= 8
        else:  # these are no hashes: sort out the nearest
            found = heapq.nsmallest(wanted + 1, (name for name in keys if name > key))
            is_last = len(found) <= wanted
            found = found[:wanted]
            end = found[-1] if found else key
        found.sort()
        self._window, self._start, self._end, self._is_last = found, key, end, is_last

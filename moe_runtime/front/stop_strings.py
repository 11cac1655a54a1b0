"""Stop strings, found across any borders of the pieces that text comes in.

Text that may be the beginning of a stop string is held back, so no part of one is ever given
out. Of several stop strings the one that ends first wins, and of those the longest; that does not
depend on how the text was cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """Looks for stop strings in one text.

    Args:
        stops: None of them empty.
        include: The stop string itself is given out too.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "a stop string is empty"
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what can be given out. After `found` is set it returns nothing."""
        if self.found is not None:
            return ""
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, self.found = match
            self._held = ""
            return text[: start + len(self.found)] if self._include else text[:start]
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """End the text; returns what was held back in vain."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        matches = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in matches if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

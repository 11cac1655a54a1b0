"""Blocks that go together: evicted, pinned and removed as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

NO_GROUP: Final = 0


class GroupBook:
    """Groups of the tenants' blocks, by number. A group ends with its last block.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}
        self._labels: dict[int, tuple[int, str]] = {}
        self._keys: dict[int, dict[bytes, None]] = {}  # in the order of entry
        self._last_number = NO_GROUP

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def enter(self, tenant: int, label: str, key: bytes) -> int:
        """Take a new block into a group; return the group's number."""
        if not label:
            return NO_GROUP
        number = self._numbers.get((tenant, label))
        if number is None:
            self._last_number += 1
            number = self._last_number
            self._numbers[(tenant, label)] = number
            self._labels[number] = (tenant, label)
            self._keys[number] = {}
        self._keys[number][key] = None
        return number

    def leave(self, number: int, key: bytes) -> None:
        """Take a block that is gone out of its group."""
        if number == NO_GROUP:
            return
        keys = self._keys[number]
        del keys[key]
        if not keys:
            del self._keys[number]
            del self._numbers[self._labels.pop(number)]

    def number(self, tenant: int, label: str) -> int:
        """Return the number of a group; NO_GROUP if it has no block."""
        return self._numbers.get((tenant, label), NO_GROUP)

    def label(self, number: int) -> str:
        """Return a group's name."""
        return self._labels[number][1] if number != NO_GROUP else ""

    def keys(self, number: int) -> list[bytes]:
        """Return the blocks of a group."""
        return list(self._keys.get(number, ()))

"""key -> row: the dictionary of the master's blocks, compiled where there is a C compiler.

A dictionary of Python keeps key, hash and row of each entry (75 bytes and more), makes itself twice
as large as it must be while keys come and go, and stands still for 45 ms when it does so with a
million of them. The compiled one keeps 32 bits of the hash and the row: the key is in the owner's
column. It takes 11 to 16 bytes a key, and is enlarged in 10 ms.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, overload

from kvstore import row_loops


class KeyIndexLike(Protocol):
    """A row for each key; the owner's list has the key of every row in it. Not thread-safe."""

    def __len__(self) -> int: ...
    def __contains__(self, key: bytes, /) -> bool: ...
    def __getitem__(self, key: bytes, /) -> int: ...
    def __setitem__(self, key: bytes, row: int, /) -> None: ...
    def __delitem__(self, key: bytes, /) -> None: ...
    @overload
    def get(self, key: bytes, /) -> int | None: ...
    @overload
    def get(self, key: bytes, default: int, /) -> int: ...
    def setdefault(self, key: bytes, row: int, /) -> int:
        """Enter a key that is not there; return its row then."""

    def claim(self, keys: list[bytes], rows: list[int], /) -> list[int]:
        """Enter keys; return the positions of those that had another row already."""

    def drop(self, keys: Sequence[bytes], /) -> None:
        """Take keys out, all of which are there."""

    def has_any(self, keys: Collection[bytes], /) -> bool:
        """Tell whether one of them is there."""

    def rows(self) -> list[int]:
        """Return all rows, in no order."""


class PlainKeyIndex(dict[bytes, int]):
    """Without the compiled part a dictionary, which keeps the keys itself."""

    def __init__(self, keys: list[bytes]) -> None:
        super().__init__()
        del keys

    def claim(self, keys: list[bytes], rows: list[int], /) -> list[int]:
        """See `KeyIndexLike`."""
        return row_loops.claim(self, keys, rows)

    def drop(self, keys: Sequence[bytes], /) -> None:
        """See `KeyIndexLike`."""
        row_loops.drop(self, keys)

    def has_any(self, keys: Collection[bytes], /) -> bool:
        """See `KeyIndexLike`."""
        return not self.keys().isdisjoint(keys)

    def rows(self) -> list[int]:
        """See `KeyIndexLike`."""
        return list(self.values())


def make_key_index(keys: list[bytes]) -> KeyIndexLike:
    """Return an empty one.

    Args:
        keys: By row; the owner's. A row keeps its key as long as it is in the index.
    """
    compiled = row_loops.compiled
    index: KeyIndexLike = PlainKeyIndex(keys) if compiled is None else compiled.KeyIndex(keys)
    return index

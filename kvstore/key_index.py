"""key -> row: the dictionary of the master's blocks, compiled where there is a C compiler.

A dictionary of Python keeps key, hash and row of each entry (75 bytes and more), makes itself twice
as large as it must be while keys come and go, and stands still for 45 ms when it does so with a
million of them. The compiled one keeps 32 bits of the hash and the row: the key is in the owner's
column. It takes 11 to 16 bytes a key, and is enlarged in 10 ms.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from kvstore import row_loops

if TYPE_CHECKING:
    from kvstore._rows import KeyIndex


class PlainKeyIndex(dict[bytes, int]):
    """Without the compiled part a dictionary, which keeps the keys itself.

    What it has beyond one the compiled index has as well. Not thread-safe.
    """

    def __init__(self, keys: list[bytes]) -> None:
        super().__init__()
        del keys

    def claim(self, keys: list[bytes], rows: list[int], /) -> list[int]:
        """Enter keys; return the positions of those that had another row already."""
        return row_loops.claim(self, keys, rows)

    def drop(self, keys: Sequence[bytes], /) -> None:
        """Take keys out, all of which are there."""
        row_loops.drop(self, keys)

    def has_any(self, keys: Collection[bytes], /) -> bool:
        """Tell whether one of them is there."""
        return not self.keys().isdisjoint(keys)

    def rows(self) -> list[int]:
        """Return all rows, in no order."""
        return list(self.values())


def make_key_index(keys: list[bytes]) -> KeyIndex | PlainKeyIndex:
    """Return an empty one.

    Args:
        keys: By row; the owner's. A row keeps its key as long as it is in the index.
    """
    compiled = row_loops.compiled
    return PlainKeyIndex(keys) if compiled is None else compiled.KeyIndex(keys)

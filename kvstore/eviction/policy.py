"""What every eviction policy can be told and asked."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Order of eviction of one segment's blocks, which are known to it by row only.

    A policy knows no capacity: whoever owns the space asks for a victim when there is none left.
    All operations are O(1) amortised, except the walk over `evictable`. Blocks that must stay for
    a while are *held*: they stay known, but lie in no queue, so no search meets them. Pinned
    blocks are removed, or never admitted. Not thread-safe.

    Whoever enters or uses a chain does so from its last block to its first, so that the root is
    the youngest.
    """

    def __len__(self) -> int:
        """Count the blocks that are known, held ones too."""

    def admit(self, row: int, parent: Hashable | None = None) -> None:
        """Enter a block that no policy knows, and whose name is in `EvictionRows.names`.

        Args:
            row: The block.
            parent: Name of the block before it in its chain, known here or not; None if nobody
                can tell.
        """

    def touch(self, row: int) -> None:
        """Count a use of a known block."""

    def hold(self, row: int) -> None:
        """Make a known block no victim until `unhold`. Again is nothing."""

    def unhold(self, row: int) -> None:
        """Make a held block a possible victim again, as one used just now. Else nothing."""

    def remove(self, row: int, *, evicted: bool = False) -> None:
        """Forget a known block.

        Args:
            row: The block.
            evicted: It made room for another, so that its return would tell something.
        """

    def victim(self) -> int | None:
        """Return what should go next, which stays; None if all that is known is held."""

    def evictable(self) -> Iterator[int]:
        """Yield every block that is not held, in no order that matters."""

"""What every eviction policy can be told and asked."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Order of eviction of one node's blocks, which are known to it by name only.

    A policy knows no capacity: whoever owns the space asks for a victim when there is none left.
    All operations are O(1) amortised, except the walk over `evictable`. Blocks that are leased are
    *held*: they stay known, but lie in no queue, so no search meets them. Pinned blocks are
    removed, or never admitted. Not thread-safe.

    Whoever enters or uses a chain does so from its last block to its first, so that the root is
    the youngest.
    """

    def __len__(self) -> int:
        """Count the blocks that are known, held ones too."""

    def __contains__(self, name: Hashable) -> bool:
        """Tell whether a block is known."""

    def admit(self, name: Hashable, parent: Hashable | None = None) -> None:
        """Enter a block that is not known.

        Args:
            name: The block.
            parent: The block before it in its chain, known here or not; None if nobody can tell.
        """

    def touch(self, name: Hashable) -> None:
        """Count a use of a known block."""

    def hold(self, name: Hashable) -> None:
        """Make a known block no victim until `unhold`. Again is nothing."""

    def unhold(self, name: Hashable) -> None:
        """Make a held block a possible victim again, as one used just now. Else nothing."""

    def remove(self, name: Hashable, *, evicted: bool = False) -> None:
        """Forget a block; unknown ones are ignored.

        Args:
            name: The block.
            evicted: It made room for another, so that its return would tell something.
        """

    def victim(self) -> Hashable | None:
        """Return what should go next, which stays; None if all that is known is held."""

    def evictable(self) -> Iterator[Hashable]:
        """Yield every block that is not held, in no order that matters."""

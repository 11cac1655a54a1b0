"""What every eviction policy can be told and asked."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol


class MayGo(Protocol):
    """Which blocks may go in one run of evictions."""

    def __call__(self, row: int) -> bool:
        """Tell of one."""

    def all_may(self, rows: Sequence[int]) -> bool:
        """Tell whether all of these may."""


class EvictionPolicy(Protocol):
    """Order of eviction of one segment's blocks, which are known to it by row only.

    A policy knows no capacity: whoever owns the space asks for victims when there is none left.
    All operations are O(1) amortised per block, except the walk over `evictable`. What happens to
    many blocks at once is told at once: one call costs about as much as the blocks of a batch.
    Blocks that must stay for a while are *held*: they stay known, but lie in no queue, so no
    search meets them. Pinned blocks are removed, or never admitted. Not thread-safe.

    Whoever enters or uses a chain does so from its last block to its first, so that the root is
    the youngest.
    """

    def __len__(self) -> int:
        """Count the blocks that are known, held ones too."""

    def admit(self, rows: Sequence[int], parents: Sequence[Hashable | None] = ()) -> None:
        """Enter blocks that no policy knows, and whose names are in `EvictionRows.names`.

        Args:
            rows: The blocks, in the order in which they come.
            parents: Of each the name of the block before it in its chain, known here or not; None
                if nobody can tell. Nothing: nobody can of any.
        """

    def touch(self, rows: Sequence[int]) -> None:
        """Count a use of known blocks, in this order."""

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

    def evict(self, count: int, busy: array[int], may_go: MayGo) -> list[int]:
        """Forget, as evicted, what should go next, and return it: in order, at most so many.

        Args:
            count: At least 1.
            busy: Column by row: what is not 0 there is held instead.
            may_go: The run ends before the first block that may not.
        """

    def victim(self) -> int | None:
        """Return what should go next, which stays; None if all that is known is held."""

    def evictable(self) -> Iterator[int]:
        """Yield every block that is not held, in no order that matters."""

"""What may happen to the bytes of one copy of a block.

A *block* is write-once and content-addressed: key, length and checksum never change while it is
known. A *copy* is one range of one segment, and lives like this:

              commit                 evicted, removed or bad, and nobody reads
      OPEN ───────────▶ COMMITTED ────────────────────────────────────────────┐
       │ │                  │ removed or bad, while read                      ▼
       │ │                  └──────────▶ RETIRED ── last reader ends ─────▶  FREE
       │ └── aborted, and the writer says that nothing is under way ────────▶ ▲
       │                                                                      │
       └── writer fenced, unsure, or too slow ─▶ QUARANTINED ── writer dead ──┘

Quarantined bytes may still be written by a process that was stopped in the middle of a copy, so
only the certain death of that very incarnation frees them. LOST is where all states go when the
node itself goes: the memory is no longer ours to count, though leases may still name the copy.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kvstore.errors import InvariantViolated


class CopyState(IntEnum):
    """Who may do what with the bytes; see the diagram above."""

    FREE = 0
    OPEN = 1
    COMMITTED = 2
    RETIRED = 3
    QUARANTINED = 4
    LOST = 5


FREE, OPEN, COMMITTED, RETIRED, QUARANTINED, LOST = (int(state) for state in CopyState)

_ARROWS: Final = frozenset(
    {
        (FREE, OPEN),
        (OPEN, COMMITTED),
        (OPEN, QUARANTINED),
        (OPEN, FREE),
        (COMMITTED, RETIRED),
        (COMMITTED, FREE),
        (RETIRED, FREE),
        (QUARANTINED, FREE),
        (LOST, FREE),  # the row, not the bytes
        *((state, LOST) for state in (OPEN, COMMITTED, RETIRED, QUARANTINED)),
    }
)


_IS_ARROW: Final = tuple(
    tuple((before, after) in _ARROWS for after in CopyState) for before in CopyState
)


def check_arrow(before: int, after: int, where: object) -> None:
    """Raise InvariantViolated if the diagram has no such arrow."""
    if not _IS_ARROW[before][after]:
        raise InvariantViolated(
            where=str(where), problem=f"{CopyState(before).name} -> {CopyState(after).name}"
        )

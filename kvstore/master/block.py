"""Blocks and the ranges of memory that hold them.

A *block* is write-once and content-addressed: key, length and checksum never change while it is
known. An *extent* is one range of one node's segment, and lives like this:

              commit                 evicted, removed or bad, and nobody reads
      OPEN ───────────▶ COMMITTED ────────────────────────────────────────────┐
       │ │                  │ removed or bad, while leased                    ▼
       │ │                  └──────────▶ RETIRED ── last lease ends ──────▶  FREE
       │ └── aborted, and the writer says that nothing is under way ────────▶ ▲
       │                                                                      │
       └── writer fenced, unsure, or too slow ─▶ QUARANTINED ── writer dead ──┘

A quarantined extent may still be written by a process that was stopped in the middle of a copy,
so only the certain death of that very incarnation frees it. LOST is where all states go when the
node itself goes: the memory is no longer ours to count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.errors import InvariantViolated


class ExtentState(StrEnum):
    """Who may do what with the bytes; see the diagram above."""

    OPEN = "open"
    COMMITTED = "committed"
    RETIRED = "retired"
    QUARANTINED = "quarantined"
    FREE = "free"
    LOST = "lost"


_TRANSITIONS = {
    ExtentState.OPEN: {ExtentState.COMMITTED, ExtentState.QUARANTINED, ExtentState.FREE},
    ExtentState.COMMITTED: {ExtentState.RETIRED, ExtentState.FREE},
    ExtentState.RETIRED: {ExtentState.FREE},
    ExtentState.QUARANTINED: {ExtentState.FREE},
    ExtentState.FREE: set(),
    ExtentState.LOST: set(),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Extent:
    """One range `[offset, offset + nbytes)` of a node's segment. Compared by identity."""

    node: str
    offset: int
    nbytes: int
    key: bytes
    state: ExtentState
    leases: int = 0
    used_at: int = 0  # stamp of the last use, counted by the master

    def become(self, state: ExtentState) -> None:
        """Change state, or raise InvariantViolated if the diagram has no such arrow."""
        if state is not ExtentState.LOST and state not in _TRANSITIONS[self.state]:
            raise InvariantViolated(
                where=f"extent {self.node}:{self.offset}", problem=f"{self.state} -> {state}"
            )
        self.state = state


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """A committed block and its copies, at most one per node; never without a copy."""

    key: bytes
    nbytes: int
    checksum: int
    pinned: bool = False
    replicas: dict[str, Extent] = field(default_factory=dict)

"""What an administrator is told. The JSON of the HTTP service has these names."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvstore.wire.messages import Medium, NodeAddress, TenantFigures, WriterFigures


class MasterReport(msgspec.Struct, frozen=True, kw_only=True):
    """One master. `problem` says why it did not answer; then `figures` is empty.

    `figures` are the names and values of `MasterStatistics`.
    """

    address: str
    problem: str | None
    figures: dict[str, int]


class SegmentReport(msgspec.Struct, frozen=True, kw_only=True):
    """One segment, its shares with all masters added up.

    `silent_s` and `largest_free_bytes` are the largest of any master.
    """

    node: str
    segment: int
    medium: str
    address: str
    domain: str
    capacity_bytes: int
    free_bytes: int
    largest_free_bytes: int
    blocks: int
    silent_s: float
    draining: bool


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole pool. `totals` adds up the masters that answered.

    `nodes` and `blocks` and the byte counts are of now, the other totals since masters started.
    """

    masters: list[MasterReport]
    segments: list[SegmentReport]
    totals: dict[str, int]

    @property
    def ready(self) -> bool:
        """Whether every master answered, and some node lends memory."""
        return bool(self.segments) and all(master.problem is None for master in self.masters)


class CopyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where one copy of a block lies: in which segment of which node, and where in it."""

    node: str
    address: str
    segment: int
    medium: str
    offset: int

    @property
    def where(self) -> NodeAddress:
        """The segment, as messages name it."""
        return NodeAddress(self.node, self.address, self.segment, Medium(self.medium))


class BlockReport(msgspec.Struct, frozen=True, kw_only=True):
    """One block. `key` is hexadecimal; `checksum` and `chunk_bytes` are as in `HeldBlocks`."""

    key: str
    nbytes: int
    checksum: int
    chunk_bytes: int
    pin: str
    leased: bool
    tenant: str
    group: str
    copies: list[CopyReport]


class BlockPage(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks in the order of their keys. `next_after` begins the next page; None: the end."""

    blocks: list[BlockReport]
    next_after: str | None


class TenantPage(msgspec.Struct, frozen=True, kw_only=True):
    """Tenants that are configured or use something, all masters added up."""

    tenants: list[TenantFigures]


class WriterPage(msgspec.Struct, frozen=True, kw_only=True):
    """Writers that were given places and have not said what became of them."""

    writers: list[WriterFigures]


class RebalanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many copies were planned; they are made in the background."""

    planned: int


class VerifyState(StrEnum):
    """How far a verification is."""

    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class BadCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy whose bytes are not those of its block, or that could not be read (`problem`)."""

    key: str
    node: str
    segment: int
    offset: int
    problem: str


class VerifyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to verify.

    Attributes:
        share: Of all blocks, chosen by a hash of key and seed; 1 is all.
        seed: Another one chooses other blocks.
        report: Tell the masters of corrupt copies, which drops them.
    """

    share: float = 1.0
    seed: int = 0
    report: bool = True


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a verification has found so far.

    Attributes:
        state: How far it is.
        problem: Why it failed.
        expected_copies: About how many there are to read, for progress.
        checked_copies: Read and found right or wrong.
        checked_bytes: Of these.
        gone_copies: Evicted, removed or moved while they were read: neither right nor wrong.
        bad: Wrong ones and those out of reach, at most `BAD_MAX`.
        bad_copies: How many there were.
    """

    state: VerifyState
    problem: str | None = None
    expected_copies: int = 0
    checked_copies: int = 0
    checked_bytes: int = 0
    gone_copies: int = 0
    bad: list[BadCopy] = []
    bad_copies: int = 0


BAD_MAX = 1000


class DrainState(StrEnum):
    """How a drain stands; see `kvstore/admin/drains.py`."""

    MOVING = "moving"
    WAITING = "waiting"
    CANCELLED = "cancelled"
    STUCK = "stuck"
    EMPTY = "empty"


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far a drain is.

    Attributes:
        node: Which one is drained.
        state: `stuck`: as things are it cannot end. `waiting`: only what is in use is left.
            `cancelled`: somebody did, and what is left stays.
        left_blocks, left_bytes: Still there.
        moved_blocks: Copies that went from there.
        stuck_blocks: Of those left, with nowhere to go; the next three say why.
        no_node_blocks: No other node takes blocks.
        no_domain_blocks: Each other failure domain has a copy, and so many were wanted.
        no_space_blocks: No room.
        in_use_blocks: Being read or written; they go when that ends.
        problem: The same in words; None while all that is left can move.
    """

    node: str
    state: DrainState
    left_blocks: int
    left_bytes: int
    moved_blocks: int
    stuck_blocks: int
    no_node_blocks: int
    no_domain_blocks: int
    no_space_blocks: int
    in_use_blocks: int
    problem: str | None

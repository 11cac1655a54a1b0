"""What a master answers."""

from __future__ import annotations

import msgspec

from kvstore.wire.columns import (
    Copy,
    NodeAddress,
    Pin,
    PinChanges,
    Place,
    PutOutcome,
    RefusalReason,
)
from kvstore.wire.granted import Granted


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The segment is part of the pool; `adopted` of the blocks that it held are known."""

    adopted: int


class Known(msgspec.Struct, frozen=True, tag="known"):
    """Whether the master knows this node; if not, it must register. `copies`: there is work."""

    known: bool
    copies: bool = False
    pins: PinChanges | None = None


class Copies(msgspec.Struct, frozen=True, tag="copies"):
    """Work for the node that asked; if there is none, when to ask again (0: when it is told)."""

    copies: list[Copy]
    again_s: float = 0.0


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """The client's tenant, its quota in bytes (None: no limit) and what it uses of it."""

    tenant: str
    quota_bytes: int | None
    used_bytes: int


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    """Which of the leases run on, for `lease_s` from now."""

    running: list[bool]
    lease_s: float


class Located(msgspec.Struct, frozen=True, tag="located"):
    """Where the blocks are, as columns. `lease_id` is 0 if there are none.

    The leading run, or with `Lookup.every` one row per key: `node_idx` is -1 for what is missing.
    `chunk_bytes` is empty if it is 0 for all.
    """

    lease_id: int
    lease_s: float
    nodes: list[NodeAddress]
    node_idx: list[int]
    offsets: list[int]
    lengths: list[int]
    checksums: list[int]
    chunk_bytes: list[int] = []


class Allocated(msgspec.Struct, frozen=True, tag="allocated"):
    """Per key what to do; and per copy where, in rows of `position * replicas + copy`.

    Attributes:
        outcomes: [keys].
        nodes: The segments named below.
        node_idx: [keys * replicas]; -1: not granted.
        offsets: [keys * replicas] in the segment; -1: not granted.
        put_s: How long the writer has.
        retry_s: After `NO_SPACE`: when space may come to be, as far as the master can tell.
        checksums: [keys] of the blocks that exist, if the request told none of its own: `EXISTS`
            says no more then than that length and parts are the same. Empty if none exists.
        provisional: The master has just started: `NO_SPACE` is not its last word. Filled in where
            the reply arrives, from its envelope.
        ahead: Places of the first of `Allocate.more`, as many as could be had.
    """

    outcomes: list[PutOutcome]
    nodes: list[NodeAddress]
    node_idx: list[int]
    offsets: list[int]
    put_s: float
    retry_s: float = 0.0
    checksums: list[int] = []
    provisional: bool = False
    ahead: Granted | None = None


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Which of `Finish.committed` are copies of blocks now."""

    stored: list[bool]


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """A place, or None: write with `Allocate` and `Finish` then. `put_s` as of `Allocated`."""

    place: Place | None
    put_s: float = 0.0


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """What became of a block.

    `FAILED`: the place is not known (any more); nothing was stored by this very request.

    Attributes:
        outcome: As of a put.
        place: What is `Store.following` from now on: the place, which was not used.
        more: The first of `Store.more`, as many as could be had.
        put_s: As of `Allocated`.
    """

    outcome: PutOutcome
    place: Place | None
    more: list[Place] = []
    put_s: float = 0.0


class Present(msgspec.Struct, frozen=True, tag="present"):
    """One flag per key."""

    flags: list[bool]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """How many of the things named were found and changed."""

    count: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Nothing was changed."""

    reason: RefusalReason
    problem: str


class MasterStatistics(msgspec.Struct, frozen=True, tag="statistics", kw_only=True):
    """Figures of the pool now, and counts since the master started.

    `capacity == free + committed + open + retired + quarantined`, all in bytes.
    """

    nodes: int
    blocks: int
    leases: int
    open_puts: int
    capacity_bytes: int
    free_bytes: int
    committed_bytes: int
    open_bytes: int
    retired_bytes: int
    quarantined_bytes: int
    hit_blocks: int
    missed_blocks: int
    stored_blocks: int
    evicted_blocks: int
    corrupt_blocks: int
    unreachable_blocks: int
    lost_blocks: int
    segments: int = 0
    copies: int = 0
    soft_pinned_blocks: int = 0
    hard_pinned_blocks: int = 0
    dram_capacity_bytes: int = 0
    dram_free_bytes: int = 0
    cxl_capacity_bytes: int = 0
    cxl_free_bytes: int = 0
    ssd_capacity_bytes: int = 0
    ssd_free_bytes: int = 0
    moved_blocks: int = 0  # copies by the master's order: drains, joined nodes, rebalancing
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    replicated_blocks: int = 0
    no_space_blocks: int = 0  # asked for and not granted, as often as they were asked for
    too_large_blocks: int = 0
    over_quota_blocks: int = 0


class BlockList(msgspec.Struct, frozen=True, tag="block_list"):
    """Blocks in the order of their keys, as columns; `copies` are positions in `nodes`.

    `offsets` say where each of these copies begins in its segment; `checksums` and `chunk_bytes`
    are as in `HeldBlocks`.
    """

    keys: list[bytes]
    lengths: list[int]
    pins: list[Pin]
    leased: list[bool]
    tenants: list[str]
    groups: list[str]
    nodes: list[NodeAddress]
    copies: list[list[int]]
    more: bool
    offsets: list[list[int]] = []
    checksums: list[int] = []
    chunk_bytes: list[int] = []


class SegmentFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One segment now. `largest_free_bytes` tells how far its free space is in pieces."""

    where: NodeAddress
    domain: str
    capacity_bytes: int
    free_bytes: int
    largest_free_bytes: int
    blocks: int
    silent_s: float
    draining: bool


class SegmentList(msgspec.Struct, frozen=True, tag="segment_list"):
    """All segments."""

    segments: list[SegmentFigures]


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """How far a drain has come. Done when `left_blocks` is 0.

    `stuck_blocks` of those left have nowhere to go, as things are: there is no other node that
    takes blocks (`no_node_blocks`), each other failure domain has a copy already and their writer
    wanted so many (`no_domain_blocks`), or there is no room. `in_use_blocks` are being read or
    written, and go when that ends. `cancelled`: it was, and nobody has begun it anew.
    """

    left_blocks: int
    left_bytes: int
    moved_blocks: int
    stuck_blocks: int
    no_node_blocks: int = 0
    no_domain_blocks: int = 0
    in_use_blocks: int = 0
    cancelled: bool = False


class TenantFigures(msgspec.Struct, frozen=True):
    """One tenant's bytes, copies counted each. `quota_bytes` None: no limit."""

    tenant: str
    quota_bytes: int | None
    used_bytes: int
    blocks: int


class TenantList(msgspec.Struct, frozen=True, tag="tenant_list"):
    """All tenants that are configured or use something."""

    tenants: list[TenantFigures]


class WriterFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one incarnation may still write to.

    Attributes:
        writer: Its name.
        open_bytes: Of places that it has begun with, or holds ahead.
        quarantined_bytes: Given to nobody before it is known to be dead.
    """

    writer: str
    open_bytes: int
    quarantined_bytes: int


class WriterList(msgspec.Struct, frozen=True, tag="writer_list"):
    """All writers with places of theirs."""

    writers: list[WriterFigures]


class WritersThere(msgspec.Struct, frozen=True, tag="writers_there"):
    """Writers with places in a node's segments; `batches`, if asked for: of each of them."""

    writers: list[str]
    batches: list[list[int]] = []


Reply = (
    Registered
    | Known
    | Copies
    | Entered
    | Renewed
    | Located
    | Allocated
    | Finished
    | Reserved
    | Stored
    | Present
    | Done
    | Refused
    | MasterStatistics
    | BlockList
    | SegmentList
    | Draining
    | TenantList
    | WriterList
    | WritersThere
)

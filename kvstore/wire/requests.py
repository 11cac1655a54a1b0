"""What store nodes, clients and administrators ask of a master."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvstore.wire.columns import (
    Count,
    HeldBlocks,
    Incarnation,
    Keys,
    Label,
    Medium,
    Parent,
    Pin,
    Tokens,
)
from kvstore.wire.put_requests import Allocate as Allocate
from kvstore.wire.put_requests import Finish as Finish
from kvstore.wire.put_requests import Reserve as Reserve
from kvstore.wire.put_requests import Store as Store


class Register(msgspec.Struct, frozen=True, tag="register"):
    """A node lends one segment, or with several masters this master's share of it.

    Attributes:
        node: Its incarnation.
        address: Where its engine listens.
        capacity: Bytes lent.
        untouched: Nobody was ever given access to them.
        held: What is in them already.
        segment: Number of the segment in the node.
        medium: What it lies in.
        base: Offset of the share in the segment; all offsets count from the segment's start.
        domain: Failure domain, like a host or a rack; "" is a domain of the node's own.
        more: Further blocks follow in `Hold`; eviction and placement wait for the last.
    """

    node: Incarnation
    address: str
    capacity: int
    untouched: bool
    held: HeldBlocks
    segment: Count = 0
    medium: Medium = Medium.DRAM
    base: Count = 0
    domain: Label = ""
    more: bool = False


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Further blocks of a segment that was registered with `more`."""

    node: Incarnation
    segment: Count
    held: HeldBlocks
    more: bool = False


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """A node is alive. `pins_heard`: numbers of `PinChanges`."""

    node: Incarnation
    pins_heard: list[int] = []


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """A node takes its segment back."""

    node: Incarnation


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """Of those who might have written in a segment for an earlier master only these may still.

    `waiting`: their incarnations; the segment can be used when there are none, or when all of
    them are certainly dead.
    """

    node: Incarnation
    segment: Count
    waiting: list[Incarnation] = []


class NextCopies(msgspec.Struct, frozen=True, tag="next_copies"):
    """A node reports what became of copies, and asks for more work.

    `turn` is one more with each request that was answered; 0: not counted. A turn that is repeated
    gets the same copies again, as its reply was lost.
    """

    node: Incarnation
    done: list[int] = []
    failed: list[int] = []
    corrupt: list[int] = []  # the source's own bytes did not match: nothing was sent
    limit: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 16
    turn: Count = 0


class Enter(msgspec.Struct, frozen=True, tag="enter"):
    """A client acts for a tenant from now on. Without this it acts for "" if that is allowed."""

    client: Incarnation
    tenant: Label
    token: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """How many of these keys, from the first on, are there? Lease them in the same step.

    Copies on the nodes in `avoid` do not count. `every`: all that are there, not only the
    leading run.
    """

    client: Incarnation
    keys: Keys
    avoid: list[str] = []
    every: bool = False


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """The client is not done with these: their time starts again."""

    client: Incarnation
    lease_ids: list[int]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The client has read what it wanted."""

    client: Incarnation
    lease_ids: list[int]


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """What blocks are that will be stored, for subscribers of events; Done(0): there are none.

    `parents`: the key before each, or empty. `tokens`: 4 bytes each, little-endian.
    """

    client: Incarnation
    keys: Keys
    parents: list[Parent]
    tokens: list[Tokens]


class Exists(msgspec.Struct, frozen=True, tag="exists"):
    """Which of these are there? Nothing is leased."""

    keys: Keys
    client: str = ""


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Forget these blocks, pinned ones too. Leased bytes stay until the leases end.

    `group`: and all blocks of this group of the client's tenant.
    """

    keys: Keys
    client: str = ""
    group: Label = ""


class SetPin(msgspec.Struct, frozen=True, tag="set_pin"):
    """Pin blocks that are there, or let them go again; by name, or a whole group."""

    client: Incarnation
    keys: Keys
    pin: Pin
    pin_s: float = 0.0
    group: Label = ""


class ReportBad(msgspec.Struct, frozen=True, tag="report_bad"):
    """Copies whose bytes did not match (`corrupt`) or could not be read. Columns."""

    client: Incarnation
    keys: Keys
    nodes: list[str]
    offsets: list[int]
    corrupt: list[bool]
    segments: list[int] = []


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """These incarnations are out; `dead`: they certainly run no more."""

    incarnations: list[Incarnation]
    dead: bool


class Observe(msgspec.Struct, frozen=True, tag="observe"):
    """Ask for the master's figures."""


class ListBlocks(msgspec.Struct, frozen=True, tag="list_blocks"):
    """Which blocks are there, in the order of their keys, from after `after` on."""

    after: bytes = b""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1 << 14)] = 1000
    tenant: Label | None = None
    group: Label | None = None


class ListSegments(msgspec.Struct, frozen=True, tag="list_segments"):
    """Which segments are lent, and what is in them."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Move all away from a node; `cancel`: no more; `again`: one that was cancelled stays so. Asked
    again, it tells how far it is. `fewer_copies`: one elsewhere is enough from now on.
    """

    node: Incarnation
    cancel: bool = False
    fewer_copies: bool = False
    again: bool = False


class Rebalance(msgspec.Struct, frozen=True, tag="rebalance"):
    """Move blocks from full segments to empty ones, at most so many bytes."""

    nbytes_max: Count


class ListTenants(msgspec.Struct, frozen=True, tag="list_tenants"):
    """Who may use how much, and does."""


class ListWriters(msgspec.Struct, frozen=True, tag="list_writers"):
    """Who was given places and has not said what became of them?"""


class WritersAt(msgspec.Struct, frozen=True, tag="writers_at"):
    """Who was given places in my segments, and has not said what became of them?

    `writers`: in which batches have these? `dead`: all, else those too old to be begun with.
    """

    node: Incarnation
    segments: list[int]
    writers: list[Incarnation] = []
    dead: bool = False


class WritesOver(msgspec.Struct, frozen=True, tag="writes_over"):
    """A writer writes nothing in my segments any more of what it was granted in these batches.

    `dead`: its process has ended; else only what is too old to be begun with is meant.
    """

    node: Incarnation
    segments: list[int]
    writer: Incarnation
    batches: list[int]
    dead: bool


class SetQuota(msgspec.Struct, frozen=True, tag="set_quota"):
    """A tenant may use so many bytes from now on; None: as many as there are."""

    tenant: Label
    nbytes: Count | None


Request = (
    Register
    | Hold
    | Heartbeat
    | Leave
    | Settled
    | NextCopies
    | Enter
    | Lookup
    | Renew
    | Release
    | Allocate
    | Finish
    | Reserve
    | Store
    | Describe
    | Exists
    | Remove
    | SetPin
    | ReportBad
    | Fence
    | Observe
    | ListBlocks
    | ListSegments
    | Drain
    | Rebalance
    | ListTenants
    | ListWriters
    | WritersAt
    | WritesOver
    | SetQuota
)

"""Requests to the store master, its replies, and the notes that clients and nodes exchange.

One request carries many keys. What belongs to many blocks travels as columns (lists of equal
length), and nodes are named once per message and then by index. Every request is answered by
exactly one reply:

    Register    node     -> Registered       Exists      client   -> Present
    Heartbeat   node     -> Known            Remove      client   -> Done
    Leave       node     -> Done             ReportBad   client   -> Done
    Lookup      client   -> Located          Fence       anyone   -> Done
    Release     client   -> Done             Observe     anyone   -> MasterStatistics
    Allocate    client   -> Allocated        any illegal one      -> Refused
    Finish      client   -> Finished

Peer notes (`TransferEngine.notify`): AskSegment client -> node, OfferSegment node -> client,
Written client -> node.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from kvstore.keys import KEY_BYTES

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Incarnation = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
KEYS_MAX = 1 << 16
Keys = Annotated[list[Key], msgspec.Meta(max_length=KEYS_MAX)]


class PutOutcome(StrEnum):
    """What became of one block of a put."""

    STORED = "stored"
    EXISTS = "exists"  # the same bytes are there already: nothing was sent
    CONFLICT = "conflict"  # other bytes are there under this key; they stay
    IN_PROGRESS = "in_progress"  # somebody else is writing this key now
    NO_SPACE = "no_space"
    FAILED = "failed"  # the write or its commit did not succeed
    GRANTED = "granted"  # in `Allocated` only: write there, then send `Finish`


class RefusalReason(StrEnum):
    """Why a request was not carried out."""

    FENCED = "fenced"
    MALFORMED = "malformed"


class NodeAddress(msgspec.Struct, frozen=True, array_like=True):
    """A store node and where its engine listens."""

    node: str
    address: str


class HeldBlocks(msgspec.Struct, frozen=True):
    """Blocks in a segment, as columns."""

    keys: list[Key] = []
    offsets: list[int] = []
    lengths: list[int] = []
    checksums: list[int] = []
    pinned: list[bool] = []


class Register(msgspec.Struct, frozen=True, tag="register"):
    """A node lends `capacity` bytes. `untouched`: nobody was ever given access to them."""

    node: Incarnation
    address: str
    capacity: int
    untouched: bool
    held: HeldBlocks


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """A node is alive."""

    node: Incarnation


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """A node takes its segment back."""

    node: Incarnation


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """How many of these keys, from the first on, are there? Lease them in the same step.

    Copies on the nodes in `avoid` do not count.
    """

    client: Incarnation
    keys: Keys
    avoid: list[str] = []


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The client has read what it wanted."""

    client: Incarnation
    lease_ids: list[int]


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """Space for blocks of these lengths and checksums. `batch` is never used twice by a client.

    `abandoned`: batches whose replies never came; nothing of them was or will be written.
    """

    client: Incarnation
    batch: int
    keys: Keys
    lengths: list[Annotated[int, msgspec.Meta(gt=0)]]
    checksums: list[int]
    pin: bool = False
    avoid: list[str] = []
    abandoned: list[int] = []


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The end of granted puts, by their index in the batch.

    `aborted`: nothing of them is under way. `unsettled`: the writer cannot tell.
    """

    client: Incarnation
    batch: int
    committed: list[int]
    aborted: list[int] = []
    unsettled: list[int] = []


class Exists(msgspec.Struct, frozen=True, tag="exists"):
    """Which of these are there? Nothing is leased."""

    keys: Keys


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Forget these blocks, pinned ones too. Leased bytes stay until the leases end."""

    keys: Keys


class ReportBad(msgspec.Struct, frozen=True, tag="report_bad"):
    """Copies whose bytes did not match (`corrupt`) or could not be read. Columns."""

    client: Incarnation
    keys: Keys
    nodes: list[str]
    offsets: list[int]
    corrupt: list[bool]


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """These incarnations are out; `dead`: they certainly run no more."""

    incarnations: list[Incarnation]
    dead: bool


class Observe(msgspec.Struct, frozen=True, tag="observe"):
    """Ask for the master's figures."""


Request = (
    Register
    | Heartbeat
    | Leave
    | Lookup
    | Release
    | Allocate
    | Finish
    | Exists
    | Remove
    | ReportBad
    | Fence
    | Observe
)


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The segment is part of the pool; `adopted` of the blocks that it held are known."""

    adopted: int


class Known(msgspec.Struct, frozen=True, tag="known"):
    """Whether the master knows this node; if not, it must register."""

    known: bool


class Located(msgspec.Struct, frozen=True, tag="located"):
    """The leading run of blocks that is there, as columns. `lease_id` is 0 if it is empty."""

    lease_id: int
    lease_s: float
    nodes: list[NodeAddress]
    node_idx: list[int]
    offsets: list[int]
    lengths: list[int]
    checksums: list[int]


class Allocated(msgspec.Struct, frozen=True, tag="allocated"):
    """Per key: what to do, and where (`node_idx` and `offset` are -1 unless granted)."""

    outcomes: list[PutOutcome]
    nodes: list[NodeAddress]
    node_idx: list[int]
    offsets: list[int]
    put_s: float


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Which of `Finish.committed` are blocks now."""

    stored: list[bool]


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


Reply = (
    Registered
    | Known
    | Located
    | Allocated
    | Finished
    | Present
    | Done
    | Refused
    | MasterStatistics
)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Return the MessagePack form of a request or reply."""
    return _encoder.encode(message)


def decode_request(payload: bytes) -> Request:
    """Read a request. Raises msgspec.MsgspecError if it is none."""
    return _request_decoder.decode(payload)


def decode_reply(payload: bytes) -> Reply:
    """Read a reply. Raises msgspec.MsgspecError if it is none."""
    return _reply_decoder.decode(payload)

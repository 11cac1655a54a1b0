"""What messages are made of: keys, columns of blocks, names of segments, outcomes."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec

from kvstore.keys import KEY_BYTES

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Incarnation = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
LABEL_MAX = 64
Label = Annotated[str, msgspec.Meta(max_length=LABEL_MAX)]  # of a tenant, a group, a failure domain
KEYS_MAX = 1 << 16
Parent = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)]  # a key, or empty
Tokens = Annotated[bytes, msgspec.Meta(max_length=1 << 16)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=KEYS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Medium(StrEnum):
    """What a segment's bytes lie in. Faster media first."""

    DRAM = "dram"
    CXL = "cxl"  # byte-addressable and slower: a dax device, or a NUMA node without cores
    SSD = "ssd"


class Pin(IntEnum):
    """What eviction may do with a block."""

    NONE = 0
    SOFT = 1  # evicted only if nothing else can be; ends by itself; not kept through a restart
    HARD = 2  # never evicted; removed only by `Remove`


class PutOutcome(StrEnum):
    """What became of one block of a put."""

    STORED = "stored"
    EXISTS = "exists"  # the same bytes are there already: nothing was sent
    CONFLICT = "conflict"  # other bytes are there under this key; they stay
    IN_PROGRESS = "in_progress"  # somebody else is writing this key now
    NO_SPACE = "no_space"
    TOO_LARGE = "too_large"  # than any segment: waiting for space is of no use
    OVER_QUOTA = "over_quota"  # the tenant's bytes; what it could evict of its own was not enough
    FAILED = "failed"  # the write or its commit did not succeed
    GRANTED = "granted"  # in `Allocated` only: write there, then send `Finish`


class RefusalReason(StrEnum):
    """Why a request was not carried out."""

    FENCED = "fenced"
    MALFORMED = "malformed"
    UNKNOWN_TENANT = "unknown_tenant"
    WRONG_TOKEN = "wrong_token"
    NOT_ENTERED = "not_entered"  # this master does not know the client's tenant: enter again
    UNKNOWN_NODE = "unknown_node"
    WRONG_SHARD = "wrong_shard"  # the keys are another master's
    NOT_LEADING = "not_leading"  # another master leads this shard, or nobody does: ask elsewhere


class NodeAddress(msgspec.Struct, frozen=True, array_like=True):
    """One segment of a store node, and where the node's engine listens."""

    node: str
    address: str
    segment: int = 0
    medium: Medium = Medium.DRAM


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where one block can be written: a segment, and the bytes from `offset` on."""

    where: NodeAddress
    offset: int


class HeldBlocks(msgspec.Struct, frozen=True):
    """Blocks in a segment, as columns. An empty optional column means the default for all.

    Attributes:
        keys: Their names.
        offsets: Bytes from the start of the segment.
        lengths: Bytes of payload; a part table may follow them (see `chunk_bytes`).
        checksums: Of each block.
        pinned: Hard pins.
        chunk_bytes: 0: `checksum` is that of the whole payload. Else the payload is followed by
            one xxh3_64 (little-endian) per chunk of this many bytes, and `checksum` is that of
            this part table, so that any chunk can be verified alone.
        tenants: Who is charged for each; "" is nobody in particular.
        groups: Which blocks go together; "" is no group.
        stamps: When each was told to the node that holds it: nanoseconds since the epoch, by that
            node's clock; 0: not known. Of two that differ the later is the block.
    """

    keys: list[Key] = []
    offsets: list[int] = []
    lengths: list[int] = []
    checksums: list[int] = []
    pinned: list[bool] = []
    chunk_bytes: list[int] = []
    tenants: list[Label] = []
    groups: list[Label] = []
    stamps: list[int] = []


class PinChanges(msgspec.Struct, frozen=True):
    """Blocks of a node that are pinned hard now, or no more, as columns.

    `number`: named by the node's heartbeats from then on.
    """

    number: int
    segments: list[int]
    offsets: list[int]
    keys: list[Key]
    hard: list[bool]


class Copy(msgspec.Struct, frozen=True):
    """Work for the node that holds `source_segment`: write a block's bytes somewhere else.

    `nbytes` includes the part table. The node verifies the bytes before it sends them.
    """

    copy_id: int
    key: Key
    nbytes: int
    checksum: int
    chunk_bytes: int
    source_segment: int
    source_offset: int
    target: NodeAddress
    target_offset: int

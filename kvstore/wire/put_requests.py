"""What writers ask a master: space for blocks, and then that these be blocks."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvstore.wire.columns import Count, Incarnation, Key, Keys, Label, Medium, Pin


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """Space for blocks. `batch` is never used twice by a client.

    Attributes:
        client: Who writes.
        batch: The client's number of this put.
        keys: Names.
        lengths: Bytes of payload each.
        checksums: As in `HeldBlocks`; empty: told in `Finish`, which goes without a pin only.
        chunk_bytes: As in `HeldBlocks`, of all.
        pin: Of all. A block that exists already takes the stronger pin.
        pin_s: How long a soft pin lasts; 0 is the master's default.
        group: Evicted, pinned and removed together; of the client's tenant.
        replicas: Copies wanted, on different failure domains; fewer if there are not so many.
        media: Where the first copy may go, best first; empty: as the master's policy says.
        prefer: Nodes to try first.
        avoid: Nodes out of the client's reach.
        abandoned: Batches whose replies never came; nothing of them was or will be written.
        places: Reserved places for the first keys, one each, in which their blocks are being
            written already. One that does not fit its block, or whose key is not granted, stays
            reserved.
        more: Numbers of further places that are wanted on disks, for blocks of `more_bytes`.
        more_bytes: Of payload.
    """

    client: Incarnation
    batch: int
    keys: Keys
    lengths: list[Annotated[int, msgspec.Meta(gt=0)]]
    checksums: list[int] = []
    chunk_bytes: Count = 0
    pin: Pin = Pin.NONE
    pin_s: float = 0.0
    group: Label = ""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    media: list[Medium] = []
    prefer: list[str] = []
    avoid: list[str] = []
    abandoned: list[int] = []
    places: list[Count] = []
    more: list[Count] = []
    more_bytes: Count = 0


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The end of granted copies, by their row in the columns of `Allocated`.

    `aborted`: nothing of them is under way. `unsettled`: the writer cannot tell. `checksums`: of
    the committed ones, if `Allocate` had none.
    """

    client: Incarnation
    batch: int
    committed: list[int]
    aborted: list[int] = []
    unsettled: list[int] = []
    checksums: list[int] = []


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """Space for one block whose name is not known yet: see `Store`. Nothing is granted for sure.

    Attributes:
        client: Who will write.
        key: Any key of the master that is asked; nothing is stored under it.
        batch: The client's number of the place, as of `Allocate`.
        nbytes: Of payload; 0: only `abandoned` is meant.
        avoid: As of `Allocate`.
        abandoned: Places that are given back, and those whose replies never came.
    """

    client: Incarnation
    key: Key
    batch: Count = 0
    nbytes: Count = 0
    avoid: list[str] = []
    abandoned: list[int] = []


class Store(msgspec.Struct, frozen=True, tag="store"):
    """Bytes were written into a reserved place: let them be a block, if its name is free.

    Attributes:
        client: Who wrote.
        batch: The place's number, which is used up with this request.
        key: Name.
        length: Bytes of payload; those of the reservation, but for the padding.
        checksum: As in `HeldBlocks`.
        following: Number of the place from now on if it was not used.
        more: Numbers of further places of this size that are wanted if it was.
        pin: As of `Allocate`, like all that follow but the last.
        soon: Numbers of places of this size that a later `Store` will name in `more`, if this one
            stores its block: they are opened once the reply is on its way.
    """

    client: Incarnation
    batch: Count
    key: Key
    length: Annotated[int, msgspec.Meta(gt=0)]
    checksum: int
    following: Count
    more: list[Count] = []
    pin: Pin = Pin.NONE
    pin_s: float = 0.0
    group: Label = ""
    avoid: list[str] = []
    abandoned: list[int] = []
    soon: list[Count] = []

"""The put that nearly all puts of a stream are, in as few steps as can be.

    claim, copy, checksum, note and post in one compiled call ─▶ stored
    copy, checksum, note and request in one compiled call ─▶ one request, one reply ─▶ stored

Nothing but the block is told: its place is held ahead and others are left, its segment is mapped
here, its node takes notes in a mailbox, it has no label, and one master has all keys. It is posted
where that master is of this host (`kvstore/client/post_box.py`), and asked for where it is not. Of
any other put, or of one that does not end so, `QuickWrites` does what is left; it does all of it
where nothing is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore import copying
from kvstore.client.put_options import DEFAULT
from kvstore.values.values import RegionPiece
from kvstore.wire import messages as m

if TYPE_CHECKING:
    from kvstore._native import PostBox
    from kvstore.client.client_core import ClientCore
    from kvstore.client.reserved_places import ReservedPlace, ReservedPlaces
    from kvstore.client.segment_keys import SegmentKeys
    from kvstore.client.writes_under_way import WriteUnderWay
    from kvstore.values.quick_value import QuickValue
    from transfer.prepared import InPlace

LEFT_MIN: Final = 2  # with fewer places left others are asked for
_NO_NUMBER: Final = 0


class Written(NamedTuple):
    """What was written and noted.

    Attributes:
        request: A `Store`, encoded; None: the note could not be left, it is to be sent.
        checksum: Of the bytes, if there is no request.
        posted: It is stored, and nothing is left to do.
        taken: Nothing was written: its key is taken, and the master knows by whom.
    """

    request: bytes | None
    checksum: int = 0
    posted: bool = False
    taken: bool = False


_POSTED: Final = Written(None, posted=True)
TAKEN: Final = Written(None, taken=True)


class PlainPuts:
    """Thread-safe.

    Args:
        core: The client's operations.
        segments: Keys to the nodes' segments.
        places: Held ahead.
        shards: How many masters share the keys.
    """

    def __init__(
        self, core: ClientCore, segments: SegmentKeys, places: ReservedPlaces, shards: int
    ) -> None:
        self._core = core
        self._segments = segments
        self._places = places
        plain = shards == 1 and not core.tenant.name
        self._compiled = copying.compiled if plain else None
        self._head, self._tail = _ends(core.record.name)

    def write(
        self,
        value: QuickValue,
        place: ReservedPlace,
        left: int,
        mapped: InPlace | None,
        write: WriteUnderWay,
        posts: PostBox | None = None,
    ) -> Written | None:
        """Write a value and note it; None: it is no plain put, and nothing was done.

        Args:
            value: What to put.
            place: Where.
            left: How many places more are held.
            mapped: The memory of the place's segment.
            write: Of this put.
            posts: Where it may be posted. Unless it was, or its key is taken, that is held there.
        """
        compiled = self._compiled
        if compiled is None or mapped is None or value.options is not DEFAULT:
            return None
        if left < LEFT_MIN and not (left and self._places.ordered(value.shard, place.space)):
            return None
        where, start, nbytes, record = place.where, place.offset, value.nbytes, self._core.record
        if nbytes <= compiled.SHORT_BYTES:
            return None
        target = where.node, where.segment
        box = self._segments.outbox(target)
        if box is None or record.avoids or self._places.untold(value.shard):
            return None
        if not write.may_start(target) or not 0 <= start <= len(mapped.array) - nbytes:
            return None
        part = value.part
        if isinstance(part, RegionPiece):
            source, first = part.region.array, part.offset
        else:
            source, first = part, 0
        done = compiled.put_block(
            mapped.array, start, source, first, nbytes, copying.WRITE_STREAM_BYTES_MIN,
            box.address, box.nbytes, where.segment, value.key, place.batch, record.next_batch(),
            self._head, self._tail, posts, place.generation,
        )  # fmt: skip
        if done is False:
            return TAKEN
        mapped.wrote_bytes(nbytes)
        if done is None:
            return _POSTED
        return Written(done) if type(done) is bytes else Written(None, done)


def _ends(client: str) -> tuple[bytes, bytes]:
    """Return what is before and behind the numbers of a plain `Store` of this client."""
    whole = m.encode(m.Store(client, _NO_NUMBER, b"", 1, 0, _NO_NUMBER))
    numbers = b"".join(
        (_name("batch"), b"\0", _name("key"), b"\xc4\0", _name("length"), b"\1",
         _name("checksum"), b"\0", _name("following"), b"\0")
    )  # fmt: skip
    head, found, tail = whole.partition(numbers)
    assert found, whole
    return head, tail


def _name(field: str) -> bytes:
    return bytes((0xA0 + len(field),)) + field.encode()

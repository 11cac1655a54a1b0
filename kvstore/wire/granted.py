"""What a master says of places that were ordered by a post: see `kvstore/master/posts.py`."""

from __future__ import annotations

import msgspec

from kvstore.wire.columns import NodeAddress


class Granted(msgspec.Struct, frozen=True, array_like=True):
    """Places, of the numbers that were ordered the first ones, in their order.

    Attributes:
        nodes: The segments in which they lie, each once.
        node_idx: Of each place, the position of its segment.
        offsets: Of each place, in its segment.
        put_s: How long they stay the client's.
    """

    nodes: list[NodeAddress]
    node_idx: list[int]
    offsets: list[int]
    put_s: float


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Granted).decode

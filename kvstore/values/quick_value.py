"""A value that is put the short way, and what the pool makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.wire import messages as m

if TYPE_CHECKING:
    from kvstore.client.put_options import PutOptions
    from kvstore.values.values import Part

_UNIT: Final = 64


class QuickValue(NamedTuple):  # made for each put: a tuple is made fastest
    """A value on its way.

    Attributes:
        key: As the pool knows it.
        shard: Of its master.
        part: All of its bytes.
        nbytes: How many.
        space: Bytes that it takes in the pool.
        options: How to store it.
    """

    key: bytes
    shard: int
    part: Part
    nbytes: int
    space: int
    options: PutOptions


def space_of(nbytes: int) -> int:
    """Return how many bytes a value takes in the pool."""
    return -(-nbytes // _UNIT) * _UNIT


def decoded(payload: bytes) -> m.Store:
    """Return a `Store` that was encoded here."""
    request = m.decode_request(payload)
    assert isinstance(request, m.Store), request
    return request

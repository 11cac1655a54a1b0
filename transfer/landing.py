"""Receiving a known number of bytes straight into their final place."""

from __future__ import annotations

import errno
import os
import socket
from array import array
from collections import deque
from itertools import islice
from typing import Final

import numpy as np

from transfer.errors import ProtocolViolation
from transfer.memory.region import Bytes
from transfer.pieces import Ints, Pieces, copy_pieces

IOVEC_MAX: Final = 512
# Pieces shorter than this on average go through a staging buffer and one vectorised copy: the
# system call's cost per piece would exceed that of copying twice.
DIRECT_MEAN_BYTES: Final = 8 << 10
SCRATCH_BYTES: Final = 256 << 10
DESCRIPTOR_SPACE: Final = socket.CMSG_SPACE(4)

_scratch: Final = memoryview(bytearray(SCRATCH_BYTES))


class Landing:
    """A list of places that bytes from a socket fill in order."""

    def __init__(self, places: list[memoryview]) -> None:
        self._places = deque(place for place in places if place.nbytes)
        self.remaining = sum(place.nbytes for place in self._places)
        self.descriptor = -1

    @classmethod
    def nowhere(cls, nbytes: int) -> Landing:
        """Read bytes and throw them away."""
        return cls(_scratch_places(nbytes))

    def receive(self, sock: socket.socket, *, descriptors: bool = False) -> int:
        """Receive once; 0 at the end of the stream.

        Raises:
            BlockingIOError: nothing is there.
            OSError: the connection broke.
        """
        assert self.remaining
        if descriptors:
            received, ancillary, flags, _ = sock.recvmsg_into(
                [self._places[0]], DESCRIPTOR_SPACE, socket.MSG_CMSG_CLOEXEC
            )
            self._take_descriptors(ancillary)
            if flags & socket.MSG_CTRUNC and self.descriptor < 0:
                raise OSError(errno.EMFILE, "no room for a descriptor")
        elif len(self._places) == 1:
            received = sock.recv_into(self._places[0])
        else:
            received = sock.recvmsg_into(list(islice(self._places, IOVEC_MAX)))[0]
        self._advance(received)
        return received

    def _advance(self, received: int) -> None:
        self.remaining -= received
        while received:
            head = self._places.popleft()
            if received < head.nbytes:
                self._places.appendleft(head[received:])
                return
            received -= head.nbytes

    def _take_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                found = array("i", data[: len(data) - len(data) % 4])
                if self.descriptor >= 0 or len(found) != 1:
                    for fd in found:
                        os.close(fd)
                    raise ProtocolViolation("more descriptors than one")
                self.descriptor = found[0]


def _scratch_places(nbytes: int) -> list[memoryview]:
    whole, rest = divmod(nbytes, SCRATCH_BYTES)
    return [_scratch] * whole + [_scratch[:rest]]


def gather(memory: Bytes, offsets: Ints, lengths: Ints) -> list[memoryview]:
    """Return the pieces as buffers to send: views where they are long, else one packed copy."""
    if not len(lengths):
        return []
    nbytes = int(lengths.sum())
    if nbytes >= DIRECT_MEAN_BYTES * len(lengths) or len(lengths) == 1:
        return _views(memory, offsets, lengths)
    packed = np.empty(nbytes, dtype=np.uint8)
    copy_pieces(packed, memory, Pieces(offsets, np.cumsum(lengths) - lengths, lengths))
    return [packed.data]


def scatter(memory: Bytes, offsets: Ints, lengths: Ints) -> tuple[list[memoryview], Bytes | None]:
    """Return places to receive the pieces into, and the staging buffer if they are packed.

    A staging buffer is to be spread by `spread` when it is full.
    """
    nbytes = int(lengths.sum())
    if nbytes >= DIRECT_MEAN_BYTES * len(lengths) or len(lengths) == 1:
        return _views(memory, offsets, lengths), None
    packed = np.empty(nbytes, dtype=np.uint8)
    return [packed.data], packed


def spread(memory: Bytes, packed: Bytes, offsets: Ints, lengths: Ints) -> None:
    """Copy a full staging buffer to its final pieces."""
    copy_pieces(memory, packed, Pieces(np.cumsum(lengths) - lengths, offsets, lengths))


def _views(memory: Bytes, offsets: Ints, lengths: Ints) -> list[memoryview]:
    view = memory.data
    return [view[o : o + n] for o, n in zip(offsets.tolist(), lengths.tolist(), strict=True)]

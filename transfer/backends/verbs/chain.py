"""Chains of work requests, built by array arithmetic and posted in one call.

pyverbs wants an object for each work request and each of its pieces: microseconds of Python for
each, and its published releases leak them. But a chain of requests is a linked list of C
structures, and `post_send` takes its head. So one `SendWR` object is kept as the head of all
chains; the requests behind it, and all scatter-gather elements, lie in arrays of ours that have
the layout of `ibv_send_wr` and `ibv_sge` (both are part of the libibverbs ABI). Links, sizes and
everything else that does not change is filled in once; what is patched for a chain is addresses,
lengths and keys, for all requests at once.

    SendWR (pyverbs)      requests (our array)
    | head: 0 |--next-->| 1 |--next-->| 2 |--next--> 0
        |                 |             |
    sg_list           sg_list       sg_list
        v                 v             v
    elements (our array) |..|........|....|

Where pyverbs keeps the structure inside of its object is found by looking for it (`_find`).
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Final

import numpy as np
from pyverbs.wr import SGE, SendWR

from transfer.backends.verbs.binding import constant
from transfer.backends.verbs.plan import Requests

WRITE: Final = constant("WR_RDMA_WRITE")
WRITE_WITH_IMMEDIATE: Final = constant("WR_RDMA_WRITE_WITH_IMM")
READ: Final = constant("WR_RDMA_READ")
SIGNALLED: Final = constant("SEND_SIGNALED")
INLINE: Final = constant("SEND_INLINE")
# No gain is known from longer chains.
REQUESTS_MAX: Final = 256
REQUEST_BYTES: Final = 128

_REQUEST: Final = np.dtype(
    {
        "names": ["wr_id", "next", "elements", "num_elements", "opcode", "flags", "immediate",
                  "remote_address", "remote_key"],
        "formats": ["<u8", "<u8", "<u8", "<i4", "<i4", "<u4", ">u4", "<u8", "<u4"],
        "offsets": [0, 8, 16, 24, 28, 32, 36, 40, 48],
        "itemsize": REQUEST_BYTES,
    }
)  # fmt: skip
_ELEMENT: Final = np.dtype([("address", "<u8"), ("length", "<u4"), ("local_key", "<u4")])
_HEAD: Final = struct.Struct("<QQQiiI4sQI")
_ONE_ELEMENT: Final = struct.Struct("<QII")


class Chain:
    """The structures of one queue pair's chains, used again for each. Not thread-safe.

    Args:
        elements_max: how many pieces a request may have.
    """

    def __init__(self, elements_max: int) -> None:
        self._elements_max = elements_max
        self._elements = np.zeros(REQUESTS_MAX * elements_max, dtype=_ELEMENT)
        self._element_base = self._elements.ctypes.data
        self._element_bytes = self._elements.view(np.uint8).data
        self._requests = np.zeros(REQUESTS_MAX, dtype=_REQUEST)
        self._request_base = self._requests.ctypes.data
        following = np.arange(1, REQUESTS_MAX + 1, dtype=np.uint64) * REQUEST_BYTES
        self._following = following + self._request_base
        self._requests["next"] = self._following
        # Views of the columns: making one costs more than filling it.
        columns = {name: self._requests[name] for name in _REQUEST.names or ()}
        columns |= {name: self._elements[name] for name in _ELEMENT.names or ()}
        self._fields = columns
        self._cut = 0
        self._head = SendWR(num_sge=1, sg=[SGE(0, 0, 0)], opcode=WRITE)
        self._place = (ctypes.c_char * REQUEST_BYTES).from_address(id(self._head) + HEAD_OFFSET)
        self._own_list = int.from_bytes(self._place.raw[16:24], "little")

    def __del__(self) -> None:
        # Newer releases free the list that the head points to, so its own must be there again.
        if hasattr(self, "_own_list"):
            struct.pack_into("<Q", self._place, 16, self._own_list)

    def fill_one(
        self,
        *,
        wr_id: int,
        opcode: int,
        flags: int,
        immediate: int,
        remote: int,
        remote_key: int,
        local: int,
        length: int,
        local_key: int,
    ) -> Any:
        """Fill in a single request of one piece, or of none; return what to post."""
        _ONE_ELEMENT.pack_into(self._element_bytes, 0, local, length, local_key)
        _HEAD.pack_into(
            self._place, 0, wr_id, 0, self._element_base, 1 if length else 0, opcode, flags,
            immediate.to_bytes(4, "big"), remote, remote_key,
        )  # fmt: skip
        return self._head

    def fill(
        self,
        requests: Requests,
        start: int,
        count: int,
        *,
        wr_id: int,
        opcode: int,
        remote_key: int,
        local_key: int,
        last_opcode: int,
        immediate: int,
    ) -> Any:
        """Fill in requests [start, start + count), the last one signalled; return what to post.

        All have one `wr_id`; the last one has `last_opcode` and carries `immediate`.
        """
        first = requests.first[start : start + count + 1]
        low, high = int(first[0]), int(first[-1])
        fields, size = self._fields, high - low
        fields["address"][:size] = requests.local[low:high]
        fields["length"][:size] = requests.lengths[low:high]
        fields["local_key"][:size] = local_key
        fields["next"][self._cut] = self._following[self._cut]
        self._cut = last = count - 1
        fields["wr_id"][:count] = wr_id
        fields["elements"][:count] = first[:-1] * _ELEMENT.itemsize + (
            self._element_base - low * _ELEMENT.itemsize
        )
        fields["num_elements"][:count] = first[1:] - first[:-1]
        fields["opcode"][:count] = opcode
        fields["flags"][:count] = 0
        fields["remote_address"][:count] = requests.remote[start : start + count]
        fields["remote_key"][:count] = remote_key
        fields["opcode"][last], fields["flags"][last] = last_opcode, SIGNALLED
        fields["immediate"][last], fields["next"][last] = immediate, 0
        ctypes.memmove(self._place, self._request_base, REQUEST_BYTES)
        return self._head


def _find() -> int:
    """Return where a `SendWR` holds its structure, as an offset from the object's address.

    Raises:
        ImportError: it is not there: this is no pyverbs that we know.
    """
    mark = 0x1B5E_77A1_0DDC_0FFE
    probe = SendWR(wr_id=mark, opcode=READ, num_sge=1, sg=[SGE(1, 2, 3)], send_flags=SIGNALLED)
    probe.set_wr_rdma(0x0BAD_CAFE, 0x0123_4567_89AB_CDEF)
    size = type(probe).__basicsize__
    memory = ctypes.string_at(id(probe), size)
    offset = memory.find(mark.to_bytes(8, "little"))
    if offset < 0 or offset + REQUEST_BYTES > size:
        raise ImportError("this pyverbs keeps its work requests in an unknown way")
    (row,) = np.frombuffer(memory[offset : offset + REQUEST_BYTES], dtype=_REQUEST)
    found = [int(row[name]) for name in ("next", "num_elements", "opcode", "flags",
                                         "remote_address", "remote_key")]  # fmt: skip
    if found != [0, 1, READ, SIGNALLED, 0x0123_4567_89AB_CDEF, 0x0BAD_CAFE]:
        raise ImportError(f"this pyverbs has work requests of another layout: {found}")
    return offset


HEAD_OFFSET: Final = _find()

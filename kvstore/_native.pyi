"""Types of the compiled part, `native.c`."""

from typing import Literal

from kvstore.copying import Bytes, Ints

SHORT_BYTES: int

def copy_summed(
    target_base: int,
    source_base: int,
    target_offsets: Ints,
    source_offsets: Ints,
    lengths: Ints,
    stream_bytes: int,
    /,
) -> bytes: ...
def copy_one_summed(
    target: Bytes,
    target_offset: int,
    source: Bytes,
    source_offset: int,
    nbytes: int,
    stream_bytes: int,
    /,
) -> int: ...
def bytes_summed(
    source: Bytes, offset: int, nbytes: int, stream_bytes: int, /
) -> tuple[bytes, int]: ...
def put_block(
    target: Bytes,
    target_offset: int,
    source: Bytes,
    source_offset: int,
    nbytes: int,
    stream_bytes: int,
    box: int,
    box_bytes: int,
    segment: int,
    key: bytes,
    batch: int,
    following: int,
    head: bytes,
    tail: bytes,
    posts: PostBox | None,
    generation: int,
    /,
) -> bytes | int | Literal[False] | None: ...
def sum_one(source: Bytes, offset: int, nbytes: int, /) -> int: ...
def sums(base: int, offsets: Ints, lengths: Ints, /) -> bytes: ...
def share_copies(sharing: int, /) -> int: ...
def mailbox_leave(address: int, nbytes: int, payload: bytes, /) -> bool: ...
def mailbox_take(
    address: int, nbytes: int, tail: int, until_ns: int, /
) -> tuple[int, list[tuple[int, bytes]]]: ...
def mailbox_close(address: int, nbytes: int, /) -> None: ...

class PostBox:
    def __init__(
        self, keys: int, ring: int, wake: int, master: int, clock: bytes, serial: int
    ) -> None: ...
    def generation(self) -> int: ...
    def hold(self, key: bytes, /) -> bool: ...
    def let_go(self, key: bytes, /) -> None: ...
    def order(self, first: int, count: int, length: int, /) -> bool: ...
    def finish(self, batch: int, checksums: bytes, generation: int, /) -> bool: ...
    def granted(self, first: int, length: int, /) -> bytes | None: ...
    def waiting(self) -> int: ...

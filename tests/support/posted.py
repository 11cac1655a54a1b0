"""Posted puts without a store: an office, boxes, and a client that stops between its steps."""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from contextlib import ExitStack

import numpy as np
import pytest

from kvstore import copying, mailbox, row_loops
from kvstore.mailbox import clock_name
from kvstore.master.posts import (
    BUCKET_BYTES,
    HEAD_BYTES,
    LEADS_NS_MAX,
    RING_BYTES,
    STORE,
)

NBYTES = 300  # the shortest that is copied and posted in one call is a little less
POSTS_MAX, SUMS_MAX = 64, 4096  # as `kvstore/compiled/post_ring.c` has it
STATE, TAKEN, FLOOR, NUMBER, CLAIM, POSTS = 0, 64, 72, 80, 128, 4096
OPEN, LEADS_UNTIL, CLOCK = 64, 128, 256
WORDS = 8  # of a bucket, the first counts
COUNT = (1 << 24) - 1
CLOSED = 1 << 63
POST = struct.Struct("<Q16sQQQQQ")
MASK = (1 << 64) - 1

needs_both_ends = pytest.mark.skipif(
    not (row_loops.COMPILED and copying.COMPILED), reason="both ends are compiled"
)


def fresh() -> bytes:
    """A key that nobody has put."""
    return secrets.token_bytes(16)


def mixed(key: bytes) -> int:
    """The number that says where a key's word is, and what: as `bucket_of` computes it."""
    low, high = struct.unpack("<QQ", key)
    turned = (high << 31 | high >> 33) & MASK
    x = (low * 0x9E3779B97F4A7C15 & MASK) ^ (turned * 0xD6E8FEB86659FD93 & MASK)
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & MASK
    x = (x ^ x >> 29) * 0x9E3779B97F4A7C15 & MASK
    return x ^ x >> 32


def print_of(key: bytes) -> int:
    """A word of the master's for this key."""
    return mixed(key) & ~0xFFFFFF or 1 << 24


class Words:
    """Memory of 64-bit words that others have, too."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)

    def __getitem__(self, at: int) -> int:
        (value,) = struct.unpack_from("<Q", self.memory, at)
        return int(value)

    def __setitem__(self, at: int, value: int) -> None:
        struct.pack_into("<Q", self.memory, at, value & MASK)


class Table(Words):
    """Taken keys, as anybody sees them."""

    @property
    def num_buckets(self) -> int:
        return (len(self.memory) - HEAD_BYTES) // BUCKET_BYTES

    def bucket(self, key: bytes) -> int:
        """Where a key's bucket begins."""
        return HEAD_BYTES + (mixed(key) & (self.num_buckets - 1)) * BUCKET_BYTES

    def slots(self, key: bytes) -> range:
        start = self.bucket(key)
        return range(start + 8, start + 8 * WORDS, 8)

    def owners(self, key: bytes) -> list[int]:
        """Whose words of this key there are; 0 is the master."""
        words = [self[at] for at in self.slots(key)]
        return sorted(w >> 8 & 0xFFFF for w in words if w and w & ~0xFFFFFF == print_of(key))

    def uncounted(self, key: bytes) -> int:
        """How many keys have no word in this bucket."""
        return self[self.bucket(key)]

    def words(self) -> list[int]:
        """All that is not free, and all counts that are not 0."""
        every = range(HEAD_BYTES, len(self.memory), 8)
        return [self[at] for at in every if self[at]]


class HandClient:
    """A client that stops between any two steps; its ring may be a real box's, too."""

    def __init__(self, table: Table, ring: Words) -> None:
        self.table, self.ring = table, ring
        self.turn = 100
        self.state = self.word = self.at = 0

    def _is_free(self, key: bytes) -> bool:
        others = (self.table[at] for at in self.table.slots(key) if at != self.at)
        return not self.table.uncounted(key) and print_of(key) not in {
            w & ~0xFFFFFF for w in others
        }

    def claim(self, key: bytes) -> bool:
        """Look, enter the word, and look again."""
        self.at = 0
        self.state = self.ring[STATE]
        empty = [at for at in self.table.slots(key) if not self.table[at]]
        if self.state & CLOSED or not self.table[OPEN] or not self._is_free(key) or not empty:
            return False
        self.turn = self.turn % 255 + 1
        self.at = empty[0]
        self.word = print_of(key) | self.ring[NUMBER] << 8 | self.turn
        self.ring[CLAIM] = self.at
        self.ring[CLAIM + 8] = self.word
        self.table[self.at] = self.word
        if self._is_free(key):
            return True
        self.withdraw()
        return False

    def withdraw(self) -> None:
        if self.table[self.at] == self.word:
            self.table[self.at] = 0
        self.ring[CLAIM + 8] = 0

    def post(self, key: bytes, batch: int, *, kind: int = STORE, length: int = NBYTES) -> bool:
        at = POSTS + (self.state & COUNT) % POSTS_MAX * POST.size
        POST.pack_into(self.ring.memory, at, kind, key, batch, length, 1, 0, 0)
        if self.ring[STATE] != self.state:
            self.withdraw()
            return False
        self.ring[STATE] = self.state & ~COUNT | (self.state + 1) & COUNT
        self.ring[CLAIM + 8] = 0
        return True


class Desk:
    """Where values are copied to, and notes are left."""

    def __init__(self) -> None:
        self._box = np.zeros(mailbox.MAILBOX_BYTES + 64, dtype=np.uint8)
        self._tail = 0
        self._target = np.zeros(NBYTES, dtype=np.uint8)

    def put(self, box, key: bytes, batch: int, generation: int | None = None) -> bool:
        """Put a value of random bytes; False if the master is to be asked."""
        source = np.frombuffer(secrets.token_bytes(NBYTES), dtype=np.uint8)
        generation = box.generation() if generation is None else generation
        at = self._box.ctypes.data + -self._box.ctypes.data % 64
        done = copying.compiled.put_block(
            self._target, 0, source, 0, NBYTES, 1 << 40, at, mailbox.MAILBOX_BYTES, 1, key, batch,
            batch + 1, b"head", b"tail", box, generation,
        )  # fmt: skip
        assert (done is False) == (self._target.tobytes() != source.tobytes())
        self._tail, notes = copying.compiled.mailbox_take(
            at, mailbox.MAILBOX_BYTES, self._tail, MASK
        )
        assert len(notes) == (done is not False), "noted whether posted or not, if it is written"
        if done is None or done is False:
            return done is None
        assert type(done) is bytes
        assert done.startswith(b"head")
        box.let_go(key)  # it was asked for, and is answered
        return False


class PostScene:
    """An office over fresh memory, and boxes of clients in this process."""

    def __init__(
        self, stack: ExitStack, *, buckets: int = 1024, clock: bytes | None = None
    ) -> None:
        self.stack = stack
        self.clock = clock_name().encode() if clock is None else clock
        self.keys = self.memory(HEAD_BYTES + buckets * BUCKET_BYTES)
        self.office = row_loops.compiled.PostOffice(self.keys, self.clock)
        self.table = Table(self.keys)
        stack.callback(self.table.memory.close)
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        stack.callback(os.close, self.wakeup)
        self.process = os.pidfd_open(os.getpid())
        stack.callback(os.close, self.process)
        self.rings: dict[int, int] = {}
        self.serials = 0
        self.put = Desk().put

    @classmethod
    def leading(cls, stack: ExitStack, *, buckets: int = 1024) -> PostScene:
        """One in which clients may post."""
        scene = cls(stack, buckets=buckets)
        scene.lead()
        return scene

    def memory(self, nbytes: int) -> int:
        made = os.memfd_create("moe-runtime-test", os.MFD_CLOEXEC)
        self.stack.callback(os.close, made)
        os.ftruncate(made, nbytes)
        return made

    def lead(self) -> None:
        self.office.say(True, LEADS_NS_MAX)

    def ring(self, number: int) -> int:
        """A further client's ring, known to the office."""
        self.rings[number] = self.memory(RING_BYTES)
        assert self.office.add(self.rings[number], number)
        return self.rings[number]

    def box(self, number: int, **changed):
        """A further client's box."""
        made = self.ring(number)
        return self.open_box(made, **changed)

    def open_box(self, made: int, **changed):
        """A box on a client's ring, or on something that is none."""
        self.serials += 1
        use = {"keys": self.keys, "ring": made, "wake": self.wakeup, "master": self.process,
               "clock": self.clock, "serial": self.serials, **changed}  # fmt: skip
        return copying.compiled.PostBox(**use)

    def hand(self, number: int) -> HandClient:
        ring = Words(self.rings.get(number) or self.ring(number))
        self.stack.callback(ring.memory.close)
        return HandClient(self.table, ring)

    def ring_words(self, number: int) -> Words:
        ring = Words(self.rings[number])
        self.stack.callback(ring.memory.close)
        return ring

    def take(self) -> list[tuple[int, int, bytes, int]]:
        """What is posted: number, kind, key, batch; its keys are the clients' no more."""
        posted = self.office.take()
        if posted is None:
            return []
        self.office.release()
        return [entry[:4] for entry in posted]

    def woken(self) -> int:
        """How often the master was woken since the last call."""
        try:
            return os.eventfd_read(self.wakeup)
        except BlockingIOError:
            return 0

"""A master that takes posts, its time, and clients that post; its books are checked each time."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from typing import NamedTuple

from kvstore import copying
from kvstore.events.event_log import EventLog
from kvstore.mailbox import clock_name
from kvstore.master.posts import Posts
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.wire import messages as m
from kvstore.wire.granted import Granted, decode
from tests.support.posted import NBYTES, Desk, HandClient, Table, Words

CAPACITY = 1 << 20
TIMING = MasterTiming(lease_s=10.0, silence_s=9.0, put_s=30.0)


class Place(NamedTuple):
    number: int
    generation: int
    where: m.NodeAddress
    offset: int


class PostedMaster:
    def __init__(self, stack: ExitStack, *nodes: str, events: EventLog | None = None) -> None:
        self.stack = stack
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        stack.callback(os.close, self.wakeup)
        self.master = StoreMaster(TIMING, events=events)
        self.now = 100.0
        for node in nodes:
            self.master.step(self.registration(node), self.now)
        self.posts: Posts
        self.table: Table
        self.open_again()
        stack.callback(lambda: self.posts.close())
        self.number = 0
        self.put = Desk().put

    def open_again(self) -> None:
        """Take posts of clients to come."""
        self.posts = Posts(self.master, self.wakeup)
        self.table = Table(self.posts._keys)
        self.stack.callback(self.table.memory.close)
        self.posts.say(may_post=True, leads_until_s=float("inf"))

    @staticmethod
    def registration(node: str, **changed) -> m.Register:
        use = {"node": node, "address": f"{node}:1", "capacity": CAPACITY, "untouched": True,
               "held": m.HeldBlocks(), **changed}  # fmt: skip
        return m.Register(**use)

    def ask(self, request: m.Request) -> m.Reply:
        try:
            self.posts.before(request, self.now)
            reply = self.master.step(request, self.now)
        finally:
            self.posts.after()
        self.master.check_invariants()
        return reply

    def idle(self) -> None:
        """What the server does behind its replies."""
        self.posts.take()
        self.master.grant_wishes(self.now)
        self.posts.tell()
        self.master.check_invariants()

    def pass_time(self, seconds: float, *speaking: str) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for node in speaking:
                self.ask(m.Heartbeat(node))
            self.ask(m.Observe())

    def client(self, name: str) -> Poster:
        self.number += 1
        return Poster(self, name, self.number)

    def there(self, *keys: bytes) -> list[bool]:
        flags = self.ask(m.Exists(list(keys))).flags
        return [bool(flag) for flag in flags]

    @property
    def figures(self) -> m.MasterStatistics:
        """Without taking what is posted."""
        return self.master.statistics()


class Poster:
    """One client of it."""

    def __init__(self, scene: PostedMaster, name: str, number: int) -> None:
        self.scene, self.name, self.number = scene, name, number
        lent = scene.posts.lend(f"{name}.client", number)
        self.box = copying.compiled.PostBox(*lent, clock_name().encode(), number)
        ring = Words(scene.posts._rings[number])
        scene.stack.callback(ring.memory.close)
        self.hand = HandClient(scene.table, ring)
        self._batch = 0

    def batch(self) -> int:
        self._batch += 1
        return self._batch

    def reserve(self) -> Place | m.Reply | None:
        """Ask for a place; what is answered if it is none."""
        generation, number = self.box.generation(), self.batch()
        reply = self.scene.ask(m.Reserve(self.name, secrets.token_bytes(16), number, NBYTES))
        if not isinstance(reply, m.Reserved):
            return reply
        where = reply.place
        return where and Place(number, generation, where.where, where.offset)

    def post(self, key: bytes, place: Place) -> bool:
        return self.scene.put(self.box, key, place.number, place.generation)

    def store(self, key: bytes, place: Place, checksum: int = 1) -> m.Reply:
        return self.scene.ask(m.Store(self.name, place.number, key, NBYTES, checksum, self.batch()))

    def order(self, count: int = 3) -> int:
        """The first number of what was ordered; 0 if it is to be asked for."""
        first = self._batch + 1
        self._batch += count
        return first if self.box.order(first, count, NBYTES) else 0

    def granted(self, first: int, generation: int) -> list[Place] | None:
        """What was opened of an order."""
        payload = self.box.granted(first, NBYTES)
        if payload is None:
            return None
        said: Granted = decode(payload)
        rows = zip(said.node_idx, said.offsets, strict=True)
        return [
            Place(first + i, generation, said.nodes[idx], at) for i, (idx, at) in enumerate(rows)
        ]

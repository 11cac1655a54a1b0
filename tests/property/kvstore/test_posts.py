"""Whatever clients and their master do: no key is given twice, no post is lost or doubled."""

from __future__ import annotations

import struct
from contextlib import ExitStack
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.key_index import make_key_index
from kvstore.master.posts import FINISH, STORE
from tests.support.posted import (
    CLOSED,
    MASK,
    POSTS_MAX,
    STATE,
    HandClient,
    PostScene,
    Words,
    needs_both_ends,
)

pytestmark = needs_both_ends

KEYS = [bytes([i]) * 16 for i in range(24)]  # of two buckets: more than there are words
CLIENTS_MAX = 5
keys = st.sampled_from(KEYS)


@dataclass(eq=False)
class Client:
    """What the model knows of one.

    Attributes:
        number: Its own.
        box: The compiled way.
        hand: Another way to the same ring, which may stop between any two steps.
        generation: Of its places.
        usable: They were not taken from it.
        posted: Not taken yet.
        claimed: By hand.
        doomed: What was claimed by hand may not be posted any more.
    """

    number: int
    box: object
    hand: HandClient
    generation: int
    usable: bool = True
    posted: list = field(default_factory=list)
    claimed: bytes | None = None
    doomed: bool = False


class PostMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.stack = ExitStack()
        self.scene = PostScene(self.stack, buckets=2)
        self.office = self.scene.office
        self.office.say(False, (1 << 63) - 1)  # it leads, and may not know all yet
        self.names = [b""] * 64
        self.index = make_key_index(self.names)
        self.index.mirror(self.office)
        self.taken: dict[bytes, int] = {}  # key -> row
        self.clients: dict[int, Client] = {}
        self.last_number = self.last_batch = 0
        self.leads = False
        self.deciding: list[bytes] | None = None

    # -- clients ------------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < CLIENTS_MAX and self.deciding is None)
    @rule()
    def come(self):
        self.last_number += 1
        number = self.last_number
        box = self.scene.box(number)
        ring = Words(self.scene.rings[number])
        self.stack.callback(ring.memory.close)
        hand = HandClient(self.scene.table, ring)
        self.clients[number] = Client(number, box, hand, box.generation())

    def draw(self, data):
        return data.draw(st.sampled_from(list(self.clients.values())))

    def is_held(self, key):
        """Whether anybody has this key, or is about to."""
        return (
            key in self.taken
            or (self.deciding is not None and key in self.deciding)
            or any(
                key in (k for k, _ in c.posted) or c.claimed == key for c in self.clients.values()
            )
        )

    def fits(self, client, key):
        """Whether nothing stands against a post, but perhaps for a crowd."""
        return (
            self.leads
            and client.usable
            and not self.is_held(key)
            and len(client.posted) < POSTS_MAX
        )

    def is_crowded(self, key):
        table = self.scene.table
        return bool(table.uncounted(key)) or all(table[at] for at in table.slots(key))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), key=keys)
    def put(self, data, key):
        client = self.draw(data)
        if client.claimed is not None:  # one put at a time
            return
        fits, crowded = self.fits(client, key), self.is_crowded(key)
        self.last_batch += 1
        posted = self.scene.put(client.box, key, self.last_batch, client.generation)
        assert posted == (fits and not crowded), (key, fits, crowded)
        if posted:
            client.posted.append((key, self.last_batch))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), sums=st.lists(st.integers(0, MASK), min_size=3, max_size=9))
    def end_batch(self, data, sums):
        """All blocks of a batch are written; one such post at a time is not taken yet."""
        client = self.draw(data)
        if client.claimed is not None:
            return
        ending = any(len(what) != 16 for what, _ in client.posted)
        fits = self.leads and client.usable and len(client.posted) < POSTS_MAX and not ending
        self.last_batch += 1
        packed = struct.pack(f"<{len(sums)}Q", *sums)
        assert client.box.finish(self.last_batch, packed, client.generation) == fits
        if fits:
            client.posted.append((packed, self.last_batch))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def renew(self, data):
        """Ask for places."""
        client = self.draw(data)
        client.generation, client.usable = client.box.generation(), True

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), key=keys)
    def claim(self, data, key):
        client = self.draw(data)
        if client.claimed is not None or not client.usable or len(client.posted) >= POSTS_MAX:
            return
        fits, crowded = self.fits(client, key), self.is_crowded(key)
        assert client.hand.claim(key) == (fits and not crowded)
        if fits and not crowded:
            client.claimed, client.doomed = key, False

    @precondition(lambda self: any(c.claimed for c in self.clients.values()))
    @rule(data=st.data(), gives_up=st.booleans())
    def end_claim(self, data, gives_up):
        client = data.draw(st.sampled_from([c for c in self.clients.values() if c.claimed]))
        key, client.claimed = client.claimed, None
        self.last_batch += 1
        if gives_up:
            client.hand.withdraw()
            return
        assert client.hand.post(key, self.last_batch) == (not client.doomed)
        if not client.doomed:
            client.posted.append((key, self.last_batch))

    # -- the master ---------------------------------------------------------------------------

    def doom(self, *clients):
        for client in clients or self.clients.values():
            client.doomed = True

    def enter(self, key):
        row = self.names.index(b"")
        self.names[row], self.taken[key] = key, row
        assert self.index.claim([key], [row]) == []

    def look(self):
        """Take what is posted: all of it, in each client's order, and none of it twice."""
        found = self.office.take() or []
        by_client = {}
        for number, kind, key, batch, *_ in found:
            assert kind == (STORE if len(key) == 16 else FINISH)
            by_client.setdefault(number, []).append((key, batch))
        assert by_client == {c.number: c.posted for c in self.clients.values() if c.posted}
        for _, kind, key, *_ in found:
            if kind == STORE:
                assert key not in self.taken, "it was another's"
                self.enter(key)
        self.office.release()
        for client in self.clients.values():
            client.posted = []

    @precondition(lambda self: self.deciding is None)
    @rule()
    def take(self):
        self.look()

    @precondition(lambda self: self.taken and self.deciding is None)
    @rule(data=st.data())
    def leave(self, data):
        key = data.draw(st.sampled_from(sorted(self.taken)))
        self.index.drop([key])
        self.names[self.taken.pop(key)] = b""

    @precondition(lambda self: self.deciding is None)
    @rule(about=st.lists(keys, max_size=4))
    def begin_request(self, about):
        self.look()
        rivals = self.office.announce(about) or set()
        claimed = {c.number for c in self.clients.values() if c.claimed in about and not c.doomed}
        owners = {n for key in about for n in self.scene.table.owners(key)} - {0}
        assert claimed <= rivals <= owners
        for number in rivals:
            self.office.stop(number)
            self.doom(self.clients[number])
        self.look()
        self.office.clear(about, rivals)
        self.deciding = about

    @precondition(lambda self: self.deciding is not None)
    @rule(data=st.data())
    def end_request(self, data):
        """Some keys become blocks, others are left, or both."""
        about = data.draw(st.sets(st.sampled_from(sorted(set(self.deciding) or KEYS))))
        gone = data.draw(st.sets(st.sampled_from(sorted(self.taken)))) if self.taken else set()
        if not self.deciding:
            about = set()
        for key in sorted(about - set(self.taken)):
            self.enter(key)
        for key in sorted(gone):
            self.index.drop([key])
            self.names[self.taken.pop(key)] = b""
        for key in sorted(about & gone):
            if data.draw(st.booleans()):
                self.enter(key)
        self.office.retract()
        self.deciding = None

    @precondition(lambda self: self.deciding is None)
    @rule()
    def revoke(self):
        self.office.revoke()
        self.doom()
        for client in self.clients.values():
            client.usable = False
        self.look()

    @rule(leads=st.booleans())
    def say(self, leads):
        self.office.say(leads, (1 << 63) - 1)
        self.leads = leads
        if not leads:
            self.doom()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def stop(self, data):
        client = self.draw(data)
        self.office.stop(client.number)
        self.doom(client)

    @precondition(lambda self: self.clients and self.deciding is None)
    @rule(data=st.data())
    def drop(self, data):
        """It is gone, or killed in the middle of a put."""
        client = self.draw(data)
        self.office.drop(client.number)
        if client.claimed is not None:
            assert client.hand.ring[STATE] & CLOSED
        assert not self.scene.put(client.box, KEYS[0], 1, client.generation)
        self.look()
        del self.clients[client.number]

    @invariant()
    def all_words_are_somebody_s(self):
        if not hasattr(self, "scene") or self.deciding is not None:
            return
        assert self.office.used == len(self.taken)
        table = self.scene.table
        for key in KEYS:
            owners = table.owners(key)
            wanted = [c.number for c in self.clients.values() if key in (k for k, _ in c.posted)]
            wanted += [c.number for c in self.clients.values() if c.claimed == key and not c.doomed]
            assert set(wanted) <= set(owners)
            assert len(wanted) <= 1
            if key not in self.taken:
                doomed = {c.number for c in self.clients.values() if c.claimed == key}
                assert set(owners) <= {*wanted, *doomed}
            else:
                assert 0 in owners or table.uncounted(key)

    def teardown(self):
        if not hasattr(self, "scene"):
            return
        if self.deciding is not None:
            self.office.retract()
        self.office.close()
        self.doom()
        for client in self.clients.values():
            assert not self.scene.put(client.box, KEYS[1], 1, client.generation)
        self.look()
        for number in list(self.clients):
            self.office.drop(number)
        self.look()
        self.index.drop(list(self.taken))
        assert (self.scene.table.words(), self.office.used) == ([], 0)
        self.index.mirror(None)
        self.stack.close()


TestPosts = PostMachine.TestCase
TestPosts.settings = settings(max_examples=60, stateful_step_count=60)

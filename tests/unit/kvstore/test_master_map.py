"""Several masters as one: all that a single one would say, and what is missing without one."""

import random
import secrets
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from configs.schema import KVStoreConfig
from kvstore import MasterRefused, MasterServer, MasterUnavailable
from kvstore.client import master_map
from kvstore.client.master_map import MasterMap
from kvstore.discovery.directory import StaticMasters
from kvstore.errors import StoreClosed
from kvstore.shards.plan import shard_of
from kvstore.shards.reads import join_leases, split_lease
from kvstore.wire import master_link
from kvstore.wire import messages as m
from kvstore.wire.master_link import MasterLink
from kvstore.wire.standing import MasterStanding
from transfer.errors import RpcTimeout

SECRET = secrets.token_bytes(16)
NBYTES = 64
SEGMENT_BYTES = 1 << 20
WAIT_S = 60.0


def fresh_keys(number: int) -> list[bytes]:
    return [secrets.token_bytes(16) for _ in range(number)]


class Masters:
    """N masters, each with a share of two nodes that exist as messages only."""

    def __init__(self, stack: ExitStack, num_shards: int, **knobs) -> None:
        knobs = {"request_timeout_s": WAIT_S, "node_silence_s": 600.0, **knobs}
        self.config = KVStoreConfig(**knobs)
        self.servers = [
            stack.enter_context(MasterServer(self.config, secret=SECRET)) for _ in range(num_shards)
        ]
        self.directory = StaticMasters([server.address for server in self.servers])
        for shard in range(num_shards):
            self.register(shard)
        self.map = MasterMap(self.directory, self.config, secret=SECRET, identity="me.client")
        stack.callback(self.map.close)

    def register(self, shard: int) -> None:
        link = MasterLink(
            self.servers[shard].address, secret=SECRET, identity="nodes", timeout_s=WAIT_S
        )
        share = SEGMENT_BYTES // len(self.servers)
        for node in ("n0", "n1"):
            request = m.Register(node, f"{node}:1", share, True, m.HeldBlocks())
            link.ask(request, m.Registered)
        link.close()

    def put(
        self, batch: int, keys: list[bytes], *, abandoned=(), told_first: bool = True
    ) -> list[m.PutOutcome]:
        sums = [int.from_bytes(key[-8:], "big") for key in keys]
        request = m.Allocate(
            client="me",
            batch=batch,
            keys=keys,
            lengths=[NBYTES] * len(keys),
            checksums=sums if told_first else [],
            abandoned=list(abandoned),
        )
        granted = self.map.ask(request, m.Allocated)
        rows = [i for i, o in enumerate(granted.outcomes) if o is m.PutOutcome.GRANTED]
        assert all((granted.node_idx[i] >= 0) == (i in rows) for i in range(len(keys)))
        exist = [o is m.PutOutcome.EXISTS for o in granted.outcomes]
        theirs = [s if e else 0 for s, e in zip(sums, exist, strict=True)]
        assert granted.checksums == ([] if told_first or not any(exist) else theirs)
        late = [] if told_first else [sums[row] for row in rows]
        finished = self.map.ask(m.Finish("me", batch, rows, checksums=late), m.Finished)
        outcomes = list(granted.outcomes)
        for row, stored in zip(rows, finished.stored, strict=True):
            outcomes[row] = m.PutOutcome.STORED if stored else m.PutOutcome.FAILED
        return outcomes

    def figures(self) -> m.MasterStatistics:
        for server in self.servers:
            server.check_invariants()
        return self.map.ask(m.Observe(), m.MasterStatistics)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_like_a_dictionary(stack, num_shards):
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    masters = Masters(stack, num_shards)
    universe, there = fresh_keys(40), set()
    for batch in range(1, 60):
        keys = rng.sample(universe, rng.randint(1, 12))
        match rng.choice(["put", "lookup", "exists", "remove"]):
            case "put":
                outcomes = masters.put(batch, keys, told_first=rng.random() < 0.5)
                expected = ["exists" if key in there else "stored" for key in keys]
                assert outcomes == expected, seed
                there.update(keys)
            case "lookup":
                located = masters.map.ask(m.Lookup("me", keys), m.Located)
                run = next((i for i, key in enumerate(keys) if key not in there), len(keys))
                assert len(located.node_idx) == len(located.offsets) == run, seed
                assert located.checksums == [int.from_bytes(k[-8:], "big") for k in keys[:run]]
                assert all(located.nodes[i].node in ("n0", "n1") for i in located.node_idx)
                if rng.random() < 0.5 and located.lease_id:
                    released = masters.map.ask(m.Release("me", [located.lease_id]), m.Done)
                    assert released.count == 1, seed
            case "exists":
                present = masters.map.ask(m.Exists(keys), m.Present)
                assert present.flags == [key in there for key in keys], seed
            case "remove":
                removed = masters.map.ask(m.Remove(keys), m.Done)
                assert removed.count == len(there.intersection(keys)), seed
                there.difference_update(keys)
    figures = masters.figures()
    assert (figures.blocks, figures.nodes) == (len(there), 2), seed


def test_what_lies_behind_the_gap_is_given_back(stack):
    masters = Masters(stack, 2)
    of = {shard: [k for k in fresh_keys(40) if shard_of(k, 2) == shard] for shard in (0, 1)}
    first, gap, behind = of[0][0], of[0][1], of[1][0]
    assert masters.put(1, [first, behind]) == ["stored"] * 2
    located = masters.map.ask(m.Lookup("me", [first, gap, behind]), m.Located)
    assert len(located.node_idx) == 1
    deadline = time.monotonic() + WAIT_S
    while masters.figures().leases != 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert masters.map.ask(m.Release("me", [located.lease_id]), m.Done).count == 1
    assert masters.figures().leases == 0


def test_leases_are_joined_and_split():
    leases = {shard: secrets.randbits(64) | 1 for shard in random.sample(range(64), 5)}
    assert split_lease(join_leases(leases)) == leases
    assert split_lease(0) == {}


def test_without_one_master_the_keys_of_the_others_go_on(stack):
    masters = Masters(stack, 2, request_timeout_s=4.0)
    keys = sorted(fresh_keys(64), key=lambda key: shard_of(key, 2))
    assert masters.put(1, keys) == ["stored"] * 64
    own = sum(shard_of(key, 2) == 0 for key in keys)
    assert 0 < own < 64
    masters.servers[1].close()
    located = masters.map.ask(m.Lookup("me", keys), m.Located)
    assert len(located.node_idx) == own
    with pytest.raises(MasterUnavailable):
        masters.map.ask(m.Lookup("me", keys[own:]), m.Located)
    with pytest.raises(MasterUnavailable):
        masters.map.ask(m.Exists(keys), m.Present)
    more = fresh_keys(16)
    outcomes = masters.put(2, more)
    for key, outcome in zip(more, outcomes, strict=True):
        assert outcome == ("failed" if shard_of(key, 2) else "stored")


def test_what_a_lost_master_granted_is_given_back_when_it_answers_again(stack):
    masters = Masters(stack, 2)
    request = m.Allocate("me", 1, fresh_keys(8), [NBYTES] * 8, [0] * 8)
    masters.map.ask(request, m.Allocated)
    assert masters.figures().open_puts == 8
    masters.put(2, [key for key in fresh_keys(30) if shard_of(key, 2) == 0], abandoned=[1])
    masters.put(3, [key for key in fresh_keys(30) if shard_of(key, 2) == 1])
    assert masters.figures().open_puts == 0


def test_a_put_waits_for_the_next_master(stack):
    masters = Masters(stack, 2)
    masters.servers[1].close()
    again = MasterServer(masters.config, secret=SECRET)
    keys = fresh_keys(8)
    outcomes = []

    asking = threading.Thread(target=lambda: outcomes.extend(masters.put(1, keys)))
    asking.start()
    time.sleep(0.3)
    assert asking.is_alive()
    stack.enter_context(again)
    masters.servers[1] = again
    masters.register(1)
    masters.directory.move([server.address for server in masters.servers])
    asking.join(WAIT_S)
    assert outcomes == ["stored"] * 8


def test_a_lookup_waits_for_a_master_that_is_told_still_what_is_there(stack):
    config = KVStoreConfig(request_timeout_s=WAIT_S, node_silence_s=600.0)
    server = stack.enter_context(MasterServer(config, secret=SECRET, rebuild_s=6.0))
    masters = MasterMap(StaticMasters([server.address]), config, secret=SECRET, identity="c")
    stack.callback(masters.close)
    key = secrets.token_bytes(16)
    held = m.HeldBlocks([key], [0], [NBYTES], [7], [False])

    def tell() -> None:
        time.sleep(0.3)
        link = MasterLink(server.address, secret=SECRET, identity="n0", timeout_s=WAIT_S)
        link.ask(m.Register("n0", "n0:1", SEGMENT_BYTES, False, held), m.Registered)
        link.close()

    telling = threading.Thread(target=tell)
    telling.start()
    assert len(masters.ask(m.Lookup("me", [key]), m.Located).node_idx) == 1
    telling.join()
    started_s = time.monotonic()
    assert masters.ask(m.Lookup("me", [b"x" * 16]), m.Located).node_idx == []
    assert time.monotonic() - started_s < WAIT_S / 2  # and then a miss is a miss
    assert server.statistics().leases == 2  # ours, and what readers of an earlier master may have


@pytest.mark.parametrize("num_shards", [1, 2])
def test_who_is_closed_says_so_instead_of_blaming_the_masters(num_shards):
    with ExitStack() as stack:
        masters = Masters(stack, num_shards)
        masters.map.ask(m.Exists(fresh_keys(3)), m.Present)
        masters.map.close()
        started_s = time.monotonic()
        for request, reply in (
            (m.Exists(fresh_keys(3)), m.Present),
            (m.Remove(fresh_keys(3), "me", ""), m.Done),
        ):
            with pytest.raises(StoreClosed) as caught:
                masters.map.ask(request, reply)
            assert not caught.value.retryable
        assert time.monotonic() - started_s < WAIT_S / 2


@pytest.mark.parametrize("num_shards", [1, 2])
def test_an_attempt_that_is_repeated_condemns_no_master(stack, monkeypatch, num_shards):
    """Only who waited in vain for the whole of its time keeps others from asking for a while."""
    silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in silent[:num_shards]]
    for module in (master_link, master_map):
        monkeypatch.setattr(module, "ATTEMPT_S", 0.05)
    seen, read = [], MasterStanding.read

    def note(standing, *args, again=False):
        try:
            return read(standing, *args, again=again)
        finally:
            seen.append((again, standing._silent_until > 0.0))

    monkeypatch.setattr(MasterStanding, "read", note)
    config = KVStoreConfig(request_timeout_s=3.0)
    pool = MasterMap(StaticMasters(addresses), config, secret=SECRET, identity="me")
    stack.callback(pool.close)
    with pytest.raises(MasterUnavailable):
        pool.ask(m.Remove(fresh_keys(1), "me", ""), m.Done)
    assert seen[0] == (True, False)
    assert all(condemned != again for again, condemned in seen), seen
    seen.clear()
    other = MasterMap(StaticMasters(addresses), config, secret=SECRET, identity="other")
    stack.callback(other.close)
    question = other.near_question(m.Exists(fresh_keys(1)))
    for again in (True, False):
        with pytest.raises(MasterUnavailable):
            question.read(RpcTimeout(addresses[0], 0.1), again=again)
    assert seen == [(True, False), (False, True)]


def test_who_does_not_know_all_masters_in_their_order_is_refused(stack):
    config = KVStoreConfig(masters={"addresses": ("a:1", "b:1")}, request_timeout_s=WAIT_S)
    servers = [
        stack.enter_context(MasterServer(config, secret=SECRET, shard=shard)) for shard in range(2)
    ]
    addresses = [server.address for server in servers]
    keys = {shard: next(k for k in fresh_keys(99) if shard_of(k, 2) == shard) for shard in range(2)}

    def present(masters: list[str], key: bytes) -> list[bool]:
        pool = MasterMap(StaticMasters(masters), config, secret=SECRET, identity=key.hex())
        stack.callback(pool.close)
        return pool.ask(m.Exists([key]), m.Present).flags

    for key in keys.values():
        assert present(addresses, key) == [False]
        with pytest.raises(MasterRefused, match="must know all of them") as caught:
            present(addresses[::-1], key)
        assert caught.value.reason == "wrong_shard"
    assert present(addresses[:1], keys[0]) == [False]
    with pytest.raises(MasterRefused, match="is of master 1 of 2, this is master 0"):
        present(addresses[:1], keys[1])
    store = m.Store(client="me", batch=1, key=keys[1], length=1, checksum=1, following=2)
    pool = MasterMap(StaticMasters(addresses[:1]), config, secret=SECRET, identity="short")
    stack.callback(pool.close)
    with pytest.raises(MasterRefused, match="this is master 0"):
        pool.ask(store, m.Stored)

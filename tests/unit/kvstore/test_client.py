"""The client against masters that are gone, slow or not on its side; engines in this process."""

from __future__ import annotations

import pickle
import secrets
import time

import numpy as np
import pytest

from configs.schema import KVStoreConfig, TransferConfig
from kvstore import (
    Fenced,
    KVStoreError,
    LeaseExpired,
    MasterServer,
    MasterUnavailable,
    PutOutcome,
    StoreClient,
    StoreNode,
)
from transfer import TransferEngine, allocate

BLOCK = 1024
WAIT_S = 30.0


class Member:
    """Engine, node and client of one would-be process."""

    def __init__(self, stack, address, secret, config, *, lends=True):
        self.name = secrets.token_hex(8)
        self.engine = TransferEngine(TransferConfig(), name=self.name, secret=secret)
        self.node = StoreNode(self.engine, address, config, secret=secret)
        self.client = StoreClient(self.engine, address, config, secret=secret, local_node=self.node)
        self.engine.on_notify(self.node.on_notify)
        self.engine.on_notify(self.client.on_notify)
        stack.enter_context(self.engine)
        if lends:
            stack.enter_context(self.node)
        else:
            stack.callback(self.node.close)
        stack.enter_context(self.client)
        self.memory = allocate(16 * BLOCK)
        stack.callback(self.memory.close)
        self.region = self.engine.register(self.memory)
        self.array = self.memory.tensor.numpy()

    def fill(self):
        self.array[:] = np.frombuffer(secrets.token_bytes(16 * BLOCK), dtype=np.uint8)
        return self.array.copy()


@pytest.fixture
def secret():
    return secrets.token_bytes(16)


def pool(stack, secret, *, members=2, **knobs):
    config = KVStoreConfig(segment_bytes=1 << 16, **{"request_timeout_s": WAIT_S, **knobs})
    master = stack.enter_context(MasterServer(config, secret=secret))
    found = [Member(stack, master.address, secret, config) for _ in range(members)]
    assert all(member.node.wait_registered(WAIT_S) for member in found)
    return master, *found


def offsets(number):
    return np.arange(number) * BLOCK


def fresh(number):
    return [secrets.token_bytes(16) for _ in range(number)]


def test_a_master_that_is_not_there_costs_one_deadline(stack, secret):
    config = KVStoreConfig(segment_bytes=1 << 16, request_timeout_s=2.0)
    member = Member(stack, "127.0.0.1:9", secret, config, lends=False)
    started = time.monotonic()
    with pytest.raises(MasterUnavailable) as caught:
        member.client.lookup_prefix(fresh(2))
    assert caught.value.retryable
    assert 1.9 < time.monotonic() - started < WAIT_S
    started = time.monotonic()
    for _ in range(20):
        with pytest.raises(MasterUnavailable):
            member.client.lookup_prefix(fresh(1))
    assert time.monotonic() - started < 20.0, "and not one for every request"
    started = time.monotonic()
    with pytest.raises(MasterUnavailable):
        member.client.put(fresh(1), member.region, [0], BLOCK)
    assert 1.9 < time.monotonic() - started < WAIT_S, "a put waits for a master until its deadline"


def test_without_the_secret_nobody_answers(stack, secret):
    master, member = pool(stack, secret, members=1)
    stranger = StoreClient(
        member.engine,
        master.address,
        KVStoreConfig(request_timeout_s=0.3),
        secret=b"wrong",
    )
    stack.enter_context(stranger)
    with pytest.raises(MasterUnavailable):
        stranger.exists(fresh(1))


def test_a_copy_that_outlasts_its_lease_does_not_count(stack, secret, monkeypatch):
    _, writer, reader = pool(stack, secret, lease_s=0.2)
    writer.fill()
    keys = fresh(2)
    writer.client.put(keys, writer.region, offsets(2), BLOCK)
    hit = reader.client.lookup_prefix(keys)
    time.sleep(0.25)
    with pytest.raises(LeaseExpired):  # seen before the copy
        reader.client.get_into(hit, reader.region, offsets(2))
    read = reader.engine.read

    def slow(*args, **options):
        time.sleep(0.25)
        return read(*args, **options)

    monkeypatch.setattr(reader.engine, "read", slow)
    hit = reader.client.lookup_prefix(keys)
    with pytest.raises(LeaseExpired) as caught:  # seen after it
        reader.client.get_into(hit, reader.region, offsets(2))
    assert caught.value.retryable


def test_a_lost_commit_is_given_back_with_the_next_put(stack, secret, monkeypatch):
    master, writer, _ = pool(stack, secret)
    writer.fill()
    ask = writer.client._link.ask

    def lose_commits(request, expected, **options):
        if type(request).__name__ == "Finish":
            raise MasterUnavailable(operation="Finish", address="x", problem="lost")
        return ask(request, expected, **options)

    monkeypatch.setattr(writer.client._link, "ask", lose_commits)
    writer.client.posts.close()  # it asks
    keys = fresh(3)
    with pytest.raises(MasterUnavailable):
        writer.client.put(keys, writer.region, offsets(3), BLOCK)
    assert master.statistics().open_bytes == 3 * BLOCK
    monkeypatch.undo()
    # The keys are still held while this request is looked at, or not: it gives them back first.
    outcomes = writer.client.put(keys, writer.region, offsets(3), BLOCK)
    assert outcomes == (PutOutcome.STORED,) * 3
    assert master.statistics().open_bytes == 0
    master.check_invariants()


def test_a_fenced_incarnation_is_told_so(stack, secret):
    master, writer, other = pool(stack, secret)
    writer.fill()
    master.fence([writer.name])
    with pytest.raises(Fenced):
        writer.client.lookup_prefix(fresh(1))
    with pytest.raises(Fenced):
        writer.client.put(fresh(1), writer.region, [0], BLOCK)
    assert other.client.exists(fresh(1)) == [False]


def test_blocks_of_many_lengths_and_alone_in_the_pool(stack, secret):
    master, member = pool(stack, secret, members=1)
    before = member.fill()
    lengths = np.array([1, 64, 65, 1000, 2048])
    starts = np.array([0, 3, 100, 1111, 5000])
    keys = fresh(5)
    outcomes = member.client.put(keys, member.region, starts, lengths, pin=True)
    assert outcomes == (PutOutcome.STORED,) * 5
    member.array[:] = 0
    hit = member.client.lookup_prefix(keys)
    assert hit.lengths.tolist() == lengths.tolist()
    assert member.client.get_into(hit, member.region, starts) == 5
    member.client.release(hit)
    for start, length in zip(starts, lengths, strict=True):
        piece = slice(start, start + length)
        assert np.array_equal(member.array[piece], before[piece])
    assert member.client.remove(keys) == 5
    assert master.statistics().free_bytes == 1 << 16


def test_arguments_that_do_not_fit_are_refused_before_anything_is_asked(stack, secret):
    master, member = pool(stack, secret, members=1)
    for starts, lengths in (([0, 1], 8), ([16 * BLOCK], 1), ([-1], 8), ([0], 0)):
        with pytest.raises(ValueError, match="block"):
            member.client.put(fresh(1), member.region, starts, lengths)
    assert member.client.put([], member.region, [], 8) == ()
    assert member.client.get_into(member.client.lookup_prefix([]), member.region, []) == 0
    assert master.statistics().open_puts == 0


def test_errors_survive_pickling():
    samples = [
        MasterUnavailable(operation="a", address="b", problem="c"),
        LeaseExpired(lease_id=3, late_s=0.5),
        Fenced(incarnation="d"),
    ]
    for error in samples:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.fields) == (type(error), str(error), error.fields)
        assert isinstance(copy, KVStoreError)

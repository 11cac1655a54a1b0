"""Bytes of events, what is kept of them, and a publisher that falls behind."""

from __future__ import annotations

import secrets
import socket

import msgspec
import pytest
from pydantic import ValidationError

from configs.kv_events import EventForm, KVEventsConfig
from configs.schema import KVStoreConfig
from kvstore import MasterServer
from kvstore.events.event_log import (
    KEYS_PER_BATCH,
    Cleared,
    EventBatch,
    EventLog,
    Medium,
    Removed,
    Stored,
    encode_changes,
)
from kvstore.events.publisher import EventPublisher
from kvstore.events.replay import ReplayBuffer
from kvstore.wire import messages as m
from transfer.errors import ControlError

ANY_PORTS = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
K1, K2 = b"1" * 16, b"2" * 16


def encode(changes, form=EventForm.ARRAY):
    return encode_changes(changes, at_s=1.5, form=form, block_tokens=16)


def test_events_as_arrays_byte_for_byte():
    changes = [Cleared(), Stored(keys=(K1,), medium=Medium.DRAM)]
    changes.append(Removed(keys=(K2,), medium=Medium.SSD))
    assert (
        encode(changes)
        == (
            b"\x93\xcb\x3f\xf8\0\0\0\0\0\0"  # [1.5,
            b"\x93\x91\xb0AllBlocksCleared"  # [[tag],
            b"\x98\xabBlockStored\x91\xc4\x10" + K1 + b"\xc0\x90\x10\xc0\xa3CPU\xc0"
            b"\x93\xacBlockRemoved\x91\xc4\x10" + K2 + b"\xa7STORAGE"
            b"\x00"  # rank 0]
        )
    )


def test_events_as_maps():
    moved = [Stored(keys=(K1, K2), medium=Medium.SSD), Removed(keys=(K1, K2), medium=Medium.DRAM)]
    seconds, events, rank = msgspec.msgpack.decode(encode([Cleared(), *moved], EventForm.MAP))
    assert (seconds, rank) == (1.5, 0)
    assert events == [
        {"type": "AllBlocksCleared"},
        {
            "type": "BlockStored",
            "block_hashes": [K1, K2],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 16,
            "lora_id": None,
            "medium": "STORAGE",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [K1, K2], "medium": "CPU"},
    ]


def test_the_log_keeps_order_and_bounds_batches():
    log = EventLog(first_sequence=7)
    for key in (K1, K2):
        log.stored([key])
    log.removed([K1])
    log.stored([K1], Medium.SSD)
    (batch,) = log.take()
    assert batch.sequence == 7
    assert batch.changes == (
        Cleared(),
        Stored(keys=(K1, K2), medium=Medium.DRAM),
        Removed(keys=(K1,), medium=Medium.DRAM),
        Stored(keys=(K1,), medium=Medium.SSD),
    )
    assert log.take() == []
    many = [i.to_bytes(16, "big") for i in range(2 * KEYS_PER_BATCH + 1)]
    for key in many:
        log.stored([key])
    batches = log.take()
    assert [batch.sequence for batch in batches] == [8, 9, 10]
    assert [len(batch.changes[0].keys) for batch in batches] == [KEYS_PER_BATCH, KEYS_PER_BATCH, 1]
    assert [key for batch in batches for key in batch.changes[0].keys] == many


def test_what_the_replay_buffer_forgot_comes_back_as_state():
    replay = ReplayBuffer(batches_max=2, bytes_max=1 << 20, encode=encode)
    told = [
        (Cleared(),),
        (Stored(keys=(K2, K1), medium=Medium.DRAM),),
        (Removed(keys=(K1,), medium=Medium.DRAM),),
        (Stored(keys=(K1,), medium=Medium.SSD),),
        (Removed(keys=(K2,), medium=Medium.DRAM),),
    ]
    for i, changes in enumerate(told[:2]):
        replay.append(EventBatch(sequence=i, changes=changes), encode(changes))
    assert [number for number, _ in replay.since(0)] == [0, 1]
    for i, changes in enumerate(told[2:], start=2):
        replay.append(EventBatch(sequence=i, changes=changes), encode(changes))
    assert [number for number, _ in replay.since(3)] == [3, 4]
    assert list(replay.since(5)) == []
    (number, state), *rest = replay.since(2)
    assert number == 2
    assert state == encode([Cleared(), Stored(keys=(K2,), medium=Medium.DRAM)])
    assert rest == [(i, encode(told[i])) for i in (3, 4)]


def test_the_replay_buffer_is_bounded_in_bytes():
    replay = ReplayBuffer(batches_max=1000, bytes_max=100, encode=encode)
    for i in range(50):
        changes = (Stored(keys=(secrets.token_bytes(16),), medium=Medium.DRAM),)
        replay.append(EventBatch(sequence=i, changes=changes), encode(changes))
    assert len(replay) == 100 // len(encode(changes))
    (_, state), *_ = replay.since(0)
    assert len(msgspec.msgpack.decode(state)[1][1][1]) == 50 - len(replay)


def test_a_publisher_that_fell_behind_refuses_until_the_state_is_told():
    publisher = EventPublisher(KVEventsConfig(queue_batches=2, **ANY_PORTS), secret=b"s")
    log = EventLog(first_sequence=0)

    def happens(key):
        log.stored([key])
        return publisher.offer(log.take())

    # Not opened: nobody takes anything out of its queue.
    assert happens(K1)
    assert happens(K1)
    assert not publisher.wants_state
    assert not happens(K2)
    assert not publisher.wants_state  # not yet: the queue is full
    publisher._queue.clear()
    assert publisher.wants_state
    assert not happens(K1), "after a gap, a change without the state would be wrong"
    log.restate((i.to_bytes(16, "big"), Medium.DRAM) for i in range(3 * KEYS_PER_BATCH))
    assert publisher.offer(log.take())
    assert not publisher.wants_state


def test_a_master_tells_its_state_after_a_gap():
    config = KVStoreConfig(events=KVEventsConfig(enabled=True, **ANY_PORTS))
    server = MasterServer(config, secret=b"s")  # not opened: its queue is ours to look into
    events = server.events
    server._step(m.Observe())
    events._queue.clear()
    held = m.HeldBlocks([K1, K2], [0, 64], [64, 64], [7, 7], [False, False])
    events._behind = True
    server._step(m.Register("a", "a:1", 1024, True, held))
    (batch,) = events._queue
    assert batch.changes == (Cleared(), Stored(keys=(K1, K2), medium=Medium.DRAM))


def test_a_taken_port_is_an_error_and_nothing_is_left():
    publisher = EventPublisher(KVEventsConfig(**ANY_PORTS), secret=b"s")
    publisher.open()
    config = KVEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint=publisher.endpoint)
    with pytest.raises(ControlError, match="bind"):
        EventPublisher(config, secret=b"s").open()
    publisher.close()
    publisher.close()
    EventPublisher(config, secret=b"s").close()


def test_a_path_on_which_another_publishes_is_not_taken_away(tmp_path):
    paths = {"endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}
    config = KVEventsConfig(**paths)
    first = EventPublisher(config, secret=b"s")
    first.open()
    with pytest.raises(ControlError, match=r"bind ipc.*in use.*\{shard\}"):
        EventPublisher(config, secret=b"s").open()
    first.close()
    (tmp_path / "e").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:  # of a process that was killed
        dead.bind(str(tmp_path / "e"))
    second = EventPublisher(config, secret=b"s")
    second.open()
    second.close()


def test_masters_with_one_configuration_publish_side_by_side(tmp_path):
    """Both tell of their own: before, the second one took the first one's path away."""
    config = KVEventsConfig(
        enabled=True,
        endpoint=f"ipc://{tmp_path}/events-{{shard}}",
        replay_endpoint=f"ipc://{tmp_path}/replay-{{shard}}",
    )
    knobs = KVStoreConfig(events=config, masters={"addresses": ["h:1", "h:2"]})
    with (
        MasterServer(knobs, secret=b"s", shard=0) as zero,
        MasterServer(knobs, secret=b"s", shard=1) as one,
    ):
        endpoints = [master.events.endpoint for master in (zero, one)]
        assert endpoints == [f"ipc://{tmp_path}/events-{shard}" for shard in (0, 1)]


@pytest.mark.parametrize(
    ("endpoint", "allowed"),
    [
        ("tcp://127.0.0.1:55{shard}7", True),
        ("tcp://127.0.0.1:5557", True),
        ("tcp://localhost:5557", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///tmp/events", True),
        ("tcp://*:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://10.0.0.1:5557", False),
    ],
)
def test_plain_stays_on_loopback_unless_told_otherwise(endpoint, allowed):
    KVEventsConfig(endpoint=endpoint)
    KVEventsConfig(endpoint=endpoint, security="plain", plain_beyond_loopback=True)
    if allowed:
        KVEventsConfig(endpoint=endpoint, security="plain")
    else:
        with pytest.raises(ValidationError, match="not on loopback"):
            KVEventsConfig(endpoint=endpoint, security="plain")
    with pytest.raises(ValidationError):
        KVEventsConfig(endpoint="udp://127.0.0.1:1")
    with pytest.raises(ValidationError, match="no port 65536"):
        KVEventsConfig(endpoint="tcp://127.0.0.1:65536")

from __future__ import annotations

import secrets
import threading

import pytest
import torch

from kvstore import MasterUnavailable, PutOutcome, StoreClosed, WriteThrough

WAIT_S = 60.0


class FakeClient:
    """Takes puts; each waits for the gate, and may be told to fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: Exception | None = None
        self.batches: list[list[bytes]] = []

    def put(self, keys, region, offsets, nbytes_each):
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self.batches.append(list(zip(keys, offsets, strict=True)))
        if self.error is not None:
            raise self.error
        return tuple(PutOutcome.STORED for _ in keys)


class Releases:
    """Counts calls of the callbacks it makes."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def make(self):
        index = len(self.counts)
        self.counts.append(0)

        def release() -> None:
            self.counts[index] += 1

        return release


@pytest.fixture
def client():
    return FakeClient()


def fresh(number):
    return [secrets.token_bytes(16) for _ in range(number)]


def make(client, queue_blocks=10):
    region = torch.empty(0)  # the fake looks at nothing
    return WriteThrough(client, region, block_bytes=64, queue_blocks=queue_blocks)


def test_everything_is_put_and_released_once(client):
    releases = Releases()
    keys = fresh(9)
    with make(client) as writer:
        for i in range(3):
            taken = writer.submit(keys[3 * i : 3 * i + 3], [0, 64, 128], release=releases.make())
            assert taken == 3
        assert writer.flush(WAIT_S)
        assert releases.counts == [1, 1, 1]
        assert [key for batch in client.batches for key, _ in batch] == keys
        figures = writer.statistics()
        assert (figures.submitted, figures.stored, figures.waiting) == (9, 9, 0)


def test_a_full_queue_takes_the_root_and_never_blocks(client):
    releases = Releases()
    client.gate.clear()
    with make(client, queue_blocks=4) as writer:
        keys = fresh(6)
        assert writer.submit(keys, range(6), release=releases.make()) == 4
        assert client.entered.wait(WAIT_S)
        assert writer.submit(fresh(1), [0], release=releases.make()) == 0
        assert releases.counts == [0, 1], "what is being written is kept, what is skipped is not"
        assert not writer.flush(0.01)
        client.gate.set()
        assert writer.flush(WAIT_S)
    assert releases.counts == [1, 1]
    assert [key for key, _ in client.batches[0]] == keys[:4]
    assert writer.statistics().skipped == 3


def test_what_waits_is_batched_without_doubles(client):
    client.gate.clear()
    first, second, third = fresh(3)
    with make(client) as writer:
        writer.submit([first], [0])
        assert client.entered.wait(WAIT_S)
        writer.submit([second, third], [64, 128])
        writer.submit([third, second], [192, 256])
        client.gate.set()
        assert writer.flush(WAIT_S)
    assert [sorted(key for key, _ in batch) for batch in client.batches] == [
        [first],
        sorted([second, third]),
    ]


def test_a_failing_store_is_survived(client, caplog):
    releases = Releases()
    client.error = MasterUnavailable(operation="Allocate", address="x", problem="gone")
    with make(client) as writer:
        for _ in range(3):
            writer.submit(fresh(2), [0, 64], release=releases.make())
            assert writer.flush(WAIT_S)
        client.error = None
        writer.submit(fresh(2), [0, 64], release=releases.make())
        assert writer.flush(WAIT_S)
        figures = writer.statistics()
        assert (figures.stored, figures.not_stored) == (2, 6)
    assert releases.counts == [1, 1, 1, 1]
    assert len([r for r in caplog.records if "fails" in r.message]) == 1, "logged on change only"


def test_an_unexpected_failure_is_raised_at_the_next_call(client):
    releases = Releases()
    client.error = ZeroDivisionError("bug")
    with make(client) as writer:
        writer.submit(fresh(1), [0], release=releases.make())
        assert writer.flush(WAIT_S)
        writer._thread.join(WAIT_S)
        with pytest.raises(StoreClosed, match="bug"):
            writer.submit(fresh(1), [0], release=releases.make())
    assert releases.counts == [1, 1]


def test_one_bad_release_does_not_keep_the_others(client):
    releases = Releases()
    client.gate.clear()
    writer = make(client)
    with writer:
        writer.submit(fresh(1), [0], release=releases.make())
        assert client.entered.wait(WAIT_S)
        writer.submit(fresh(1), [0], release=lambda: 1 / 0)
        writer.submit(fresh(1), [0], release=releases.make())
        client.gate.set()
        assert writer.flush(WAIT_S)
    assert releases.counts == [1, 1]


def test_close_gives_everything_back(client):
    releases = Releases()
    client.gate.clear()
    writer = make(client)
    writer.open()
    for _ in range(4):
        writer.submit(fresh(2), [0, 64], release=releases.make())
    assert client.entered.wait(WAIT_S)
    threading.Timer(0.1, client.gate.set).start()
    writer.close()
    writer.close()
    assert releases.counts == [1, 1, 1, 1]
    with pytest.raises(StoreClosed, match="closed"):
        writer.submit(fresh(1), [0], release=releases.make())
    assert releases.counts[-1] == 1

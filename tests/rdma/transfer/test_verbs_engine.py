"""The engine over RDMA: chosen, explained, written through, fenced, killed, closed."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import TransferBackend
from tests.support.engines import (
    BOTH,
    new_engine,
    offer,
)
from tests.support.fabric import lose_silently, pull, repair, slow_down
from tests.support.waits import eventually
from transfer import (
    Access,
    AccessRefused,
    DeviceUnavailable,
    HandshakeRefused,
    PeerLost,
    RegionKey,
    RegionUnknown,
    TransferEngine,
)
from transfer.pieces import copy_pieces

MIB = 1 << 20
SOON_S = 60.0
OURS, THEIRS = ("rxe0", "rxe1"), ("rxe2", "rxe3")
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def engines() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    with new_engine("verbs", devices=OURS) as one, new_engine("verbs", devices=THEIRS) as other:
        one.connect(other.address)
        yield one, other


def random_tensor(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8))


def test_it_is_chosen_and_explained(engines: Any) -> None:
    one, other = engines
    assert one.peer(other.name).backend == other.peer(one.name).backend == "verbs"
    text = str(one.explain(other.name))
    assert "verbs" in text
    assert "not shared_memory: this engine's configuration excludes it" in text
    source, target = one.register(random_tensor(MIB)), other.register(random_tensor(MIB))
    one.write(other.name, source, offer(other, target, one), 0, 0, MIB).wait()
    assert "rail verbs rxe0->rxe2" in str(one.explain(other.name))
    assert one.statistics().backends["verbs"].bytes_written == MIB


def test_auto_prefers_mapped_memory_and_says_so() -> None:
    with new_engine("auto", devices=OURS) as one, new_engine("auto", devices=THEIRS) as other:
        one.connect(other.address)
        assert one.peer(other.name).backend == "shared_memory"
        assert "not verbs: a copy in memory is cheaper" in str(one.explain(other.name))


def test_auto_takes_rdma_where_memory_is_not_shared() -> None:
    with new_engine("auto", devices=OURS) as one, new_engine("verbs", devices=THEIRS) as other:
        one.connect(other.address)
        assert one.peer(other.name).backend == "verbs"


def test_tcp_takes_over_where_the_cards_do_not_reach_each_other(
    fabric: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter(("one host", "another"))
    monkeypatch.setattr("transfer.connections.rendezvous.host_identity", lambda: next(hosts))
    for i in (2, 3):
        lose_silently(i)
        subprocess.run(["ip", "neigh", "flush", "to", f"10.99.0.{i + 1}"], check=True)
    with new_engine("auto", devices=OURS) as one, new_engine("auto", devices=THEIRS) as other:
        one.connect(other.address, timeout_s=SOON_S)
        assert one.peer(other.name).backend == "tcp"
        assert "not verbs: no rail between" in str(one.explain(other.name))
        window = torch.zeros(MIB, dtype=torch.uint8)
        key = offer(other, other.register(window), one)
        source = one.register(random_tensor(MIB))
        one.write(other.name, source, key, 0, 0, MIB, immediate=1).wait()
        other.expect({(one.name, 1): 1}, timeout_s=SOON_S)
        assert torch.equal(window, source.tensor)


def test_tcp_takes_over_in_the_middle_and_gives_back(
    fabric: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter(("one host", "another"))
    monkeypatch.setattr("transfer.connections.rendezvous.host_identity", lambda: next(hosts))
    with new_engine("auto", devices=OURS) as one, new_engine("auto", devices=THEIRS) as other:
        one.connect(other.address, timeout_s=SOON_S)
        assert one.peer(other.name).backend == "verbs"
        nbytes = 8 * MIB
        window = torch.zeros(nbytes, dtype=torch.uint8)
        key = offer(other, other.register(window), one)
        source = one.register(random_tensor(nbytes))
        one.write(other.name, source, key, 0, 0, 64).wait()
        slow_down(0, 1)
        options = {"timeout_s": SOON_S * 2}
        first = one.write(other.name, source, key, 0, 0, nbytes, immediate=3, **options)
        eventually(lambda: first.bytes_moved > 0, "some bytes")
        pull(0)
        pull(1)
        assert not first.done(), "the fault must hit in the middle"
        second = one.write(other.name, source, key, 0, 0, 4096, immediate=4, **options)
        for transfer in (first, second):
            transfer.wait()
            assert transfer.backend == "tcp"
        other.expect({(one.name, 3): 1, (one.name, 4): 1}, timeout_s=SOON_S)
        assert not other.arrived({(one.name, 3): 1})
        assert not other.arrived({(one.name, 4): 1})
        assert torch.equal(window, source.tensor)
        print(one.explain(other.name))
        repair()
        deadline = time.monotonic() + SOON_S
        third = one.write(other.name, source, key, 0, 0, 4096, immediate=5, **options)
        while third.backend != "verbs":
            third.wait()
            assert time.monotonic() < deadline, "the cards are back"
            time.sleep(0.2)
            third = one.write(other.name, source, key, 0, 0, 4096, **options)
        third.wait()


def test_what_cannot_be_had_is_refused_at_once() -> None:
    with pytest.raises(DeviceUnavailable, match="rxe9"):
        new_engine("auto", devices=("rxe9",)).open()
    with (
        new_engine("verbs", devices=OURS) as one,
        new_engine("tcp") as other,
        pytest.raises(HandshakeRefused),
    ):
        one.connect(other.address)


def test_bytes_and_immediates_both_ways(engines: Any) -> None:
    one, other = engines
    nbytes = 4 * MIB
    for user, owner in ((one, other), (other, one)):
        source, window = random_tensor(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
        key = offer(owner, owner.register(window), user)
        region = user.register(source)
        user.write(owner.name, region, key, 0, 0, nbytes, immediate=1).wait()
        owner.expect({(user.name, 1): 1}, timeout_s=SOON_S)
        assert torch.equal(window, source)
        back = torch.zeros(nbytes, dtype=torch.uint8)
        offsets = np.random.default_rng().permutation(256) * (nbytes // 256)
        user.read(owner.name, user.register(back), key, offsets, offsets, nbytes // 256).wait()
        assert torch.equal(back, source)


def test_threads_share_the_rails(engines: Any) -> None:
    one, other = engines
    count, nbytes = 4, 64 << 10
    window = torch.zeros(count * nbytes, dtype=torch.uint8)
    key = offer(other, other.register(window), one)
    sources = [random_tensor(nbytes) for _ in range(count)]
    failures: list[BaseException] = []

    def write(i: int) -> None:
        try:
            region = one.register(sources[i])
            for n in range(20):
                length = nbytes - 17 * n
                one.write(other.name, region, key, 0, i * nbytes, length, immediate=i).wait()
            one.write(other.name, region, key, 0, i * nbytes, nbytes).wait()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=write, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    other.expect({(one.name, i): 20 for i in range(count)}, timeout_s=SOON_S)
    assert torch.equal(window, torch.cat(sources))


def test_withdrawn_and_released_keys_are_refused(engines: Any) -> None:
    one, other = engines
    window = torch.zeros(4096, dtype=torch.uint8)
    region, source = other.register(window), one.register(random_tensor(4096))
    first, second = offer(other, region, one), offer(other, region, one)
    readable = offer(other, region, one, Access.READ)
    one.write(other.name, source, first, 0, 0, 64).wait()
    one.read(other.name, source, second, 0, 0, 64).wait()
    with pytest.raises(AccessRefused):
        one.write(other.name, source, readable, 0, 0, 64)
    other.withdraw(first)
    window.zero_()
    with pytest.raises(RegionUnknown):
        one.write(other.name, source, first, 0, 0, 64).wait()
    other.release(region)
    for key in (second, readable):
        with pytest.raises(RegionUnknown):
            one.read(other.name, source, key, 0, 0, 64).wait()
    assert not window.any()
    key = offer(other, region, one)
    one.write(other.name, source, key, 0, 0, 4096).wait()
    assert torch.equal(window, source.tensor)


def test_a_fenced_peer_writes_nothing_more(engines: Any, fabric: None) -> None:
    one, other = engines
    window = torch.zeros(8 * MIB, dtype=torch.uint8)
    key = offer(other, other.register(window), one)
    source = one.register(torch.ones(8 * MIB, dtype=torch.uint8))
    one.write(other.name, source, key, 0, 0, 8).wait()
    slow_down(0, 1)
    transfer = one.write(other.name, source, key, 0, 0, 8 * MIB)
    eventually(lambda: transfer.bytes_moved > 0, "some bytes")
    other.disconnect(one.name, reason="test")
    seen = window.clone()
    with pytest.raises(PeerLost):
        transfer.wait()
    assert 0 < int(seen.sum()) < 8 * MIB, "the fault must hit in the middle"
    time.sleep(0.5)
    assert torch.equal(window, seen)


def _victim(pipe: Connection) -> None:
    with new_engine("verbs", devices=THEIRS) as engine:
        pipe.send((engine.name, engine.address))
        user = pipe.recv()
        region = engine.register(torch.zeros(64 * MIB, dtype=torch.uint8))
        pipe.send(engine.offer(region, to=user, access=BOTH).encode())
        pipe.recv()


def test_a_killed_peer_is_lost_at_once() -> None:
    pipe, other = FORK.Pipe()
    process = FORK.Process(target=_victim, args=(other,))
    process.start()
    other.close()
    with new_engine("verbs", devices=OURS) as engine:
        name, address = pipe.recv()
        pipe.send(engine.name)
        engine.connect(address)
        key = RegionKey.decode(pipe.recv())
        source = engine.register(torch.zeros(64 * MIB, dtype=torch.uint8))
        engine.write(name, source, key, 0, 0, 4096, immediate=1).wait()
        transfer = engine.write(name, source, key, 0, 0, 64 * MIB)
        assert not transfer.done()
        os.kill(process.pid or 0, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(PeerLost):
            transfer.wait()
        elapsed_s = time.monotonic() - started
        print(f"lost after {elapsed_s:.3f} s")
        assert elapsed_s < 10, "not its deadline, but its end tells"
    process.join()
    pipe.close()


def test_a_forked_child_leaves_the_parents_queue_pairs_alone(engines: Any) -> None:
    one, other = engines
    window = torch.zeros(4096, dtype=torch.uint8)
    key = offer(other, other.register(window), one)
    source = one.register(random_tensor(4096))
    one.write(other.name, source, key, 0, 0, 64).wait()
    child = FORK.Process(target=time.sleep, args=(0.0,))
    child.start()
    child.join()
    assert child.exitcode == 0
    one.write(other.name, source, key, 0, 0, 4096).wait()
    assert torch.equal(window, source.tensor)


def test_a_cut_rail_fails_no_transfer(engines: Any, fabric: None) -> None:
    one, other = engines
    nbytes = 8 * MIB
    window = torch.zeros(nbytes, dtype=torch.uint8)
    key = offer(other, other.register(window), one)
    source = one.register(random_tensor(nbytes))
    one.write(other.name, source, key, 0, 0, nbytes).wait()
    window.zero_()
    slow_down(0, 1)
    transfer = one.write(other.name, source, key, 0, 0, nbytes, immediate=3)
    eventually(lambda: transfer.bytes_moved > 0, "some bytes")
    pull(1)
    assert not transfer.done(), "the fault must hit in the middle"
    transfer.wait()
    other.expect({(one.name, 3): 1}, timeout_s=SOON_S)
    assert torch.equal(window, source.tensor)
    assert sum(rail.failures for rail in one.statistics().rails) > 0
    assert not other.arrived({(one.name, 3): 1})


def test_connecting_again_and_again_leaves_nothing() -> None:
    seed = secrets.randbits(8)
    counts = []
    for i in range(50):
        with (
            new_engine("verbs", devices=OURS[:1]) as one,
            new_engine("verbs", devices=THEIRS[:1]) as other,
        ):
            one.connect(other.address)
            window = torch.zeros(64, dtype=torch.uint8)
            key = offer(other, other.register(window), one)
            source = one.register(torch.full((64,), seed, dtype=torch.uint8))
            one.write(other.name, source, key, 0, 0, 64, immediate=1).wait()
            other.expect({(one.name, 1): 1}, timeout_s=SOON_S)
            assert window.tolist() == [seed] * 64
        if i in (4, 49):
            counts.append((len(os.listdir("/proc/self/fd")), _resources()))
    assert counts[1][0] <= counts[0][0]
    assert counts[1][1] == counts[0][1]


def _resources() -> str:
    return subprocess.run(["rdma", "resource"], capture_output=True, text=True, check=True).stdout


class FakeDeviceMemory:
    """A `Storage` of host memory that claims to be a GPU's, and notes whether it was copied."""

    kind = "cuda:0"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.nbytes, self.address = tensor, tensor.numel(), tensor.data_ptr()
        self.copied = False

    def fetch(self, target: Any, pieces: Any, deadline: float, done: Any) -> None:
        self.copied = True
        copy_pieces(target, self.tensor.numpy(), pieces)
        done(None)

    def store(self, source: Any, pieces: Any, deadline: float, done: Any) -> None:
        self.copied = True
        copy_pieces(self.tensor.numpy(), source, pieces)
        done(None)


def test_device_memory_is_reached_by_the_cards(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyverbs.mr import MR

    one, other = engines
    waited = []
    verbs = "transfer.backends.verbs"
    monkeypatch.setattr(f"{verbs}.device_memory.await_queued_work", waited.append)
    monkeypatch.setattr(
        f"{verbs}.domain.register_device_memory",
        lambda domain, start, nbytes, rights: (MR(domain, nbytes, rights, address=start), start),
    )
    source, window = random_tensor(MIB), torch.zeros(MIB, dtype=torch.uint8)
    ours, theirs = FakeDeviceMemory(source), FakeDeviceMemory(window)
    key = offer(other, other.register(theirs), one)
    one.write(other.name, one.register(ours), key, 0, 0, MIB).wait()
    assert torch.equal(window, source)
    back = torch.zeros(MIB, dtype=torch.uint8)
    one.read(other.name, one.register(back), key, 0, 0, MIB).wait()
    assert torch.equal(back, source)
    assert len(waited) == 2
    assert (ours.copied, theirs.copied) == (False, False)


def test_device_memory_that_cannot_be_registered_goes_through_buffers(engines: Any) -> None:
    """No CUDA driver is here: the real registration fails, at the owner and at us."""
    one, other = engines
    source, window = random_tensor(MIB), torch.zeros(MIB, dtype=torch.uint8)
    ours, theirs = FakeDeviceMemory(source), FakeDeviceMemory(window)
    key = offer(other, other.register(theirs), one)
    one.write(other.name, one.register(ours), key, 0, 0, MIB).wait()
    assert torch.equal(window, source)
    assert (ours.copied, theirs.copied) == (True, True)


def test_the_configuration_names_the_backend() -> None:
    assert TransferBackend("verbs") is TransferBackend.VERBS

"""Device memory without a device: handles, counts, copies, fall-backs, on a fake driver."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.engines import BOTH, engine_pair, new_engine, offer
from tests.support.fake_cuda import FakeCuda, FakeHost
from transfer import Access, DeviceUnavailable, EngineClosed, ProtocolViolation, TransferEngine
from transfer.backends import cuda_runtime
from transfer.backends.cuda_ipc import CudaWindows, Place, place_of
from transfer.backends.cuda_memory import PINNED_BYTES, CudaDevices, CudaMemory
from transfer.pieces import make_pieces
from transfer.storage.storage import Waiter

NBYTES = PINNED_BYTES + 12_345
SOON_S = 60.0


@pytest.fixture
def host() -> FakeHost:
    return FakeHost(["gpu-a", "gpu-b", "gpu-c"], islands=[{"gpu-a", "gpu-b"}, {"gpu-c"}])


@pytest.fixture
def ours(host: FakeHost) -> FakeCuda:
    return FakeCuda(host, ["gpu-b", "gpu-a", "gpu-c"])


@pytest.fixture
def devices(ours: FakeCuda) -> Iterator[CudaDevices]:
    devices = CudaDevices(lambda: ours)
    yield devices
    devices.close()
    assert not ours.streams
    assert not ours.events, "every event is freed"


def random_bytes(nbytes: int = NBYTES) -> np.ndarray:
    return np.frombuffer(secrets.token_bytes(nbytes), dtype=np.uint8).copy()


def memory_on(devices: CudaDevices, cuda: FakeCuda, ordinal: int) -> tuple[CudaMemory, np.ndarray]:
    array = cuda.allocate(ordinal, NBYTES)
    keep = torch.from_numpy(array)
    return CudaMemory(devices.get(ordinal), array.ctypes.data, NBYTES, keep), array


def waiter() -> tuple[Waiter, float]:
    deadline = time.monotonic() + SOON_S
    return Waiter("cuda", "copy", deadline), deadline


def test_copies_between_host_and_device(devices: CudaDevices, ours: FakeCuda) -> None:
    memory, array = memory_on(devices, ours, 1)
    assert memory.kind == "cuda:1"
    data, back = random_bytes(), np.zeros(NBYTES, dtype=np.uint8)
    marks = np.unique(np.random.default_rng().integers(0, NBYTES, size=3000))
    lengths = np.diff(marks, append=NBYTES)
    order = np.random.default_rng().permutation(len(marks))
    pieces = make_pieces(np.cumsum(lengths[order]) - lengths[order], marks[order], lengths[order])
    end, deadline = waiter()
    memory.store(data, pieces, deadline, end.end)
    end.wait()
    expected = np.zeros(NBYTES, dtype=np.uint8)
    for s, t, n in zip(pieces.source_offsets, pieces.target_offsets, pieces.lengths, strict=True):
        expected[t : t + n] = data[s : s + n]
    assert np.array_equal(array, expected)
    end, deadline = waiter()
    memory.fetch(back, make_pieces(0, 0, NBYTES), deadline, end.end)
    end.wait()
    assert np.array_equal(back, array)


def test_a_failing_copy_leaves_nothing_queued(devices: CudaDevices, ours: FakeCuda) -> None:
    memory, _ = memory_on(devices, ours, 0)
    ours.fail_copies = True
    end, deadline = waiter()
    memory.store(random_bytes(), make_pieces(0, 0, NBYTES), deadline, end.end)
    with pytest.raises(DeviceUnavailable, match="refused"):
        end.wait()
    assert not any(ours.streams.values())


def test_devices_that_reach_one_another(devices: CudaDevices, ours: FakeCuda) -> None:
    first, array = memory_on(devices, ours, 0)
    second, other = memory_on(devices, ours, 1)
    island, _ = memory_on(devices, ours, 2)
    assert first.reaches(second)
    assert not first.reaches(island)
    assert not first.reaches(object())
    array[:] = random_bytes()
    end, deadline = waiter()
    first.move_to(second, make_pieces(0, 0, NBYTES), deadline, end.end)
    end.wait()
    assert np.array_equal(array, other)


@pytest.fixture
def windows(devices: CudaDevices) -> Iterator[CudaWindows]:
    windows = CudaWindows(devices)
    yield windows
    windows.close()


@pytest.fixture
def peer(host: FakeHost) -> Iterator[tuple[FakeCuda, CudaDevices]]:
    cuda = FakeCuda(host, ["gpu-a", "gpu-c"])
    devices = CudaDevices(lambda: cuda)
    yield cuda, devices
    devices.close()


def test_windows_of_one_allocation_share_it(
    windows: CudaWindows, ours: FakeCuda, peer: tuple[FakeCuda, CudaDevices]
) -> None:
    cuda, devices = peer
    memory, array = memory_on(devices, cuda, 0)
    places = [place_of(memory, offset).encode() for offset in (0, 1000)]
    first = windows.get("peer", b"1", 500, lambda: places[0])
    second = windows.get("peer", b"2", 500, lambda: places[1])
    assert first is windows.get("peer", b"1", 500, lambda: pytest.fail("asked again"))
    assert second.address - first.address == 1000
    assert second.kind == "cuda:1", "the same device has another ordinal here"
    assert ours.num_opens == 1
    end, deadline = waiter()
    data = random_bytes(500)
    second.store(data, make_pieces(0, 0, 500), deadline, end.end)
    end.wait()
    assert np.array_equal(array[1000:1500], data)
    windows.drop("peer", b"1")
    windows.drop("peer", b"1")
    assert ours.opened
    windows.drop("peer", b"2")
    assert not ours.opened
    end, deadline = waiter()
    with pytest.raises(DeviceUnavailable, match="closed"):
        second.store(data, make_pieces(0, 0, 500), deadline, end.end)
    windows.get("peer", b"3", 500, lambda: places[0])
    assert ours.num_opens == 2
    windows.forget("nobody")
    windows.forget("peer")
    assert not ours.opened


def test_a_window_is_not_closed_under_a_copy(
    windows: CudaWindows,
    ours: FakeCuda,
    peer: tuple[FakeCuda, CudaDevices],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, devices = peer
    memory, _ = memory_on(devices, cuda, 0)
    window = windows.get("peer", b"1", 500, lambda: place_of(memory, 0).encode())
    go, entered = threading.Event(), threading.Event()
    copy = ours.synchronize

    def slow(device: int, stream: int) -> None:
        entered.set()
        assert go.wait(SOON_S)
        copy(device, stream)

    monkeypatch.setattr(ours, "synchronize", slow)
    end, deadline = waiter()
    window.store(random_bytes(500), make_pieces(0, 0, 500), deadline, end.end)
    assert entered.wait(SOON_S)
    windows.forget("peer")
    assert ours.opened, "the copy is under way"
    go.set()
    end.wait()
    assert not ours.opened


def test_what_cannot_be_opened(
    windows: CudaWindows, devices: CudaDevices, ours: FakeCuda, host: FakeHost
) -> None:
    own, _ = memory_on(devices, ours, 0)
    with pytest.raises(DeviceUnavailable, match="own process"):
        windows.get("peer", b"1", 5, lambda: place_of(own, 0).encode())
    hidden = Place("gpu-z", bytes(64), 0).encode()
    with pytest.raises(DeviceUnavailable, match="not visible"):
        windows.get("peer", b"1", 5, lambda: hidden)
    for nonsense in (b"", b"\x93", secrets.token_bytes(40), Place("u", bytes(64), 0).encode()[:-1]):
        with pytest.raises(ProtocolViolation):
            windows.get("peer", b"1", 5, lambda nonsense=nonsense: nonsense)
    with pytest.raises(DeviceUnavailable, match="does not see"):
        devices.get(3)
    devices.close()
    with pytest.raises(EngineClosed):
        devices.get(0)


def test_a_machine_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda_runtime, "_loaded", None)
    with pytest.raises(DeviceUnavailable, match=r"no cuda.* here"):
        CudaDevices().get(0)
    with pytest.raises(DeviceUnavailable, match=r"device is seen|without CUDA"):
        cuda_runtime.load()


def test_other_devices_are_refused() -> None:
    with new_engine() as engine, pytest.raises(ValueError, match="meta"):
        engine.register(torch.zeros(4, device="meta"))


def give(engine: TransferEngine, cuda: FakeCuda, ordinal: int) -> tuple[object, np.ndarray]:
    """Register fake device memory as a CUDA tensor would be."""
    engine._staging.devices._load = lambda: cuda
    memory, array = memory_on(engine._staging.devices, cuda, ordinal)
    return engine.register(memory), array


@pytest.mark.parametrize("backend", ["shared_memory", "tcp"])
@pytest.mark.parametrize("near", ["host", "cuda"])
def test_engines_move_device_memory(host: FakeHost, backend: str, near: str) -> None:
    mine, theirs = FakeCuda(host, ["gpu-b", "gpu-a"]), FakeCuda(host, ["gpu-a"])
    with engine_pair(backend) as (a, b):
        region, array = give(b, theirs, 0)
        key = offer(b, region, a)
        assert key.kind == "cuda:0"
        own, data = give(a, mine, 0)
        if near == "host":
            data = random_bytes()
            own = a.register(torch.from_numpy(data))
        data[:] = random_bytes()
        a.write(b.name, own, key, 7, 1000, 90_000, immediate=5).wait(SOON_S)
        b.expect({(a.name, 5): 1}, timeout_s=SOON_S)
        assert np.array_equal(array[1000:91_000], data[7:90_007])
        array[:] = random_bytes()
        a.read(b.name, own, key, 0, 0, NBYTES).wait(SOON_S)
        assert np.array_equal(array, data)
        # On one host the copy engine does it; elsewhere the owner helps.
        assert bool(mine.num_opens) == (backend == "shared_memory")
        b.withdraw(key)
    assert not mine.opened
    assert not mine.streams
    assert not theirs.streams


def test_memory_that_may_only_be_read_is_not_opened(host: FakeHost) -> None:
    mine, theirs = FakeCuda(host, ["gpu-a"]), FakeCuda(host, ["gpu-a"])
    with engine_pair("shared_memory") as (a, b):
        region, array = give(b, theirs, 0)
        array[:] = random_bytes()
        own, data = give(a, mine, 0)
        a.read(b.name, own, offer(b, region, a, Access.READ), 0, 0, NBYTES).wait(SOON_S)
        assert np.array_equal(array, data)
        assert not mine.num_opens


@pytest.mark.parametrize("sees", ["gpu-c", "gpu-b"])
def test_a_device_that_is_not_visible_here_is_moved_by_its_owner(host: FakeHost, sees: str) -> None:
    mine, theirs = FakeCuda(host, [sees]), FakeCuda(host, ["gpu-a"])
    with engine_pair("shared_memory") as (a, b):
        region, array = give(b, theirs, 0)
        own, data = give(a, mine, 0)
        data[:] = random_bytes()
        a.write(b.name, own, offer(b, region, a), 0, 0, NBYTES).wait(SOON_S)
        assert np.array_equal(array, data)
        assert not mine.num_opens


def test_local_copies_between_devices(host: FakeHost) -> None:
    cuda = FakeCuda(host, ["gpu-a", "gpu-b", "gpu-c"])
    with new_engine() as engine:
        first, data = give(engine, cuda, 0)
        data[:] = random_bytes()
        for ordinal in (1, 2):  # within reach, and not
            other, array = give(engine, cuda, ordinal)
            key = engine.offer(other, to=engine.name, access=BOTH)
            engine.write(engine.name, first, key, 0, 0, NBYTES).wait(SOON_S)
            assert np.array_equal(array, data)

"""Large copies that two threads share: the same bytes and sums, whoever does which part."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import xxhash

from configs.schema import KVStoreConfig, TransferConfig
from kvstore import MasterServer, StoreClient, StoreNode, copying
from tests.support.forks import in_a_child
from transfer import TransferEngine

if not copying.COMPILED:
    pytest.skip("kvstore._native is not built: no C compiler", allow_module_level=True)
from kvstore import _native

NEVER, WHERE_IDLE, ALWAYS = 0, 1, 2
SHARED_BYTES_MIN = 8 << 20
SOON_S = 60.0
Columns = tuple[copying.Ints, copying.Ints, copying.Ints]


@pytest.fixture
def always() -> Iterator[None]:
    _native.share_copies(ALWAYS)
    yield
    _native.share_copies(WHERE_IDLE)


def parts_done() -> int:
    """Parts that a second core has done."""
    return _native.share_copies(ALWAYS)


def until_shared(once: Callable[[], None]) -> None:
    """Do it again and again until the second thread has had its share."""
    before, end_s = parts_done(), time.monotonic() + SOON_S
    while parts_done() == before:
        assert time.monotonic() < end_s, "nobody ever helped"
        once()


def one_long(rng: np.random.Generator) -> Columns:
    nbytes = int(rng.integers(SHARED_BYTES_MIN, 16 << 20))
    place, start = (int(number) for number in rng.integers(0, 300, 2))
    aligned = bool(rng.integers(2))
    return np.array([64 if aligned else place]), np.array([start]), np.array([nbytes])


def few_long(rng: np.random.Generator) -> Columns:
    lengths = rng.integers(SHARED_BYTES_MIN + 1, 10 << 20, 2)
    starts = np.cumsum(lengths) - lengths
    return starts[::-1] + 3 + np.array([lengths[1] - lengths[0], 0]), starts, lengths


def many_short(rng: np.random.Generator) -> Columns:
    lengths = rng.integers(60_000, 90_000, 200)
    starts = np.cumsum(lengths) - lengths
    return starts + 5 * np.arange(200), starts, lengths


class Memory:
    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        self.source = self.rng.integers(0, 256, 20 << 20, dtype=np.uint8)
        self.target = np.zeros(24 << 20, dtype=np.uint8)

    def copy(self, make: Callable[[np.random.Generator], Columns]) -> None:
        """Copy once, past the caches or not, and compare with numpy and xxhash."""
        places, starts, lengths = make(self.rng)
        self.target[:] = int(self.rng.integers(256))
        expected = self.target.copy()
        for place, start, nbytes in zip(places, starts, lengths, strict=True):
            expected[place : place + nbytes] = self.source[start : start + nbytes]
        found = copying.copy_with_checksums(
            self.target, self.source, places, starts, lengths,
            stream_bytes=int(self.rng.choice([0, 1 << 40])),
        )  # fmt: skip
        assert np.array_equal(self.target, expected), (places, starts, lengths)
        sums = [
            xxhash.xxh3_64_intdigest(self.source[start : start + nbytes].data)
            for start, nbytes in zip(starts, lengths, strict=True)
        ]
        assert found == sums
        assert copying.checksums_of(self.source, starts, lengths) == sums


@pytest.mark.parametrize("make", [one_long, few_long, many_short])
@pytest.mark.usefixtures("always")
def test_bytes_and_sums_are_those_of_one_thread(make: Callable[..., Columns]) -> None:
    memory = Memory()
    for _ in range(3):
        until_shared(lambda: memory.copy(make))


@pytest.mark.usefixtures("always")
def test_one_piece_into_memory_that_is_not_read_at_once() -> None:
    memory = Memory()

    def copy() -> None:
        nbytes = int(memory.rng.integers(SHARED_BYTES_MIN, 16 << 20))
        found = copying.copy_with_checksum(memory.target, 129, memory.source, 64, nbytes)
        assert found == xxhash.xxh3_64_intdigest(memory.source[64 : 64 + nbytes].data)
        assert np.array_equal(memory.target[129 : 129 + nbytes], memory.source[64 : 64 + nbytes])

    until_shared(copy)


@pytest.mark.usefixtures("always")
def test_a_piece_longer_than_what_is_shared_at_a_time() -> None:
    rng = np.random.default_rng()
    source = rng.integers(0, 256, 50 << 20, dtype=np.uint8)
    target = np.zeros(len(source) + 200, dtype=np.uint8)

    def copy() -> None:
        nbytes, shift = int(rng.integers(33 << 20, len(source))), int(rng.integers(200))
        found = copying.copy_with_checksum(target, shift, source, 0, nbytes)
        assert found == xxhash.xxh3_64_intdigest(source[:nbytes].data)
        assert np.array_equal(target[shift : shift + nbytes], source[:nbytes])

    until_shared(copy)


@pytest.mark.usefixtures("always")
def test_threads_that_copy_at_once() -> None:
    failures: list[BaseException] = []
    ended: list[int] = []

    def work() -> None:
        memory = Memory()
        try:
            for make in (one_long, many_short, few_long) * 2:
                memory.copy(make)
            ended.append(1)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    until_shared(lambda: Memory().copy(one_long))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert not failures
    assert len(ended) == len(threads)


@pytest.mark.parametrize("shift", [0, 16])  # of the target, against the vectors
@pytest.mark.usefixtures("always")
def test_the_sum_is_that_of_what_was_stored_while_the_source_changes(shift: int) -> None:
    source, memory = np.zeros(8 << 20, dtype=np.uint8), np.zeros((8 << 20) + 128, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + shift
    target = memory[start : start + len(source)]
    stop, mixtures = threading.Event(), 0

    def scribble() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 256
            source[:] = value

    def copy() -> None:
        nonlocal mixtures
        found = copying.copy_with_checksum(target, 0, source, 0, len(source))
        assert found == xxhash.xxh3_64_intdigest(target.data)
        mixtures += bool(target.min() != target.max())

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        end_s = time.monotonic() + SOON_S
        while mixtures < 20:
            assert time.monotonic() < end_s, "the source never changed in the middle"
            until_shared(copy)
    finally:
        stop.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.usefixtures("always")
def test_a_forked_child_finds_a_partner_of_its_own() -> None:
    until_shared(lambda: Memory().copy(one_long))
    assert in_a_child(lambda: until_shared(lambda: Memory().copy(one_long)) or "shared") == "shared"
    until_shared(lambda: Memory().copy(one_long))


def test_who_may_use_one_core_alone_is_not_helped() -> None:
    allowed = os.sched_getaffinity(0)
    memory, before = Memory(), parts_done()
    os.sched_setaffinity(0, {min(allowed)})
    try:
        for sharing in (WHERE_IDLE, NEVER):
            _native.share_copies(sharing)
            for make in (one_long, few_long, many_short):
                memory.copy(make)
        assert _native.share_copies(NEVER) == before
    finally:
        os.sched_setaffinity(0, allowed)
        _native.share_copies(WHERE_IDLE)


def test_what_is_not_large_is_not_shared() -> None:
    memory, before = Memory(), parts_done()
    try:
        for _ in range(20):
            copying.copy_with_checksum(memory.target, 0, memory.source, 0, SHARED_BYTES_MIN - 2048)
        assert parts_done() == before
    finally:
        _native.share_copies(WHERE_IDLE)


class Recorder:
    """Stands in for the compiled part: notes what it is told of sharing."""

    def __init__(self) -> None:
        self.told = [WHERE_IDLE]

    def share_copies(self, sharing: int) -> int:
        self.told.append(sharing)
        return 0


def test_nobody_helps_while_anybody_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(copying, "compiled", recorder)
    with copying.sharing_copies(True):
        assert recorder.told == [WHERE_IDLE]
        with copying.sharing_copies(False):
            assert recorder.told[-1] == NEVER
            with copying.sharing_copies(False), copying.sharing_copies(True):
                assert recorder.told[-1] == NEVER
            assert recorder.told[-1] == NEVER
        assert recorder.told[-1] == WHERE_IDLE


def test_a_client_and_a_node_object_while_they_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    config = KVStoreConfig(segment_bytes=1 << 20, share_copies=False)
    secret = secrets.token_bytes(32)
    engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=secret)
    monkeypatch.setattr(copying, "compiled", recorder)
    with MasterServer(config, secret=secret) as master, engine:
        node = StoreNode(engine, master.address, config, secret=secret)
        assert recorder.told == [WHERE_IDLE]
        with node:
            assert recorder.told[-1] == NEVER
            with StoreClient(engine, master.address, config, secret=secret):
                pass
            assert recorder.told[-1] == NEVER
        assert recorder.told[-1] == WHERE_IDLE
        with StoreClient(engine, master.address, config, secret=secret) as client:
            assert recorder.told[-1] == NEVER
            client.close()
        assert recorder.told[-1] == WHERE_IDLE


def test_nonsense_is_refused() -> None:
    for wrong in (-1, 3, 1 << 70):
        with pytest.raises((ValueError, OverflowError)):
            _native.share_copies(wrong)
    with pytest.raises(TypeError):
        _native.share_copies("always")  # type: ignore[arg-type]
    one = np.array([300])
    with pytest.raises(ValueError, match="below 0"):
        _native.copy_summed(0, 0, one, one, one, -1)

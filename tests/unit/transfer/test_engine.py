"""Two engines in one process: every public call, over both backends."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import numpy as np
import pytest
import torch

from configs.schema import TransferConfig
from tests.support.engines import (
    BACKENDS,
    BOTH,
    TLS,
    engine_pair,
    new_engine,
    new_name,
    offer,
    open_descriptors,
)
from tests.support.waits import eventually
from transfer import (
    Access,
    AccessRefused,
    EngineClosed,
    HandshakeRefused,
    PeerLost,
    PeerUnknown,
    PeerUnreachable,
    RegionUnknown,
    TransferEngine,
    TransferError,
    allocate,
)
from transfer.pieces import make_pieces

SOON_S = 60.0
both_backends = pytest.mark.parametrize("backend", [*BACKENDS, TLS])


def random_memory(nbytes: int) -> torch.Tensor:
    memory = allocate(nbytes)
    return memory.tensor.random_()


@both_backends
def test_connect_makes_both_sides_know_each_other(backend: str) -> None:
    with new_engine(backend) as a, new_engine(backend) as b:
        peer = a.connect(b.address)
        expected = "tcp" if backend == TLS else backend
        assert (peer.name, peer.address, peer.backend) == (b.name, b.address, expected)
        assert b.peer(a.name).address == a.address
        assert peer.alive
        assert a.connect(b.address).name == b.name, "idempotent"
        assert b.connect(a.address).name == a.name, "in the other direction too"
        assert [p.name for p in a.peers()] == [b.name]
        assert a.statistics().peers == b.statistics().peers == 1


@both_backends
@pytest.mark.parametrize("shareable", [True, False], ids=["memory", "tensor"])
def test_writes_and_reads_move_the_bytes(backend: str, shareable: bool) -> None:
    with engine_pair(backend) as (a, b):
        nbytes = (3 << 20) + 17
        mine = a.register(random_memory(nbytes))
        theirs = b.register(allocate(nbytes) if shareable else torch.zeros(nbytes).to(torch.uint8))
        key = offer(b, theirs, a)
        transfer = a.write(b.name, mine, key, 0, 0, nbytes, immediate=3)
        transfer.wait(SOON_S)
        assert transfer.bytes_moved == nbytes
        b.expect({(a.name, 3): 1}, timeout_s=SOON_S)
        assert torch.equal(mine.tensor, theirs.tensor)
        theirs.tensor.random_()
        a.read(b.name, mine, key, 0, 0, nbytes).wait(SOON_S)
        assert torch.equal(mine.tensor, theirs.tensor)


@both_backends
def test_a_window_is_a_part_of_its_region(backend: str) -> None:
    with engine_pair(backend) as (a, b):
        mine, theirs = a.register(random_memory(4096)), b.register(allocate(4096))
        key = offer(b, theirs, a, offset=1000, nbytes=100)
        a.write(b.name, mine, key, 5, 10, 90).wait(SOON_S)
        assert torch.equal(theirs.tensor[1010:1100], mine.tensor[5:95])
        assert not theirs.tensor[:1010].any()
        assert not theirs.tensor[1100:].any()
        for start, length in ((11, 90), (-1, 1), (101, 0), (0, 1 << 62)):
            if length:
                with pytest.raises((AccessRefused, ValueError)):
                    a.write(b.name, mine, key, 0, start, length).wait(SOON_S)


@both_backends
def test_a_signal_is_a_write_without_bytes(backend: str) -> None:
    with engine_pair(backend) as (a, b):
        source, target = a.register(torch.zeros(1)), b.register(allocate(16))
        key = offer(b, target, a)
        for _ in range(3):
            a.write(b.name, source, key, 0, 0, 0, immediate=2**32 - 1).wait(SOON_S)
        b.expect({(a.name, 2**32 - 1): 3}, timeout_s=SOON_S)
        a.write(b.name, source, key, 0, 0, 0).wait(SOON_S)
        for immediate in (-1, 2**32):
            with pytest.raises(ValueError, match="32-bit"):
                a.write(b.name, source, key, 0, 0, 0, immediate=immediate)


@both_backends
@pytest.mark.parametrize("shareable", [True, False], ids=["memory", "tensor"])
def test_rights_are_kept(backend: str, shareable: bool) -> None:
    with engine_pair(backend) as (a, b):
        mine = a.register(random_memory(64))
        theirs = b.register(allocate(64) if shareable else torch.zeros(64, dtype=torch.uint8))
        reading, writing = offer(b, theirs, a, Access.READ), offer(b, theirs, a, Access.WRITE)
        with pytest.raises(AccessRefused, match="right to WRITE"):
            a.write(b.name, mine, reading, 0, 0, 1)
        with pytest.raises(AccessRefused, match="right to READ"):
            a.read(b.name, mine, writing, 0, 0, 1)
        assert not theirs.tensor.any()
        # Who forges more rights into a key is refused by the owner, or by the mapping.
        forged = type(reading)(b.name, reading.token, reading.nbytes, 3, reading.shareable)
        with pytest.raises(AccessRefused):
            a.write(b.name, mine, forged, 0, 0, 1).wait(SOON_S)
        assert not theirs.tensor.any()
        assert sum(s.refused for s in a.statistics().backends.values()) >= 2


def test_the_owner_checks_bounds_rights_and_the_name() -> None:
    with engine_pair("tcp") as (a, b), new_engine("tcp") as c:
        c.connect(b.address)
        mine, theirs = a.register(random_memory(256)), b.register(allocate(128))
        other = c.register(random_memory(256))
        key = offer(b, theirs, a, nbytes=64)
        larger = type(key)(b.name, key.token, 128, key.rights, key.shareable)
        with pytest.raises(AccessRefused, match="outside"):
            a.write(b.name, mine, larger, 0, 0, 128, immediate=1).wait(SOON_S)
        with pytest.raises(AccessRefused, match="outside"):
            a.read(b.name, mine, larger, 0, 60, 5).wait(SOON_S)
        with pytest.raises(RegionUnknown):
            c.write(b.name, other, key, 0, 0, 1, immediate=1).wait(SOON_S)
        assert not theirs.tensor.any()
        assert not b.arrived({(a.name, 1): 1})
        assert b.statistics().backends["tcp"].refused == 3
        a.write(b.name, mine, key, 0, 0, 64).wait(SOON_S)
        assert torch.equal(theirs.tensor[:64], mine.tensor[:64])


@both_backends
def test_a_withdrawn_key_is_void(backend: str) -> None:
    with engine_pair(backend) as (a, b):
        mine, theirs = a.register(random_memory(64)), b.register(allocate(64))
        first, second = offer(b, theirs, a), offer(b, theirs, a)
        for key in (first, second):
            a.write(b.name, mine, key, 0, 0, 8).wait(SOON_S)
        b.withdraw(first)
        b.withdraw(first)
        if backend == "shared_memory":
            link = a._table.ready(b.name)
            eventually(lambda: first.token not in link.windows._windows, "the mapping is dropped")
        with pytest.raises(RegionUnknown):
            a.write(b.name, mine, first, 0, 0, 8).wait(SOON_S)
        a.write(b.name, mine, second, 0, 0, 8).wait(SOON_S)
        b.release(theirs)
        assert b.statistics().offers == 0
        if backend == "shared_memory":
            eventually(lambda: not link.windows._windows, "the mapping is dropped")
        with pytest.raises(RegionUnknown):
            a.read(b.name, mine, second, 0, 0, 8).wait(SOON_S)


@both_backends
def test_fencing(backend: str) -> None:
    lost: list[str] = []
    with new_engine(backend) as a, new_engine(backend) as b:
        a.on_peer_lost(lambda name, evidence: lost.append(evidence))
        a.connect(b.address)
        mine, theirs = a.register(random_memory(64)), b.register(allocate(64))
        key = offer(b, theirs, a)
        a.write(b.name, mine, key, 0, 0, 8, immediate=1).wait(SOON_S)
        b.expect({(a.name, 1): 1}, timeout_s=SOON_S)
        a.write(b.name, mine, key, 0, 0, 8, immediate=1).wait(SOON_S)
        b.disconnect(a.name, reason="it stalled")
        with pytest.raises(PeerLost, match="it stalled"):
            b.expect({(a.name, 1): 1}, timeout_s=SOON_S)
        with pytest.raises(PeerLost, match="it stalled"):
            b.offer(theirs, to=a.name, access=BOTH)
        assert b.statistics().offers == 0
        eventually(lambda: bool(lost), "the fenced side notices")
        with pytest.raises(PeerLost):
            a.write(b.name, mine, key, 0, 0, 8, immediate=1)
        with pytest.raises(HandshakeRefused, match="it stalled"):
            a.connect(b.address)
        with pytest.raises(HandshakeRefused, match="it stalled"):
            b.connect(a.address)
        assert b.peers() == ()


@both_backends
def test_who_is_fenced_loses_the_peer_and_not_its_keys(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[TransferError] = []
    with new_engine(backend) as a, new_engine(backend) as b:
        a.connect(b.address)
        mine, theirs = a.register(random_memory(64)), b.register(allocate(64))
        key = offer(b, theirs, a)

        def write_on() -> None:
            while not errors:
                try:
                    a.write(b.name, mine, key, 0, 0, 64).wait(SOON_S)
                except TransferError as error:
                    errors.append(error)

        writing = threading.Thread(target=write_on)
        withdraw = b._offers.withdraw_peer

        def withdraw_and_linger(name: str) -> object:
            found = withdraw(name)
            writing.join(SOON_S)
            return found

        monkeypatch.setattr(b._offers, "withdraw_peer", withdraw_and_linger)
        writing.start()
        b.disconnect(a.name, reason="it stalled")
        assert not writing.is_alive()
        assert [type(error) for error in errors] == [PeerLost]
        assert b.statistics().offers == 0


@both_backends
def test_closing_is_told_and_operations_fail(backend: str) -> None:
    told: list[tuple[str, str]] = []
    a, b = new_engine(backend), new_engine(backend)
    b.on_peer_lost(lambda name, evidence: told.append((name, evidence)))
    with b:
        with a:
            a.connect(b.address)
            source, target = b.register(torch.zeros(8)), a.register(allocate(8))
            key = offer(a, target, b)
        eventually(lambda: bool(told), "on_peer_lost")
        assert [name for name, _ in told] == [a.name]
        with pytest.raises(PeerLost):
            b.expect({(a.name, 1): 1}, timeout_s=SOON_S)
        with pytest.raises(PeerLost):
            b.write(a.name, source, key, 0, 0, 1)
        with pytest.raises(PeerUnknown):
            b.peer(a.name)
        with pytest.raises(PeerLost):
            b.notify(a.name, b"x")
    for call in (lambda: a.connect(b.address), lambda: a.expect({}, timeout_s=1), a.open):
        with pytest.raises(EngineClosed):
            call()
    a.close()


@both_backends
def test_notifies_arrive_in_order_and_large(backend: str) -> None:
    got: list[bytes] = []
    a, b = new_engine(backend), new_engine(backend, notify_bytes_max=1 << 20)
    b.on_notify(lambda name, payload: got.append(payload))
    with a, b:
        a.connect(b.address)
        sent = [bytes([i % 256]) * (i * 37 % 5000) for i in range(200)] + [b"z" * (1 << 20)]
        for payload in sent:
            a.notify(b.name, payload)
        eventually(lambda: len(got) == len(sent), "all notifies")
        assert got == sent
        with pytest.raises(ValueError, match="exceed"):
            b.notify(a.name, b"x" * ((1 << 20) + 1))
        with pytest.raises(PeerUnknown):
            a.notify("stranger", b"")


def test_a_handler_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    got: list[bytes] = []
    a, b = new_engine(), new_engine()

    def bad(name: str, payload: bytes) -> None:
        raise KeyError(payload)

    b.on_notify(bad)
    b.on_notify(lambda name, payload: got.append(payload))
    with a, b:
        a.connect(b.address)
        a.notify(b.name, b"one")
        a.notify(b.name, b"two")
        eventually(lambda: got == [b"one", b"two"], "both")
    assert "a handler of transfer events raised" in caplog.text


def test_a_process_can_write_to_itself() -> None:
    got: list[tuple[str, bytes]] = []
    a = new_engine()
    a.on_notify(lambda name, payload: got.append((name, payload)))
    with a:
        source, target = a.register(random_memory(64)), a.register(torch.zeros(64).byte())
        key = a.offer(target, to=a.name, access=BOTH)
        transfer = a.write(a.peer(a.name), source, key, 0, 0, 64, immediate=1)
        transfer.wait()
        assert transfer.backend == a.connect(a.address).backend == "local"
        a.expect({(a.name, 1): 1}, timeout_s=SOON_S)
        assert torch.equal(source.tensor, target.tensor)
        a.read(a.name, source, key, 0, 32, 32).wait()
        with pytest.raises(AccessRefused):
            a.write(a.name, source, key, 0, 1, 64)
        a.notify(a.name, b"me")
        eventually(lambda: got == [(a.name, b"me")], "own notify")
        a.withdraw(key)
        with pytest.raises(RegionUnknown):
            a.write(a.name, source, key, 0, 0, 1)


@both_backends
def test_transfers_can_be_awaited(backend: str) -> None:
    with engine_pair(backend) as (a, b):
        mine, theirs = a.register(random_memory(8 << 20)), b.register(allocate(8 << 20))
        key = offer(b, theirs, a)

        async def main() -> None:
            await asyncio.gather(
                *(_await(a.write(b.name, mine, key, i << 20, i << 20, 1 << 20)) for i in range(8))
            )

        async def _await(transfer: object) -> None:
            await transfer  # type: ignore[misc]

        asyncio.run(main())
        assert torch.equal(mine.tensor, theirs.tensor)


def test_who_is_not_there_is_unreachable() -> None:
    with new_engine() as a:
        gone = new_engine()
        with gone:
            address = gone.address
        started = time.monotonic()
        for where in (address, "127.0.0.1:1"):
            with pytest.raises(PeerUnreachable):
                a.connect(where, timeout_s=5.0)
        assert time.monotonic() - started < SOON_S
        with pytest.raises(PeerUnknown):
            a.peer(new_name())
        with pytest.raises(PeerUnknown):
            a.expect({(new_name(), 1): 1}, timeout_s=1.0)


def test_without_a_backend_in_common_nobody_connects() -> None:
    with new_engine("tcp") as a, new_engine("shared_memory") as b:
        with pytest.raises(HandshakeRefused):
            a.connect(b.address, timeout_s=SOON_S)
        assert a.peers() == b.peers() == ()


def test_one_name_twice_is_refused() -> None:
    with new_engine() as a, new_engine(name=a.name) as b, pytest.raises(HandshakeRefused):
        a.connect(b.address)


@pytest.mark.parametrize("options", [{"name": "n" * 65}, {"secret": b""}])
def test_bad_arguments_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        new_engine(**options)  # type: ignore[arg-type]


def test_an_engine_that_was_never_open_has_no_address() -> None:
    engine = new_engine()
    with pytest.raises(EngineClosed, match="once it is open"):
        _ = engine.address
    with engine:
        address = engine.address
    assert engine.address == address


def test_bad_windows_and_tensors_are_refused() -> None:
    with new_engine() as a:
        region = a.register(torch.zeros(16, dtype=torch.uint8))
        for window in ({"offset": 17}, {"offset": -1}, {"offset": 8, "nbytes": 9}, {"nbytes": -1}):
            with pytest.raises(ValueError, match="not inside"):
                a.offer(region, to="b", access=BOTH, **window)
        with pytest.raises(ValueError, match="right"):
            a.offer(region, to="b", access=Access(0))


@both_backends
def test_engines_leave_nothing_behind(backend: str) -> None:
    with engine_pair(backend):
        pass  # what is opened once per process is open now
    gc.collect()
    before = open_descriptors(), set(threading.enumerate())
    for _ in range(3):
        with engine_pair(backend) as (a, b):
            mine, theirs = a.register(random_memory(1 << 16)), b.register(torch.zeros(1 << 14))
            shared = allocate(1 << 16)
            for region in (theirs, b.register(shared)):
                a.write(b.name, mine, offer(b, region, a), 0, 0, 1 << 16, immediate=1).wait(SOON_S)
            shared.close()
            del mine, theirs, region
    assert gc.collect() >= 0
    eventually(lambda: open_descriptors() <= before[0], "descriptors are closed")
    eventually(lambda: set(threading.enumerate()) <= before[1], "threads have ended")


def test_many_pieces_go_in_one_call() -> None:
    seed = int(time.time_ns() % 2**32)
    generator = np.random.default_rng(seed)
    for backend in BACKENDS:
        with engine_pair(backend) as (a, b):
            count, length = 5000, 96
            mine, theirs = a.register(random_memory(1 << 20)), b.register(allocate(1 << 20))
            sources = generator.integers(0, (1 << 20) - length, count)
            targets = generator.permutation((1 << 20) // length)[:count] * length
            key = offer(b, theirs, a)
            a.write(b.name, mine, key, sources, targets, length, immediate=1).wait(SOON_S)
            b.expect({(a.name, 1): 1}, timeout_s=SOON_S)
            expected = np.zeros(1 << 20, dtype=np.uint8)
            for s, t in zip(sources, targets, strict=True):
                expected[t : t + length] = mine.array[s : s + length]
            assert np.array_equal(theirs.array, expected), f"seed {seed}, {backend}"


def test_an_engine_is_opened_once() -> None:
    engine: TransferEngine = new_engine()
    with engine, pytest.raises(EngineClosed):
        engine.open()


@both_backends
def test_what_was_sent_before_the_end_is_delivered(backend: str) -> None:
    got: list[int] = []
    told: list[str] = []
    a, b = new_engine(backend), new_engine(backend)
    b.on_notify(lambda name, payload: got.append(len(payload)))
    b.on_peer_lost(lambda name, evidence: told.append(evidence))
    with b:
        with a:
            a.connect(b.address)
            for size in range(50):
                a.notify(b.name, b"n" * size * 100)
        eventually(lambda: bool(told), "on_peer_lost")
        assert got == [size * 100 for size in range(50)]
        assert told == ["closed by the peer: the engine was closed"]


def test_a_host_that_is_not_ours_cannot_be_listened_on() -> None:
    before = open_descriptors()
    engine = new_engine(host="192.0.2.1")
    with pytest.raises(OSError, match="assign"):
        engine.open()
    engine.close()
    assert open_descriptors() <= before


def test_a_name_that_is_used_twice_is_suspected() -> None:
    with new_engine() as a, new_engine() as b:
        a.connect(b.address)
        with (
            new_engine(name=a.name) as other,
            pytest.raises(PeerUnreachable, match="does another engine have our name"),
        ):
            other.connect(b.address, timeout_s=3.0)
        assert "lambda" not in repr(b.peer(a.name))


def test_text_is_neither_a_secret_nor_a_note() -> None:
    with pytest.raises(TypeError, match="secret must be a bytes, got str"):
        TransferEngine(TransferConfig(), name=new_name(), secret="text")  # type: ignore[arg-type]
    with new_engine() as a, pytest.raises(TypeError, match="payload must be bytes, got str"):
        a.notify(a.name, "text")  # type: ignore[arg-type]


def test_columns_of_different_lengths_are_counted() -> None:
    expected = "2 source offsets, 1 target offsets, 3 lengths"
    with pytest.raises(ValueError, match=expected):
        make_pieces([0, 1], 0, [1, 2, 3])

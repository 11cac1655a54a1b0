"""Memory of another process: who may copy, where to, and when it is free again."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.support.engines import (
    engine_pair,
    new_engine,
    open_descriptors,
)
from tests.support.waits import WAIT_S, eventually
from transfer import AccessRefused, PeerLost, RegionUnknown, TransferTimeout
from transfer.backends.process_memory import (
    Answer,
    Located,
    Location,
    Locations,
    PeerProcess,
    Probe,
    parse_located,
)
from transfer.errors import ProtocolViolation
from transfer.memory.region import Access, OfferTable, Region, RegionKey, make_offer
from transfer.memory.told_addresses import ToldAddresses
from transfer.pieces import make_pieces

BOTH = Access.READ | Access.WRITE


class Owner:
    """The other side, in this process: answers at once unless told to be silent."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.memory = torch.zeros(1 << 16, dtype=torch.uint8)
        self.offers = OfferTable("owner")
        self.told = ToldAddresses(self.offers, enabled=enabled)
        self.retired: list[bytes] = []
        self.silent = False
        self.asked = 0
        self.may_wait = True
        ours, theirs = socket.socketpair()
        self.process = PeerProcess(ours)
        ours.close()
        theirs.close()
        self.locations = Locations(
            "owner",
            ask=self.ask,
            retire=self.retire,
            find_process=lambda: self.process,
            may_wait=lambda: self.may_wait,
            enabled=True,
        )

    def offer(
        self, access: Access = BOTH, *, offset: int = 0, nbytes: int | None = None
    ) -> RegionKey:
        region = Region(self.memory)
        return self.offers.add(
            make_offer(region, to="me", access=access, offset=offset, nbytes=nbytes)
        )

    def ask(self, token: bytes) -> None:
        self.asked += 1
        if not self.silent:
            located = self.told.tell(token, to="me", process=self.process)
            self.locations.on_located(located.encode())

    def retire(self, token: bytes) -> None:
        self.retired.append(token)
        self.told.on_retired(token, by="me")


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.locations.close()


def soon() -> float:
    return time.monotonic() + 20


def located_for(owner: Owner, key: RegionKey) -> Location:
    location = owner.locations.get(key, soon())
    assert location is not None, owner.locations.refusal
    return location


def test_bytes_go_where_they_belong(owner: Owner) -> None:
    key = owner.offer(offset=100, nbytes=1000)
    location = located_for(owner, key)
    source = Region(torch.arange(256, dtype=torch.uint8))
    pieces = make_pieces([0, 10], [5, 990], [3, 10])
    assert owner.locations.write(key, location, source, pieces)
    expected = torch.zeros(1 << 16, dtype=torch.uint8)
    expected[105:108] = torch.tensor([0, 1, 2], dtype=torch.uint8)
    expected[1090:1100] = torch.arange(10, 20, dtype=torch.uint8)
    assert owner.memory.equal(expected)
    target = Region(torch.zeros(1000, dtype=torch.uint8))
    assert owner.locations.read(key, location, target, make_pieces(0, 0, 1000))
    assert target.tensor.equal(expected[100:1100])


def test_an_answer_survives_its_bytes() -> None:
    located = Located(token=os.urandom(16), answer=Answer.TOLD, rights=3, address=1 << 47,
                      nbytes=7, probe=4096, nonce=os.urandom(16))  # fmt: skip
    assert parse_located(located.encode()) == located
    for nonsense in (b"", located.encode()[:-1], located.encode() + b"x",
                     located.encode()[:16] + b"\xff" + located.encode()[17:],
                     located.encode()[:18] + b"\xff" * 24 + located.encode()[42:]):  # fmt: skip
        with pytest.raises(ProtocolViolation):
            parse_located(nonsense)


def test_an_answer_that_nobody_asked_for(owner: Owner) -> None:
    with pytest.raises(ProtocolViolation, match="nobody asked"):
        owner.locations.on_located(Located(token=bytes(16), answer=Answer.TOLD).encode())


def test_withdrawals_that_cross_questions(owner: Owner) -> None:
    """The answer comes for a key that is forgotten, perhaps asked for once more: no violation."""
    owner.silent = True
    key = owner.offer()
    found: list[Location | None] = []

    def ask() -> threading.Thread:
        asked = owner.asked
        thread = threading.Thread(target=lambda: found.append(owner.locations.get(key, soon())))
        thread.start()
        eventually(lambda: owner.asked > asked, "it has asked")
        return thread

    def withdraw(thread: threading.Thread) -> None:
        owner.locations.drop(key.token)
        thread.join(WAIT_S)
        assert found.pop() is None

    owner.offers.withdraw(key.token)
    withdraw(ask())
    withdraw(ask())
    third = ask()
    nothing = owner.told.tell(key.token, to="me", process=owner.process).encode()
    owner.locations.on_located(nothing)
    third.join(WAIT_S)
    assert found == [None]
    for _ in range(2):
        owner.locations.on_located(nothing)
    with pytest.raises(ProtocolViolation, match="nobody asked"):
        owner.locations.on_located(nothing)
    assert not owner.locations._num_asked


def test_a_window_that_is_withdrawn_at_its_first_use_costs_no_peer() -> None:
    with engine_pair() as (owner, user):
        source = user.register(torch.ones(64, dtype=torch.uint8))
        for _ in range(300):
            region = owner.register(torch.zeros(64, dtype=torch.uint8))
            key = owner.offer(region, to=user.name, access=BOTH)
            done = threading.Thread(target=owner.release, args=(region,))
            done.start()
            with contextlib.suppress(RegionUnknown, AccessRefused):
                user.write(owner.name, source, key, 0, 0, 64).wait()
            done.join(WAIT_S)
        assert user.peer(owner.name)
        assert owner.statistics().malformed == user.statistics().malformed == 0


def test_the_engine_thread_never_waits(owner: Owner) -> None:
    owner.may_wait = False
    assert owner.locations.get(owner.offer(), soon()) is None


def test_a_silent_owner_is_a_timeout(owner: Owner) -> None:
    owner.silent = True
    with pytest.raises(TransferTimeout):
        owner.locations.get(owner.offer(), time.monotonic() + 0.05)


def test_addresses_are_not_told_to_others_nor_of_what_can_be_mapped(owner: Owner) -> None:
    key = owner.offer()
    assert owner.told.tell(key.token, to="other", process=owner.process).answer is Answer.NOT_THIS
    assert owner.told.tell(bytes(16), to="me", process=owner.process).answer is Answer.NOT_THIS
    assert owner.told.tell(key.token, to="me", process=None).answer is Answer.NEVER
    assert not owner.told.tokens()


def test_an_owner_that_tells_nothing_is_asked_once() -> None:
    owner = Owner(enabled=False)
    assert owner.locations.get(owner.offer(), soon()) is None
    assert owner.locations.refusal == "the peer does not tell addresses"
    owner.silent = True  # asking again would wait
    assert owner.locations.get(owner.offer(), soon()) is None


def test_a_key_with_other_words_than_the_owner_meant(owner: Owner) -> None:
    key = owner.offer(Access.READ, nbytes=100)
    for forged in ({"nbytes": 200}, {"rights": 3}):
        fields = {name: getattr(key, name) for name in key.__struct_fields__} | forged
        with pytest.raises(AccessRefused):
            owner.locations.get(RegionKey(**fields), soon())
    located_for(owner, key)
    with pytest.raises(AccessRefused):
        owner.locations.get(RegionKey(**fields), soon())


def test_whoever_stands_behind_the_socket_must_hold_the_nonce(owner: Owner) -> None:
    owner.told._probe.nonce = os.urandom(16)  # not what lies at the address that is told
    assert owner.locations.get(owner.offer(), soon()) is None
    assert owner.locations.refusal is not None
    assert "not the peer" in owner.locations.refusal


def test_withdrawing_waits_for_the_copy_that_is_under_way(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = owner.offer()
    location = located_for(owner, key)
    copying, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> int:
        copying.set()
        assert go_on.wait(20)
        return 0

    monkeypatch.setattr("transfer.native.process_vm_write", slow)
    source = Region(torch.zeros(10, dtype=torch.uint8))
    arguments = (key, location, source, make_pieces(0, 0, 10))
    thread = threading.Thread(target=owner.locations.write, args=arguments)
    thread.start()
    assert copying.wait(20)
    owner.offers.withdraw(key.token)
    owner.locations.drop(key.token)
    assert owner.retired == []
    assert not owner.told.wait([key.token], 0.05)
    assert owner.told.num_quarantined == 1
    go_on.set()
    assert owner.told.wait([key.token], 20)
    thread.join(20)
    assert owner.retired == [key.token]
    assert owner.told.num_quarantined == 0
    with pytest.raises(AccessRefused, match="withdrawn"):
        owner.locations.write(*arguments)


def test_only_the_peer_itself_can_retire(owner: Owner) -> None:
    key = owner.offer()
    located_for(owner, key)
    owner.offers.withdraw(key.token)
    owner.told.on_retired(key.token, by="other")
    assert not owner.told.wait([key.token], 0.0)


def test_memory_that_is_gone_is_refused_and_permission_lost_is_no_error(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = owner.offer()
    location = located_for(owner, key)
    source, pieces = Region(torch.zeros(10, dtype=torch.uint8)), make_pieces(0, 0, 10)
    address, location.address = location.address, 4096  # never mapped
    with pytest.raises(AccessRefused, match="process memory"):
        owner.locations.write(key, location, source, pieces)
    location.address = address
    for error, outcome in (
        (PermissionError(1, "no"), None),
        (ProcessLookupError(3, "x"), PeerLost),
    ):

        def fail(*_: object, error: OSError = error) -> int:
            raise type(error)(*error.args)  # the one at hand would keep the frames alive

        monkeypatch.setattr("transfer.native.process_vm_write", fail)
        if outcome is None:
            assert not owner.locations.write(key, location, source, pieces)
            assert owner.locations.refusal is not None
        else:
            with pytest.raises(outcome):
                owner.locations.write(key, location, source, pieces)
    assert location.num_copies == 0


def test_a_process_is_known_by_its_socket_and_its_end_is_seen() -> None:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        process = PeerProcess(ours)
        assert process.pid == os.getpid()  # who made the pair, not who holds it
        assert process.alive
        assert not process.exited
    finally:
        ours.close()
        theirs.close()
        os.waitpid(pid, 0)


def test_the_descriptor_of_a_process_goes_with_it() -> None:
    ours, theirs = socket.socketpair()
    before = open_descriptors()
    for _ in range(100):
        PeerProcess(ours)
    assert open_descriptors() <= before
    ours.close()
    theirs.close()


def test_a_probe_lies_where_it_says() -> None:
    probe = Probe()
    assert ctypes.string_at(probe.address, 16) == probe.nonce


def test_engines_use_it_for_plain_tensors_and_say_so() -> None:
    with engine_pair() as (a, b):
        target = torch.zeros(100_000, dtype=torch.uint8)
        region = b.register(target)
        key = b.offer(region, to=a.name, access=BOTH)
        source = a.register(torch.arange(250, dtype=torch.uint8).repeat(400))
        transfer = a.write(b.name, source, key, 0, 0, 100_000, immediate=9)
        transfer.wait()
        assert transfer.backend == "process_memory"
        b.expect({(a.name, 9): 1}, timeout_s=10)
        assert target.equal(source.tensor)
        back = a.register(torch.zeros(100_000, dtype=torch.uint8))
        a.read(b.name, back, key, 0, 0, 100_000).wait()
        assert back.tensor.equal(target)
        counted = a.statistics().backends["process_memory"]
        assert (counted.bytes_written, counted.bytes_read) == (100_000, 100_000)
        eventually(lambda: b.withdraw(key))
        with pytest.raises(AccessRefused):
            a.write(b.name, source, key, 0, 0, 100).wait()


@pytest.mark.parametrize("who", ["owner", "requester"])
def test_turned_off_it_goes_by_sockets(who: str) -> None:
    with (
        new_engine(process_memory=who != "requester") as a,
        new_engine(process_memory=who != "owner") as b,
    ):
        a.connect(b.address)
        target = torch.zeros(1000, dtype=torch.uint8)
        key = b.offer(b.register(target), to=a.name, access=BOTH)
        transfer = a.write(b.name, a.register(torch.ones(1000, dtype=torch.uint8)), key, 0, 0, 1000)
        transfer.wait()
        assert transfer.backend == "tcp"
        assert bool(target.all())
        eventually(lambda: b.withdraw(key))


def test_nothing_is_left_after_many_keys() -> None:
    gc.collect()  # what earlier tests have left to it
    with engine_pair() as (a, b):
        target, source = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
        ours, theirs = a.register(source), b.register(target)
        before = None
        for i in range(1000):
            key = b.offer(theirs, to=a.name, access=BOTH)
            a.write(b.name, ours, key, 0, 0, 64).wait()
            # A busy machine may keep the answer of `a` for longer than one call waits.
            eventually(lambda key=key: b.withdraw(key), f"key {i}")
            before = before or open_descriptors()
        assert open_descriptors() <= before
        assert b._links.told.tokens() == []
        link = a._table.ready(b.name)
        eventually(lambda: not link.locations._locations, "locations are forgotten")


def test_no_descriptor_of_a_process_waits_for_the_collector() -> None:
    gc.collect()
    gc.disable()  # links are cycles
    try:
        with new_engine() as a:
            before = processes_held()
            for i in range(10):
                with new_engine() as b:
                    a.connect(b.address)
                    window = torch.zeros(64, dtype=torch.uint8)
                    key = b.offer(b.register(window), to=a.name, access=BOTH)
                    source = a.register(torch.ones(64, dtype=torch.uint8))
                    transfer = a.write(b.name, source, key, 0, 0, 64)
                    transfer.wait()
                    assert transfer.backend == "process_memory"
                    assert a.process_of(b.name) is not None
                    assert processes_held() > before, f"engine {i}: nothing to be given back"
                eventually(lambda b=b: a._table.get(b.name) is None, "it has gone")
                with pytest.raises(PeerLost):
                    a.process_of(b.name)
            assert processes_held() == before
    finally:
        gc.enable()


def processes_held() -> int:
    """Count the descriptors of processes."""
    held = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            held += "pidfd" in os.readlink(f"/proc/self/fd/{number}")
    return held

"""Control connections that are cut while notifies are under way; peers that lie about them."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines import (
    new_engine,
    offer,
)
from tests.support.waits import eventually
from transfer import Access, TransferEngine, TransferTimeout, allocate
from transfer.connections.handshake import Purpose
from transfer.connections.negotiation import Greeted
from transfer.peer import PeerLink
from transfer.wire import ControlKind, encode_control

Pair = tuple[TransferEngine, TransferEngine]
RESUME_S = 60.0


class Heard:
    """What an engine was told."""

    def __init__(self, engine: TransferEngine) -> None:
        self.notifies: list[bytes] = []
        self.lost: list[str] = []
        engine.on_notify(lambda _, payload: self.notifies.append(payload))
        engine.on_peer_lost(lambda _, evidence: self.lost.append(evidence))


@pytest.fixture
def engines() -> Iterator[tuple[Pair, tuple[Heard, Heard]]]:
    pair = tuple(new_engine("tcp", resume_timeout_s=RESUME_S) for _ in range(2))
    heard = (Heard(pair[0]), Heard(pair[1]))
    with pair[0], pair[1]:
        pair[0].connect(pair[1].address)
        yield pair, heard


def link_of(engine: TransferEngine, other: TransferEngine) -> PeerLink:
    link = engine._table.get(other.name)
    assert link is not None
    return link


def cut(engine: TransferEngine, other: TransferEngine) -> bool:
    """Cut the control connection, if it stands."""
    wire = link_of(engine, other).control._wire
    if wire is None:
        return False
    try:
        wire.stream.sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def resumes(pair: Pair) -> int:
    return sum(engine.statistics().control_resumes for engine in pair)


def test_cut_again_and_again_each_notify_comes_once_and_in_order(engines: Any) -> None:
    pair, heard = engines
    expected = [[secrets.token_bytes(secrets.randbelow(3000)) for _ in range(600)] for _ in pair]
    done = threading.Event()

    def talk(which: int) -> None:
        for payload in expected[which]:
            pair[which].notify(pair[1 - which].name, payload)

    def trouble() -> None:
        count = 0
        while not done.wait(0.05):
            count += cut(pair[count % 2], pair[1 - count % 2])

    threads = [threading.Thread(target=talk, args=(i,)) for i in (0, 1)]
    cutter = threading.Thread(target=trouble)
    for thread in (*threads, cutter):
        thread.start()
    for thread in threads:
        thread.join(60.0)
    eventually(lambda: resumes(pair) >= 4, "cut and resumed more than once", 30.0)
    done.set()
    cutter.join()
    eventually(lambda: all(len(heard[i].notifies) >= 600 for i in (0, 1)), "all arrive")
    for which in (0, 1):
        assert heard[1 - which].notifies == expected[which]
        assert heard[which].lost == []


def test_keys_withdrawn_while_it_is_cut_are_told_afterwards(engines: Any) -> None:
    (a, b), heard = engines
    assert cut(a, b)
    region = b.register(allocate(4096))
    before = link_of(b, a).control._log.num_sent
    b.withdraw(b.offer(region, to=a.name, access=Access.WRITE))
    assert link_of(b, a).control._log.num_sent == before + 1
    eventually(lambda: not link_of(b, a).control._log.unconfirmed(), "it has arrived")
    assert heard[0].lost == heard[1].lost == []
    eventually(lambda: resumes((a, b)) >= 2, "both went on")


def test_a_peer_that_dies_while_it_is_missed_is_lost_at_once(engines: Any) -> None:
    (a, b), heard = engines
    loop = b._loop
    # As its death would: the kernel closes all, and says nothing.
    loop.ask(b._rendezvous.close)
    started = time.monotonic()
    assert cut(a, b)
    eventually(lambda: bool(heard[0].lost), "refused")
    assert time.monotonic() - started < RESUME_S / 2, "without waiting for the deadline"
    assert "ECONNREFUSED" in heard[0].lost[0]


def dial(engine: TransferEngine, target: str, name: str) -> list[Any]:
    outcomes: list[Any] = []
    engine._loop.call(
        lambda: engine._rendezvous.dial(
            target, Purpose.RESUME, name=name, on_outcome=outcomes.append
        )
    )
    eventually(lambda: bool(outcomes), "an outcome")
    return outcomes


def test_a_member_cannot_take_over_the_link_of_another(engines: Any) -> None:
    (a, b), heard = engines
    impostor = new_engine("tcp", name=a.name)
    with impostor:
        (outcome,) = dial(impostor, b.address, b.name)
        assert not isinstance(outcome, Greeted)
    a.notify(b.name, b"still me")
    eventually(lambda: heard[1].notifies == [b"still me"], "the link goes on")
    assert heard[0].lost == heard[1].lost == []


@pytest.mark.parametrize("what", ["nothing", "nonsense", "frames", "a wrong count"])
def test_a_call_without_a_right_word_changes_nothing(engines: Any, what: str) -> None:
    (a, b), heard = engines
    (outcome,) = dial(a, b.address, b.name)
    assert isinstance(outcome, Greeted)
    if what == "nonsense":
        outcome.sock.send(secrets.token_bytes(64))
    elif what == "frames":
        outcome.sock.send(b"".join(encode_control(ControlKind.NOTIFY, b"stowaway")))
    elif what == "a wrong count":
        outcome.sock.send(b"".join(encode_control(ControlKind.RESUMED, b"123")))
    if what != "nothing":
        outcome.sock.setblocking(True)
        outcome.sock.settimeout(60.0)
        assert outcome.sock.recv(1) == b"", "closed"
    a.notify(b.name, b"all is well")
    eventually(lambda: heard[1].notifies == [b"all is well"], "the link goes on")
    assert resumes((a, b)) == 0
    assert heard[0].lost == heard[1].lost == []
    outcome.sock.close()


def test_a_silent_connection_is_left_while_others_are_well(engines: Any) -> None:
    """Nothing is broken, but nothing arrives: the frames go over another socket in time."""
    (a, b), heard = engines
    wire = link_of(b, a).control._wire
    assert wire is not None
    b._loop.ask(lambda: b._loop.unwatch(wire.stream.sock))
    a.notify(b.name, b"one")
    eventually(lambda: resumes((a, b)) >= 2, "resumed")
    eventually(lambda: heard[1].notifies == [b"one"], "from the old socket, or again, but once")
    a.notify(b.name, b"two")
    eventually(lambda: heard[1].notifies == [b"one", b"two"], "goes on")
    assert heard[0].lost == heard[1].lost == []


def test_an_idle_connection_is_asked_after_a_rail_has_failed(engines: Any) -> None:
    (a, b), heard = engines
    key, source = offer(b, b.register(allocate(64)), a), a.register(allocate(64))
    a.write(b.name, source, key, 0, 0, 64).wait()
    wire = link_of(b, a).control._wire
    assert wire is not None
    b._loop.ask(lambda: b._loop.unwatch(wire.stream.sock))
    time.sleep(0.1)
    rail = link_of(a, b).requests._links[0]
    assert rail is not None
    a._loop.ask(lambda: link_of(a, b).requests.broken(rail, "cut"))
    eventually(lambda: resumes((a, b)) >= 2, "resumed, though nothing was to be sent")
    assert heard[1].notifies == [], "the user hears nothing of it"
    assert heard[0].lost == heard[1].lost == []


def test_who_was_called_calls_too_and_is_called_back(engines: Any) -> None:
    (a, b), heard = engines
    wire = link_of(a, b).control._wire
    assert wire is not None
    a._loop.ask(lambda: a._loop.unwatch(wire.stream.sock))
    b.notify(a.name, b"are you there")
    eventually(lambda: heard[0].notifies == [b"are you there"], "it came over another socket")
    eventually(lambda: resumes((a, b)) >= 2, "both know")
    assert heard[0].lost == heard[1].lost == []


def test_a_notify_waits_for_room_and_no_longer_than_its_deadline() -> None:
    a, b = new_engine("tcp", operation_timeout_s=0.5, notify_bytes_max=4096), new_engine("tcp")
    release = threading.Event()
    b.on_notify(lambda *_: release.wait(60.0) and None)
    with a, b:
        a.connect(b.address)

        def notify_without_end() -> None:
            while True:
                a.notify(b.name, bytes(4096))

        with pytest.raises(TransferTimeout):
            notify_without_end()
        release.set()
        eventually(lambda: not link_of(a, b).control.full, "there is room again")
        a.notify(b.name, b"on")

"""Requests to several servers at once: all answers, and what becomes of those that do not come."""

import secrets
import threading
import time

import pytest

from transfer.control import RpcServer
from transfer.errors import ControlError, RemoteError, RpcTimeout
from transfer.fan_out import RpcFanOut

REPLY_S = 40.0
SECRET = secrets.token_bytes(16)


def echo(identity: str, payload: bytes) -> bytes:
    if payload == b"raise":
        raise ValueError("no")
    return identity.encode() + b":" + payload


@pytest.fixture
def servers():
    made = [RpcServer(SECRET, echo, host="127.0.0.1") for _ in range(3)]
    for server in made:
        server.open()
    yield made
    for server in made:
        server.close()


@pytest.fixture
def lost():
    return []


@pytest.fixture
def fan_out(lost):
    made = RpcFanOut(SECRET, identity="me", on_lost=lost.append)
    yield made
    made.close()
    assert not any(thread.name == "rpc-fan-out" for thread in threading.enumerate())


def test_all_answer(servers, fan_out):
    calls = [(server.address, secrets.token_bytes(9)) for server in servers * 5]
    replies = fan_out.request(calls, timeout_s=REPLY_S)
    assert replies == [b"me:" + payload for _, payload in calls]


def test_what_a_handler_raises_is_the_answer(servers, fan_out):
    calls = [(servers[0].address, b"raise"), (servers[1].address, b"x")]
    failed, fine = fan_out.request(calls, timeout_s=REPLY_S)
    assert isinstance(failed, RemoteError)
    assert (failed.kind, fine) == ("ValueError", b"me:x")


def test_rounds_of_several_threads(servers, fan_out):
    failures = []

    def ask(number: int) -> None:
        for turn in range(50):
            payload = f"{number} {turn}".encode()
            found = fan_out.request([(s.address, payload) for s in servers], timeout_s=REPLY_S)
            if found != [b"me:" + payload] * 3:
                failures.append(found)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_nobody_there_costs_the_deadline(servers, fan_out):
    gone = servers[0].address
    servers[0].close()
    silent, fine = fan_out.request([(gone, b"x"), (servers[1].address, b"y")], timeout_s=6.0)
    assert isinstance(silent, RpcTimeout)
    assert fine == b"me:y"


def test_an_ended_connection_ends_its_requests_at_once(servers, lost):
    entered = threading.Event()
    end = threading.Event()

    def stall(identity: str, payload: bytes) -> bytes:
        entered.set()
        end.wait(REPLY_S)
        return payload

    # A server that dies is one whose socket is closed under it.
    server = RpcServer(SECRET, stall, host="127.0.0.1")
    server.open()
    fan_out = RpcFanOut(SECRET, identity="me", on_lost=lost.append)
    found = []
    asking = threading.Thread(
        target=lambda: found.extend(
            fan_out.request([(server.address, b"x"), (server.address, b"y")], timeout_s=REPLY_S)
        )
    )
    asking.start()
    assert entered.wait(REPLY_S)
    started_s = time.monotonic()
    end.set()
    server.close()  # it answers the first, never the second or both
    asking.join()
    fan_out.close()
    assert time.monotonic() - started_s < REPLY_S / 2
    assert len(found) == 2
    if any(isinstance(reply, ControlError) for reply in found):
        assert lost == [server.address]


def test_a_server_that_starts_again_is_found_and_gets_nothing_old(servers, fan_out):
    server = servers[0]
    assert fan_out.request([(server.address, b"1")], timeout_s=REPLY_S) == [b"me:1"]
    server.close()
    assert isinstance(fan_out.request([(server.address, b"2")], timeout_s=0.1)[0], ControlError)
    heard = []

    def note(identity: str, payload: bytes) -> bytes:
        heard.append(payload)
        return payload

    again = RpcServer(SECRET, note, host="127.0.0.1", port=int(server.address.rpartition(":")[2]))
    again.open()
    try:
        assert fan_out.request([(server.address, b"3")], timeout_s=REPLY_S) == [b"3"]
        assert heard == [b"3"]
    finally:
        again.close()


def test_closed(servers):
    made = RpcFanOut(SECRET, identity="me")
    made.request([(servers[0].address, b"x")], timeout_s=REPLY_S)
    made.close()
    made.close()
    with pytest.raises(ControlError):
        made.request([(servers[0].address, b"x")], timeout_s=REPLY_S)


def test_not_an_address(fan_out):
    (found,) = fan_out.request([("nonsense", b"x")], timeout_s=REPLY_S)
    assert isinstance(found, ControlError)

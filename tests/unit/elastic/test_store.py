"""The TCPStore membership: compare-and-set, slots, values, and a server that stops answering."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic import plan
from elastic.errors import StoreKeyMissing, StoreUnavailable
from elastic.store import TCPStoreMembership
from tests.support.membership_network import member

FIRST = plan.first_view([member(0), member(1), member(2)], num_layers=2, num_logical=4)


@pytest.fixture
def server() -> Iterator[TCPStoreMembership]:
    store = TCPStoreMembership("127.0.0.1", 0, is_master=True, timeout_s=60.0)
    yield store
    store.close()


@pytest.fixture
def client(server: TCPStoreMembership) -> Iterator[TCPStoreMembership]:
    store = TCPStoreMembership("127.0.0.1", server.port, timeout_s=60.0)
    yield store
    store.close()


def test_record(server: TCPStoreMembership, client: TCPStoreMembership) -> None:
    assert client.read() is None
    assert client.compare_and_set(0, FIRST) == FIRST
    assert server.read() == FIRST
    second = plan.view_without(FIRST, [member(2).incarnation])
    other = plan.view_without(FIRST, [member(0).incarnation])
    assert server.compare_and_set(1, second) == second
    # The client still has the first record in mind: it must lose all the same.
    assert client.compare_and_set(1, other) == second
    assert client.compare_and_set(1, other) == second
    assert client.read() == second
    with pytest.raises(ValueError, match="follow"):
        client.compare_and_set(5, second)


def test_expecting_a_record_where_there_is_none(client: TCPStoreMembership) -> None:
    with pytest.raises(StoreUnavailable, match="no view record"):
        client.compare_and_set(1, plan.view_without(FIRST, []))
    assert client.read() is None


def test_one_of_many_wins_each_epoch(server: TCPStoreMembership) -> None:
    proposals = 6
    clients = [TCPStoreMembership("127.0.0.1", server.port) for _ in range(proposals)]
    server.compare_and_set(0, FIRST)
    wins: list[tuple[int, int]] = []
    barrier = threading.Barrier(proposals)

    def race(number: int) -> None:
        store = clients[number]
        for epoch in range(1, 9):
            barrier.wait(timeout=60)
            current = store.read()
            assert current is not None
            assert current.epoch == epoch
            barrier.wait(timeout=60)
            mine = plan.view_with(current, member(number, life=epoch))
            if store.compare_and_set(epoch, mine) == mine:
                wins.append((epoch, number))

    threads = [threading.Thread(target=race, args=(n,)) for n in range(proposals)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for store in clients:
        store.close()
    assert [epoch for epoch, _ in sorted(wins)] == list(range(1, 9))


def test_slots(server: TCPStoreMembership, client: TCPStoreMembership) -> None:
    assert client.claim_slot("a", 0, prefer=0) == 0
    assert client.claim_slot("b", 0, prefer=0) == 1
    assert server.claim_slot("a", 1, prefer=1) == 2
    assert server.claim_slot("c", 0, prefer=9) == 9
    # A restarted worker gets its slot again, whatever it prefers now.
    assert client.claim_slot("b", 0, prefer=0) == 1
    assert client.claim_slot("a", 1, prefer=7) == 2


def test_slots_claimed_at_once_are_different(server: TCPStoreMembership) -> None:
    clients = [TCPStoreMembership("127.0.0.1", server.port) for _ in range(6)]
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(clients[n].claim_slot(f"n{n}", 0, 0)))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for store in clients:
        store.close()
    assert sorted(found) == list(range(6))


def test_registrations(server: TCPStoreMembership, client: TCPStoreMembership) -> None:
    assert client.registrations() == {}
    client.register(member(4))
    server.register(member(0))
    client.register(member(4, life=1))
    assert server.registrations() == {0: member(0), 4: member(4, life=1)}


def test_exits(server: TCPStoreMembership, client: TCPStoreMembership) -> None:
    assert client.exits(["a", "b"]) == {}
    server.report_exit("b", "signal 9")
    assert client.exits(["a", "b"]) == {"b": "signal 9"}


def test_values(server: TCPStoreMembership, client: TCPStoreMembership) -> None:
    value = secrets.token_bytes(32)
    timer = threading.Timer(0.1, lambda: server.put("front/control", value))
    timer.start()
    assert client.get("front/control", timeout_s=60.0) == value
    timer.join()
    server.put("empty", b"")
    assert client.get("empty", timeout_s=60.0) == b""
    with pytest.raises(StoreKeyMissing, match="nothing"):
        client.get("nothing", timeout_s=0.05)


SERVE = """
import sys, time
from elastic.store import TCPStoreMembership
store = TCPStoreMembership("127.0.0.1", 0, is_master=True)
print(store.port, flush=True)
time.sleep(60)
"""


def _wait_until_stopped(pid: int) -> None:
    """A signal stops the threads of a process one after the other, not at once."""
    deadline = time.monotonic() + 60.0
    while True:
        found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        if all(status.rpartition(")")[2].split()[0] == "T" for status in found):
            return
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.leaves(
    "a thread that is blocked in the client of a stopped server, until it is killed"
)
def test_a_stopped_server_times_out_and_a_resumed_one_works_again() -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    store = TCPStoreMembership("127.0.0.1", int(process.stdout.readline()), timeout_s=5.0)
    try:
        store.compare_and_set(0, FIRST)
        os.kill(process.pid, signal.SIGSTOP)
        _wait_until_stopped(process.pid)
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer"):
            store.read()
        assert time.monotonic() - start < 60.0
        os.kill(process.pid, signal.SIGCONT)
        deadline = time.monotonic() + 60.0
        while True:
            try:
                assert store.read() == FIRST
                break
            except StoreUnavailable:
                assert time.monotonic() < deadline
        process.kill()
        process.wait(timeout=10)
        with pytest.raises(StoreUnavailable):
            store.read()
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()
        store.close()

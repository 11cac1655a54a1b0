"""Immediates are counted per peer, consumed as a whole, and every wait ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from transfer.errors import (
    EngineClosed,
    ImmediateTimeout,
    Interrupted,
    PeerLost,
    PeerUnknown,
    ProtocolViolation,
)
from transfer.immediates import PENDING_MAX, ImmediateBoard, ImmediateCounters
from transfer.signals import SignalChannel, SignalPoll

SOON_S = 60.0


class Peers:
    def __init__(self) -> None:
        self.lost: dict[str, str | None] = {"p": None, "q": None}
        self.ended: list[str] = []

    def why(self, name: str) -> str | None:
        if name not in self.lost:
            raise PeerUnknown(name)
        return self.lost[name]

    def end(self, channel: SignalChannel, evidence: str) -> None:
        self.ended.append(channel.peer)
        self.lost[channel.peer] = evidence


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def board(peers: Peers) -> Iterator[ImmediateBoard]:
    board = ImmediateBoard(lost=peers.why, on_signal_lost=peers.end)
    board.open()
    yield board
    board.close()


def soon() -> float:
    return time.monotonic() + SOON_S


def past() -> float:
    return time.monotonic() - 1


def in_thread(call: object, *args: object) -> threading.Timer:
    timer = threading.Timer(0.05, call, args)  # type: ignore[arg-type]
    timer.start()
    return timer


def sleeps_of(waiter: SignalPoll | threading.Condition) -> list[float]:
    """How long its waits may last at most, in seconds, from now on."""
    found: list[float] = []
    inner = waiter.wait

    def wait(timeout_s: float) -> object:
        found.append(timeout_s)
        return inner(timeout_s)

    waiter.wait = wait  # type: ignore[method-assign, assignment]
    return found


def test_counters_keep_peers_and_immediates_apart() -> None:
    counters = ImmediateCounters()
    counters.add("p", [1, 1, 2])
    counters.add("q", [1])
    wanted = {("p", 1): 2, ("q", 1): 1}
    assert counters.missing(wanted) == []
    assert counters.missing({("p", 1): 3, ("q", 2): 1}) == [("p", 1), ("q", 2)]
    counters.consume(wanted)
    assert [counters.count(*key) for key in (("p", 1), ("q", 1), ("p", 2))] == [0, 0, 1]
    counters.drop("p")
    assert counters.count("p", 2) == 0


def test_counters_refuse_to_grow_without_end() -> None:
    with pytest.raises(ProtocolViolation):
        ImmediateCounters().add("p", range(PENDING_MAX + 1))


def test_expect_consumes_only_what_it_wants(board: ImmediateBoard) -> None:
    board.count("p", [5] * 3)
    board.expect({("p", 5): 2}, soon())
    assert board.arrived({("p", 5): 1})
    assert not board.arrived({("p", 5): 2})
    with pytest.raises(ImmediateTimeout) as caught:
        board.expect({("p", 5): 1, ("q", 5): 1}, past())
    assert caught.value.missing == (("q", 5),)
    assert board.arrived({("p", 5): 1}), "a wait that failed took nothing"


def test_a_count_of_zero_is_there_already(board: ImmediateBoard) -> None:
    board.expect({("p", 1): 0}, past())
    board.expect({}, past())


def test_arrivals_from_another_thread_end_a_wait(board: ImmediateBoard) -> None:
    timer = in_thread(board.count, "p", [7])
    board.expect({("p", 7): 1}, soon())
    timer.join()


def test_a_lost_peer_ends_the_wait_only_of_those_it_owes(
    board: ImmediateBoard, peers: Peers
) -> None:
    board.count("p", [1])
    peers.lost["p"] = "it burnt"
    board.expect({("p", 1): 1}, soon())
    with pytest.raises(PeerLost, match="it burnt"):
        board.expect({("p", 1): 1, ("q", 1): 1}, soon())
    with pytest.raises(PeerUnknown):
        board.expect({("stranger", 1): 1}, soon())


def test_interrupt_is_sticky_and_comes_first(board: ImmediateBoard) -> None:
    board.count("p", [1])
    board.interrupt("new view")
    for _ in range(2):
        with pytest.raises(Interrupted, match="new view"):
            board.expect({("p", 1): 1}, soon())
        with pytest.raises(Interrupted):
            board.wait_any([("p", 1)], soon())
        with pytest.raises(Interrupted):
            board.arrived({("p", 1): 1})
    board.resume()
    board.expect({("p", 1): 1}, soon())


def test_interrupt_ends_a_wait_in_progress(board: ImmediateBoard) -> None:
    timer = in_thread(board.interrupt, "stop")
    with pytest.raises(Interrupted):
        board.expect({("p", 1): 1}, soon())
    timer.join()


def test_wake_ends_one_wait_any_early_and_is_remembered(board: ImmediateBoard) -> None:
    board.wake()
    assert board.wait_any([("p", 1)], soon()) is False
    started = time.monotonic()
    assert board.wait_any([("p", 1)], time.monotonic() + 0.05) is False
    assert time.monotonic() - started >= 0.04, "one wake ends one wait"
    timer = in_thread(board.wake)
    assert board.wait_any([("p", 1)], soon()) is False
    timer.join()


def test_wait_any_sees_one_of_many_and_consumes_nothing(board: ImmediateBoard) -> None:
    board.count("q", [3])
    assert board.wait_any([("p", 1), ("q", 3)], soon())
    assert board.wait_any([("q", 3)], soon())


def test_signals_are_read_by_the_waiting_thread(board: ImmediateBoard, peers: Peers) -> None:
    ours, theirs = socket.socketpair()
    channel = SignalChannel(ours, "p")
    board.poll.add(channel)
    sender = SignalChannel(theirs, "me")
    timer = in_thread(sender.send, 9, soon())
    board.expect({("p", 9): 1}, soon())
    timer.join()
    for _ in range(100):
        assert sender.send(4, soon())
    sender.close()
    board.expect({("p", 4): 100}, soon())
    assert not board.wait_any([("p", 4)], time.monotonic() + 0.05)
    assert peers.ended == ["p"]
    channel.close()


def test_an_end_of_the_socket_ends_the_wait_at_once(board: ImmediateBoard, peers: Peers) -> None:
    ours, theirs = socket.socketpair()
    channel = SignalChannel(ours, "p")
    board.poll.add(channel)
    timer = in_thread(theirs.close)
    with pytest.raises(PeerLost):
        board.expect({("p", 4): 1}, soon())
    timer.join()
    channel.close()


def test_a_full_signal_socket_gives_up_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    sender = SignalChannel(ours, "p")
    started = time.monotonic()
    count = 0
    while sender.send(count, time.monotonic() + 0.1):
        count += 1
        assert count < 1 << 22
    assert time.monotonic() - started < SOON_S
    receiver = SignalChannel(theirs, "me")
    received: list[int] = []
    while found := receiver.receive():
        received.extend(found)
    assert received == list(range(count)), "giving up tore nothing"
    assert sender.send(1, soon())
    sender.close()
    receiver.close()


def test_several_threads_may_wait(board: ImmediateBoard) -> None:
    failures: list[BaseException] = []

    def wait(immediate: int) -> None:
        try:
            for _ in range(50):
                board.expect({("p", immediate): 1}, soon())
        except Exception as error:  # noqa: BLE001 - the main thread shows it
            failures.append(error)

    ours, theirs = socket.socketpair()
    channel, sender = SignalChannel(ours, "p"), SignalChannel(theirs, "me")
    board.poll.add(channel)
    threads = [threading.Thread(target=wait, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for i in range(200):
        assert sender.send(i % 4, soon())
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert failures == []
    channel.close()
    sender.close()


def test_close_ends_waits(board: ImmediateBoard) -> None:
    timer = in_thread(board.close)
    with pytest.raises(EngineClosed):
        board.expect({("p", 1): 1}, soon())
    timer.join()


def test_no_wait_of_many_misses_its_signal(board: ImmediateBoard) -> None:
    """Whoever polls may leave at any moment; those who follow must never sleep on."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    receiver, sender = SignalChannel(theirs, "p"), SignalChannel(ours, "p")
    board.poll.add(receiver)
    rounds, threads = 200, 4
    polled, followed = sleeps_of(board.poll), sleeps_of(board._changed)

    def wait(number: int) -> None:
        for i in range(rounds):
            board.expect({("p", number * rounds + i): 1}, soon())
            assert sender.send(
                (number + 1) % threads * rounds + i + (number + 1 == threads), soon()
            )

    workers = [threading.Thread(target=wait, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    assert sender.send(0, soon())
    for worker in workers:
        worker.join(SOON_S)
        assert not worker.is_alive()
    board.poll.remove(receiver)
    receiver.close()
    sender.close()
    assert polled
    assert followed
    # Whoever sleeps would do so until the deadline: nobody looks again by the clock.
    assert min(*polled, *followed) > SOON_S / 2

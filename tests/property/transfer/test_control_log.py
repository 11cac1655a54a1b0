"""Two control logs over sockets that break at any moment: nothing is lost, nothing comes twice."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.connections.control_log import ControlLog
from transfer.errors import ProtocolViolation

BYTES_MAX = 400


class Side:
    """What one side has sent and delivered, and what is on its way to it."""

    def __init__(self) -> None:
        self.log = ControlLog(BYTES_MAX)
        self.sent: list[bytes] = []
        self.delivered: list[bytes] = []
        self.coming: deque[bytes | int] = deque()


class Pair:
    """Both, and a socket that may be cut: then what is on its way is lost."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.sides = (Side(), Side())
        self.stands = True
        self.now = 0.0

    def send(self, which: int, nbytes: int) -> None:
        side = self.sides[which]
        content = len(side.sent).to_bytes(4, "big") + bytes(nbytes)
        side.sent.append(content)
        side.log.append((b"head", content), self.now)
        if self.stands:
            self.sides[1 - which].coming.append(content)

    def deliver(self, which: int, count: int) -> None:
        side = self.sides[which]
        for _ in range(min(count, len(side.coming))):
            item = side.coming.popleft()
            if isinstance(item, int):
                side.log.confirm(item, self.now)
            else:
                side.log.receive(len(item))
                side.delivered.append(item)

    def tell(self, which: int) -> None:
        if self.stands and self.sides[which].log.owes_word:
            self.sides[1 - which].coming.append(self.sides[which].log.tell())

    def cut(self) -> None:
        self.stands = False
        for side in self.sides:
            # Any part of what is on its way may still come.
            for _ in range(self.rng.randint(0, len(side.coming)) if side.coming else 0):
                self.deliver(self.sides.index(side), 1)
            side.coming.clear()

    def resume(self) -> None:
        if self.stands:
            self.cut()
        counts = [side.log.tell() for side in self.sides]
        self.stands = True
        for which, side in enumerate(self.sides):
            side.log.confirm(counts[1 - which], self.now)
            self.sides[1 - which].coming.extend(content for _, content in side.log.unconfirmed())

    def check(self) -> None:
        for which, side in enumerate(self.sides):
            other = self.sides[1 - which]
            assert side.delivered == other.sent[: len(side.delivered)], "in order, each once"
            assert side.log.num_received == len(side.delivered)
            assert side.log.num_sent == len(side.sent)
            assert len(side.log.unconfirmed()) >= len(side.sent) - len(other.delivered)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 1), st.integers(0, 300)),
        st.tuples(st.just("deliver"), st.integers(0, 1), st.integers(1, 5)),
        st.tuples(st.just("tell"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("cut"), st.just(0), st.just(0)),
        st.tuples(st.just("resume"), st.just(0), st.just(0)),
    ),
    max_size=120,
)


@settings(deadline=None)
@given(STEPS, st.integers(0, 2**32))
def test_whatever_is_cut_all_frames_come_once(steps: list[tuple[str, int, int]], seed: int) -> None:
    pair = Pair(seed)
    for what, which, amount in steps:
        match what:
            case "send":
                pair.send(which, amount)
            case "deliver":
                pair.deliver(which, amount)
            case "tell":
                pair.tell(which)
            case "cut":
                pair.cut()
            case _:
                pair.resume()
        pair.check()
    pair.resume()
    for which in (0, 1):
        pair.deliver(which, 10_000)
        assert pair.sides[which].delivered == pair.sides[1 - which].sent, seed
        pair.tell(which)
    for which in (0, 1):
        pair.deliver(which, 10_000)
        log = pair.sides[which].log
        assert log.unconfirmed() == []
        assert not log.is_full
        assert not log.is_silent(1e9, 0.0), "nothing is owed to who has sent nothing"


def test_the_log_is_bounded_and_says_so() -> None:
    log = ControlLog(BYTES_MAX)
    log.append((b"h", bytes(BYTES_MAX)), 5.0)
    assert log.is_full
    assert not log.is_flooded
    assert not log.is_silent(5.9, 1.0)
    assert log.is_silent(6.1, 1.0)
    log.append((b"h", bytes(3 << 20)), 6.0)
    assert log.is_flooded
    log.confirm(1, 6.2)
    assert not log.is_silent(7.1, 1.0), "it has said something"
    log.confirm(2, 6.3)
    assert not log.is_full


@pytest.mark.parametrize("count", [0, 3, 1 << 60])
def test_confirmations_that_cannot_be_are_violations(count: int) -> None:
    log = ControlLog(BYTES_MAX)
    for _ in range(2):
        log.append((b"h", b""), 0.0)
    log.confirm(1, 0.0)
    with pytest.raises(ProtocolViolation):
        log.confirm(count, 0.0)

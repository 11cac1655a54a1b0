"""Experts read from peers by the real engine: shared out, verified, and without the absent."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from configs.schema import TransferConfig
from elastic.expert_server import ExpertServer, Slabs
from elastic.expert_source import EachExpert, ExpertId, ExpertLoader, place_of
from elastic.peer_experts import PeerExpertSource
from tests.support.small_bank import SmallBank, bytes_of
from transfer import PeerLost, Transfer, TransferEngine, TransferError, allocate

NBYTES = 3000
SECRET = secrets.token_bytes(16)


class Rank:
    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self.engine = TransferEngine(TransferConfig(), name=self.name, secret=SECRET)
        self.bank = SmallBank(NBYTES, allocate)
        self.peers: list[str] = []
        self.slabs = Slabs(self.engine, self.bank)
        self.server = ExpertServer(self.engine, self.bank, self.slabs)
        self.source = PeerExpertSource(
            self.engine, self.bank, self.slabs, peers=lambda: self.peers, reply_timeout_s=8.0
        )
        self.engine.open()
        self.server.open()

    def hold(self, experts: list[ExpertId]) -> None:
        for expert in experts:
            self.bank.reserve(*expert).copy_(bytes_of(expert, NBYTES))
            self.bank.ready(*expert)

    def close(self) -> None:
        self.server.close()
        self.slabs.close()
        self.engine.close()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made = [Rank() for _ in range(3)]
    reader = made[0]
    for other in made[1:]:
        reader.engine.connect(other.engine.address)
        reader.peers.append(other.name)
    yield made
    for rank in made:
        rank.close()


def from_disk(rank: Rank) -> EachExpert:
    def fill(layer: int, logical: int, blob: object) -> bool:
        place_of(rank.bank, (layer, logical)).copy_(bytes_of((layer, logical), NBYTES))
        return True

    return EachExpert("disk", rank.bank, fill)


def check(rank: Rank, experts: list[ExpertId]) -> None:
    for expert in experts:
        assert rank.bank.has(*expert)
        assert place_of(rank.bank, expert).equal(bytes_of(expert, NBYTES)), expert


def test_read_from_both_and_the_rest_from_disk(ranks: list[Rank]) -> None:
    reader, one, two = ranks
    experts = [(layer, e) for layer in range(3) for e in range(8)]
    random.shuffle(experts)
    one.hold(experts[:14])
    two.hold(experts[8:20])
    served = ExpertLoader(reader.bank, [reader.source, from_disk(reader)]).load(experts)
    check(reader, experts)
    assert {name: len(found) for name, found in served.by_source.items()} == {"peer": 20, "disk": 4}
    again = ExpertLoader(reader.bank, [reader.source]).load(experts)
    assert set(again.by_source) == {"local"}


def test_what_is_not_what_it_should_be_is_refused(ranks: list[Rank]) -> None:
    reader, one, _ = ranks
    one.hold([(0, 0), (0, 1)])
    assert reader.source.fetch([]) == []
    first = ExpertLoader(reader.bank, [reader.source]).load([(0, 0)])
    assert set(first.by_source) == {"peer"}
    # The holder's memory is taken for something else after it said what it has.
    one.server._checksums[0, 1] = one.server._look((0, 1))[3]  # type: ignore[index]
    place_of(one.bank, (0, 1))[1234] ^= 1
    served = ExpertLoader(reader.bank, [reader.source, from_disk(reader)]).load([(0, 1)])
    assert set(served.by_source) == {"disk"}
    check(reader, [(0, 1)])


def test_a_peer_that_does_not_answer_is_not_waited_for_long(ranks: list[Rank]) -> None:
    reader, one, two = ranks
    one.server.close()
    one.server._thread = None
    two.hold([(1, 1)])
    served = ExpertLoader(reader.bank, [reader.source, from_disk(reader)]).load([(1, 1), (1, 2)])
    assert served.by_source == {"peer": ((1, 1),), "disk": ((1, 2),)}
    check(reader, [(1, 1), (1, 2)])


def test_a_lost_peer_is_skipped(ranks: list[Rank]) -> None:
    reader, one, two = ranks
    one.hold([(0, 3)])
    two.hold([(0, 4)])
    one.engine.close()
    served = ExpertLoader(reader.bank, [reader.source, from_disk(reader)]).load([(0, 3), (0, 4)])
    assert served.by_source == {"peer": ((0, 4),), "disk": ((0, 3),)}
    check(reader, [(0, 3), (0, 4)])


class Held:
    """A read that ends when it is waited for, and not before."""

    def __init__(self, start: Callable[[], Transfer], failure: TransferError | None) -> None:
        self.start, self.failure, self.waited = start, failure, False

    def wait(self, timeout_s: float | None = None) -> None:
        self.waited = True
        if self.failure is not None:
            raise self.failure
        self.start().wait(timeout_s)


@pytest.mark.parametrize("at_the_start", [False, True])
def test_a_read_that_fails_leaves_none_under_way(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, at_the_start: bool
) -> None:
    """The next source fills the same places: nothing may land there after it."""
    reader, one, _ = ranks
    experts = [(0, e) for e in range(8)] + [(1, e) for e in range(4)]  # in three slabs
    one.hold(experts)
    read, begun = reader.engine.read, []
    failing = random.randrange(3)

    def hold(*args: Any, **options: Any) -> Held:
        failure = PeerLost("member", "cut") if len(begun) == failing else None
        if failure is not None and at_the_start:
            raise failure
        begun.append(Held(lambda: read(*args, **options), failure))
        return begun[-1]

    monkeypatch.setattr(reader.engine, "read", hold)
    served = ExpertLoader(reader.bank, [reader.source, from_disk(reader)]).load(experts)
    assert set(served.by_source) == {"disk"}
    assert len(begun) == (failing if at_the_start else 3)
    assert all(held.waited for held in begun)
    check(reader, experts)


def test_keys_are_given_back(ranks: list[Rank]) -> None:
    reader, one, _ = ranks
    one.hold([(2, 2)])
    ExpertLoader(reader.bank, [reader.source]).load([(2, 2)])
    for _ in range(500):
        if not one.server._given:
            break
        time.sleep(0.01)
    assert not one.server._given
